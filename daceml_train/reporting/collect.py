"""report: everything known about compiled programs, in one place."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.nn import Module

from daceml_train.driver.background import BackgroundStep
from daceml_train.driver.by_torch_compile import compiled_by
from daceml_train.driver.module import Backend, state_of
from daceml_train.driver.optimizer_updates import reasons as update_reasons
from daceml_train.driver.records import Record
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import Invalid
from daceml_train.frontends.torch.capture.eager_traffic import eager_traffic
from daceml_train.reporting import page, text, trace
from daceml_train.reporting.functions import functions_of
from daceml_train.reporting.model import Contents, Eager
from daceml_train.reporting.scaling import Profile, Scaling, profile, simulated
from daceml_train.runtime.links import Link
from daceml_train.runtime.roofline import machine
from daceml_train.runtime.timing import Timing
from daceml_train.storage.folders import cache_folder
from daceml_train.storage.named_by_user import file_of, write_text

PICTURES = frozenset({".pdf", ".png", ".svg", ".jpg", ".jpeg"})
"""Endings of files as which no report is written."""
RUNS = 10
"""The default number of measured runs."""


@dataclass(frozen=True)
class Report(Contents):
    """The result of `report`. Printed, it is a table; a notebook shows it as HTML.

    `scaling` is the simulated step on many ranks, if it was asked for.
    """

    scaling: Scaling | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The report as a JSON text."""
        return json.dumps(self.as_dict(), indent=1)

    def to_html(self) -> str:
        """The report as one HTML page that loads nothing from elsewhere."""
        return page.document(self)

    def trace(self) -> dict[str, Any]:
        """The measured launches as events for chrome://tracing and Perfetto."""
        return trace.events(self)

    def save(self, path: Path | str) -> None:
        """Write the report: `.html`, `.json`, or text for any other ending.

        Raises `Invalid` for the ending of a picture or a PDF.
        """
        path = file_of(path, "the report")
        if path.suffix.lower() in PICTURES:
            raise Invalid(f"a report is not written as {path.suffix}", advice="give a path that ends in .html or .json")
        if path.suffix == ".html":
            result = self.to_html()
        else:
            result = (self.to_json() if path.suffix == ".json" else str(self)) + "\n"
        write_text(path, result, "the report")

    def __str__(self) -> str:
        return "\n".join([*text.lines(self), *(self.scaling.lines() if self.scaling else ())])

    def _repr_html_(self) -> str:
        return page.fragment(self)


def _check_calls(run: Any, eager: Any, runs: Any) -> None:
    for name, function in (("run", run), ("eager", eager)):
        if function is not None and not callable(function):
            given = type(function).__name__
            raise Invalid(f"{name} is a function that is called, given {given}", advice=f"{name}=lambda: step(x, y)")
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise Invalid(f"runs is a positive whole number, given {runs!r}")


