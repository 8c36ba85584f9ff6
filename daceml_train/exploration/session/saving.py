"""A session's steps as a file: a pipeline with notes for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from daceml_train.errors import Invalid
from daceml_train.exploration.session.steps import Step
from daceml_train.passes import files
from daceml_train.passes.pipeline import Pipeline


def write(path: Path, pipeline: Pipeline, steps: Sequence[Step], about: str) -> Path:
    """Write a pipeline whose passes are the steps, in their order, in the format of the path's suffix."""
    levels = dict(pipeline.passes)
    remarks = {place: _remark(step) for place, step in enumerate(steps)}
    if path.suffix == ".json":
        text = files.to_json(levels, {"about": about, "steps": list(remarks.values())})
    elif path.suffix == ".py":
        text = files.to_python(
            levels, [about, "", "`daceml-train replay` applies it; a program imports PIPELINE."], remarks
        )
    elif path.suffix == ".txt":
        text = f"# {about}\n{pipeline}\n"
    else:
        raise Invalid(f"a pipeline is saved as .json, .txt or .py, given {path.name!r}")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Invalid(f"the pipeline cannot be written: {error}") from None
    return path


def _remark(step: Step) -> str:
    """What a step did, on one line."""
    before, after = step.bytes
    place = f"{step.source}, " if step.source else ""
    text = f"{place}{after - before:+,} bytes" if before != after else f"{place}the bytes stay"
    return " ".join(text.split())
