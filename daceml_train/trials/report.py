"""The report of a search: the tree of stages, who trained what, and what merging saved."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import Any

from daceml_train.reporting import page
from daceml_train.trials import report_page
from daceml_train.trials.checkpoints import Point
from daceml_train.trials.tree import Stage, Tree

ROWS = 60
"""How many stages a printed tree shows."""


@dataclass(frozen=True)
class Worker:
    """What one process trained."""

    name: str
    stages: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class End:
    """A number of steps at which a trial of a run wants a value, the key of the point, and the value."""

    run: str
    trial: int
    steps: int
    key: str
    value: Any


@dataclass(frozen=True, repr=False)
class Report:
    """What a search asked for and what was trained, as text, or as a page: `report.save("search.html")`."""

    tree: Tree
    requested: int
    steps: int
    seconds: float
    workers: tuple[Worker, ...]
    twice: int
    """Steps that were trained more than once: after a killed process, or where a fork was not known in time."""
    unsaved: int
    rows: tuple[Mapping[str, Any], ...] = ()
    """The stages that were trained, each once, in the order of their beginnings."""
    ends: tuple[End, ...] = ()
    """What was asked for, in order."""

    @classmethod
    def of(
        cls,
        tree: Tree,
        records: Iterable[Mapping[str, Any]],
        worker: str,
        unsaved: int,
        values: Callable[[Point], tuple[bool, Any]] = lambda point: (False, None),
    ) -> Report:
        """The report of what was recorded, of which `worker` is this process; `values` are those of points."""
        records = list(records)
        own = [{"at": 0.0, "settings": (), **record} for record in records if "key" in record]
        asked = {(r["run"], r["trial"], r["until"], r["point"]): r["requested"] for r in records if "requested" in r}
        requested = sum(asked.values())
        by_worker: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for record in own:
            by_worker[record["worker"]].append(record)
        workers = tuple(Worker(name, len(rows), _steps(rows), _seconds(rows)) for name, rows in by_worker.items())
        steps = _steps(own)
        by_key = {record["key"]: record for record in sorted(own, key=lambda record: -record["at"])}
        here = _steps(record for record in own if record["worker"] == worker)
        twice = max(steps - _steps({record["key"]: record for record in own}.values()), here - tree.steps(), 0)
        rows = tuple(sorted(by_key.values(), key=lambda record: record["at"]))
        ends = tuple(End(r, n, until, key, values((until, key))[1]) for r, n, until, key in asked)
        return cls(tree, requested, steps, _seconds(own), workers, twice, unsaved, rows, ends)

    @property
    def ratio(self) -> float:
        """How many times fewer steps were trained."""
        return self.requested / max(self.steps, 1)

    @functools.cached_property
    def trained(self) -> dict[str, str]:
        """The key at the end of a stage, and who trained it."""
        return {row["key"]: row["worker"] for row in self.rows}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<{next(self.lines())}>"

    def to_html(self) -> str:
        """A page without scripts, which loads nothing: the tree, the processes over time, and the values of trials."""
        return page.whole("Search by stages", report_page.fragment(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report: a page for `.html`, or text for any other ending."""
        file = Folder(path)
        file.write_text(self.to_html() if file.suffix == ".html" else f"{self}\n", encoding="utf-8")

    def _repr_html_(self) -> str:
        return report_page.fragment(self)

    def lines(self) -> Iterator[str]:
        """The page line by line."""
        yield (
            f"{self.requested:,} steps asked for, {self.steps:,} trained in {self.seconds:.2f} s, "
            f"{self.ratio:.2f} times fewer"
        )
        if self.twice:
            yield f"{self.twice:,} of them a second time: no checkpoint was kept where trials parted, or it was lost"
        if self.unsaved:
            yield f"{self.unsaved} checkpoints could not be written"
        for worker in self.workers:
            yield f"  {worker.name}: {worker.stages} stages, {worker.steps:,} steps, {worker.seconds:.2f} s"
        rows = [(stage, depth) for child in self.tree.root.children for stage, depth in _deep(child, 0)]
        for stage, depth in rows[:ROWS]:
            yield f"{'  ' * depth}{self._row(stage)}"
        if len(rows) > ROWS:
            yield f"... and {len(rows) - ROWS} more stages"

    def _row(self, stage: Stage) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in stage.path.settings(stage.start))
        later = len(list(stage.path.between(stage.start, stage.end))) - 1
        changes = f", {later} change{'s' * (later != 1)}" if later else ""
        trials = f"  trials {', '.join(map(str, sorted(stage.trials)))}" if stage.trials else ""
        who = self.trained.get(stage.key, "")
        return f"{stage.start}-{stage.end}: {settings}{changes}{trials}{f'  [{who}]' if len(self.workers) > 1 else ''}"


def _steps(rows: Iterable[Mapping[str, Any]]) -> int:
    return sum(row["end"] - row["start"] for row in rows)


def _seconds(rows: Iterable[Mapping[str, Any]]) -> float:
    return float(sum(row["seconds"] for row in rows))


def _deep(stage: Stage, depth: int) -> Iterator[tuple[Stage, int]]:
    yield stage, depth
    for child in stage.children:
        yield from _deep(child, depth + (1 if stage.is_fork else 0))


__all__ = ["Report", "Worker"]