def report(
    compiled: Any,
    run: Callable[[], object] | None = None,
    *,
    eager: Callable[[], object] | None = None,
    runs: int = RUNS,
    ranks: int | None = None,
    link: Link | None = None,
) -> Report:
    """A report on a module from `optimize`, a step from `training_step`, or what `torch.compile` returned.

    `run`, which calls `compiled`, is called `runs` times and once before, to measure each launch; `eager` does the
    same in PyTorch and is called once, to count what PyTorch moves (state that is created once should exist by then).
    With `ranks` and `link`, the report has the simulated time of a step on so many ranks, each of which has as many
    rows as this process, between which all links are like `link`; `daceml-train links` measures those of this machine.
    The launches take what `run` measured, or what the machine's roofline allows.
    Raises `Invalid` for other objects. Before the first call there is nothing to report, and the report says so.
    """
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise Invalid(f"ranks is a positive number, given {ranks!r}")
    if (ranks is None) != (link is None) or not isinstance(link, Link | None):
        raise Invalid("a simulation on many ranks needs ranks= and link=, a daceml_train.Link")
    _check_calls(run, eager, runs)
    if ranks is not None and not isinstance(compiled, TrainingStep):
        raise Invalid(f"ranks= simulates a training step, given {type(compiled).__name__}")
    kind, name, _ = _reported(compiled)

    def records() -> list[Record]:
        own = compiled.records if isinstance(compiled, TrainingStep) else []
        pieces = _reported(compiled)[2]
        return [*own, *(pieces.records if pieces else ())]

    theirs = _eager(eager) if eager is not None else None
    calls: list[float] = []
    if run is not None:
        run()
        with _timed(records()):
            for _ in range(runs):
                start = time.perf_counter()
                run()
                calls.append(time.perf_counter() - start)
            functions = functions_of(records())
    else:
        functions = functions_of(records())
    here = bool(functions) and all(function.device == "cpu" for function in functions)  # the machine is the processor
    found = machine(cache_folder()) if (run is not None or ranks is not None) and here else None
    pieces = _reported(compiled)[2]  # `torch.compile` has a backend from the first call on
    own = compiled.breaks if isinstance(compiled, TrainingStep) else []
    breaks = [*own, *(pieces.breaks if pieces else ())]
    if isinstance(trained := compiled.model if isinstance(compiled, TrainingStep) else compiled, Module):
        breaks += update_reasons(trained)
    divided = reasons(pieces.graph_breaks if pieces else ())
    captured = list(compiled.cuda_graphs.values()) if isinstance(compiled, TrainingStep) else []
    messages = [graphs.messages() for graphs in captured]
    messages += [graphs.messages() for graphs in (pieces.cuda_graphs if pieces else ())]
    cuda_graphs = tuple(dict.fromkeys(line for lines in messages for line in lines))
    known = compiled.paths.values() if isinstance(compiled, TrainingStep) else ()
    ways = tuple(line for paths in known if paths.calls for line in paths.lines())
    scaling = None
    if ranks is not None and link is not None and functions:
        launches = functions[-1].launches
        dense, rows = compiled.gradient_bytes()
        clipped = compiled.clipping.norm is not None
        template = Profile(0.0, 0.0, 0.0, dense, rows, clipped, compiled.shards)
        if calls and all(launch.seconds is not None for launch in launches):
            inside = sum(launch.seconds or 0.0 for launch in launches)
            own_part = statistics.median(compiled.ranks.spent) if compiled.ranks and compiled.ranks.spent else 0.0
            host = max(0.0, statistics.median(calls) - inside)
            template = replace(template, exchange=own_part, host=host)
        scaling = simulated(*profile(launches, found, template), ranks, link)
    events = tuple(compiled.beginning) if isinstance(compiled, TrainingStep) else ()
    events += tuple(compiled.compilation) if isinstance(compiled, BackgroundStep) else ()
    parts = kind, name, functions, reasons(breaks), theirs, found, cuda_graphs, ways, events, divided
    return Report(*parts, scaling=scaling)


def _reported(compiled: Any) -> tuple[str, str, Backend | None]:
    """What a report is on: its kind, its name, and the backend of what is not one program. Raises `Invalid`."""
    if isinstance(compiled, TrainingStep):
        state = state_of(compiled.pieces)
        name = f"{type(compiled.model).__name__}, {type(compiled.optimizer).__name__}"
        return "training step", name, state.backend if state else None
    if (state := state_of(compiled)) is not None:
        return "module", state.source.__name__, state.backend
    given = (
        f"{'the class ' if isinstance(compiled, type) else ''}{getattr(compiled, '__name__', type(compiled).__name__)}"
    )
    if (found := compiled_by(compiled)) is not None:
        name, compiler, backend = found
        if compiler == "daceml_train":
            return "module", name, backend
        given = f"what torch.compile made of {name} with the backend {compiler!r}"
    advice = 'call report on that object, or on what torch.compile(model, backend="daceml_train") returned'
    raise Invalid(f"report takes what `optimize` or `training_step` returned, given {given}", advice=advice)


@contextmanager
def _timed(records: Sequence[Record]) -> Iterator[None]:
    """Within this context, the launches of these programs are measured."""
    executables = [r.executable for r in records if r.executable is not None]
    for executable in executables:
        executable.time(Timing())
    try:
        yield
    finally:
        for executable in executables:
            executable.time(None)


def _eager(function: Callable[[], object]) -> Eager:
    moved = eager_traffic(function)
    sizes = {label: int(size) for label, size in moved.by_label().items()}
    largest = dict(sorted(sizes.items(), key=lambda pair: -pair[1]))
    return Eager(int(moved.bytes), int(moved.flops), len(moved.entries), largest)


def reasons(breaks: Sequence[str]) -> tuple[str, ...]:
    """Each reason once and on one line, without TorchDynamo's hints to its developers."""
    lines = ([line.strip() for line in reason.splitlines()] for reason in breaks)
    kept = (" ".join(line for line in of if line and not line.startswith("Hint:")) for of in lines)
    return tuple(dict.fromkeys(kept))
