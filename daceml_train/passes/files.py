"""Files that hold a pipeline: text, JSON, or Python source; read as data, never run.

The JSON may be that of `Pipeline.to_json`, or the same under `levels` with a format, a version and notes for people.
The Python form is a module that users may import; only its single text literal is read here.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from daceml_train.errors import Invalid
from daceml_train.passes import notation
from daceml_train.passes.base import Pass

FORMAT, VERSION = "daceml_train pipeline", 1
LARGEST = 4 << 20
"""Size limit of a file, in bytes."""
ENDINGS = (".json", ".txt", ".py")
NAME = "PIPELINE"
"""The name of the pipeline in the Python form."""


def read(path: Path) -> dict[str, tuple[Pass, ...]]:
    """The passes of each level in a file. Raises `Invalid`, which names the file, for anything else."""
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise Invalid(f"{path} has {size:,} bytes; no pipeline is larger than {LARGEST:,}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Invalid(f"the pipeline's file cannot be read: {error}") from None
    except UnicodeDecodeError:
        raise Invalid(f"{path} is not a text file") from None
    try:
        if path.suffix == ".json":
            return from_json(text)
        return notation.parse(_literal(text) if path.suffix == ".py" else text)
    except Invalid as error:
        error.add_note(f"in {path}")
        raise


def from_json(text: str) -> dict[str, tuple[Pass, ...]]:
    """The passes of each level in JSON with or without format and version."""
    try:
        entries = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"the pipeline is not JSON: {error}") from None
    if isinstance(entries, dict) and {"kind", "functions", "breaks"} <= entries.keys():
        advice = "`daceml-train diff` compares reports; Session.save and Pipeline.to_json write pipelines"
        raise Invalid("the file is a report, not a pipeline", advice=advice)
    if not isinstance(entries, dict) or not {"format", "version"} & entries.keys():
        return notation.from_entries(entries)
    if entries.get("format") != FORMAT:
        raise Invalid(f"the file's format is {entries.get('format')!r}, not {FORMAT!r}")
    if entries.get("version") != VERSION:
        raise Invalid(
            f"the pipeline's version is {entries.get('version')!r}, this package reads {VERSION}",
            advice="use the package that wrote it, or save it again",
        )
    if unknown := entries.keys() - {"format", "version", "notes", "levels"}:
        raise Invalid(f"a pipeline's file has no entry {sorted(unknown)[0]!r}")
    return notation.from_entries(entries.get("levels"))


def to_json(levels: notation.Levels, notes: Mapping[str, Any]) -> str:
    """The levels with format, version and notes."""
    entries = {"format": FORMAT, "version": VERSION, "notes": notes, "levels": notation.to_entries(levels)}
    return json.dumps(entries, indent=1) + "\n"


def to_python(levels: notation.Levels, about: Sequence[str], remarks: Mapping[int, str]) -> str:
    """A Python module with the pipeline as its text; `remarks` describes the effects of passes, by position."""
    lines, place = [], 0
    for level, passes in levels.items():
        lines.append(f"{level}:")
        for p in passes:
            remark = f"  # {remarks[place]}" if remarks.get(place) else ""
            lines.append(f"    {p},{remark}")
            place += 1
    text = "\n".join(lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    told = "\n".join(about).replace("\\", "\\\\").replace('"', "'")
    return f'"""{told}\n"""\n\nimport daceml_train as dt\n\n{NAME} = dt.Pipeline.parse("""\n{text}\n""")\n'


def _literal(source: str) -> str:
    """The text in the Python form. The file is not executed; a file with any other content is refused."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Invalid(f"the pipeline is not Python source: {error}") from None
    found: list[str] = []
    for statement in body:
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):
                continue
            case ast.Import(names=[ast.alias(name="daceml_train", asname="dt")]):
                continue
            case ast.Assign(
                targets=[ast.Name(id="PIPELINE")],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="dt"), attr="Pipeline"), attr="parse"),
                    args=[ast.Constant(value=str() as text)],
                    keywords=[],
                ),
            ):
                found.append(text)
            case _:
                raise Invalid(
                    f"line {statement.lineno} is code; only the text of {NAME} is read from Python files",
                    advice=f"import the module yourself and pass on its {NAME}",
                )
    if len(found) != 1:
        raise Invalid(f"a Python file must assign {NAME} = dt.Pipeline.parse(text) once, not {len(found)} times")
    return found[0]
