"""A step on a processor with many cores, simulated from the measured seconds of its launches on one thread.

A launch on `p` of the cores takes `slow * seconds / min(p, most) + fork + join * log2(p)`; on one of them, without the
last two. `most` is how far it scales: kernels and calls share out a certain number of operations per thread, and what
moves more than fits a cache, with few operations per byte, is limited by memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from daceml_train.errors import Invalid
from daceml_train.lowering.lanes import Task, bound, shortest
from daceml_train.reporting.model import Launched
from daceml_train.reporting.numbers import counted, seconds_text

GRAIN = {"kernel": 32768, "call": 65536}
"""Operations per thread below which a kernel, or a library call, does not scale."""
STREAMED, INTENSITY, CHANNELS = 8e6, 20, 8
"""Bytes from which a launch with fewer operations per byte is limited by memory, and the cores that saturate it."""


@dataclass(frozen=True)
class Processor:
    """The cores; seconds to start and join a team: `fork + join * log2(threads)`; times as slow as the measured one."""

    cores: int
    fork: float = 0.8e-6
    join: float = 0.9e-6
    slow: float = 1.0

    @property
    def counts(self) -> list[int]:
        """The numbers of cores that a launch may take: powers of two, and all."""
        return [*(1 << k for k in range(self.cores.bit_length()) if 1 << k < self.cores), self.cores]


MANY_CORES = Processor(68, 3e-6, 3e-6, 3.0)
"""Many slow cores, as of a Xeon Phi 7250."""


@dataclass(frozen=True)
class Row:
    """A launch: its seconds on one thread, what it does, and the earlier ones that it depends on."""

    kind: str
    seconds: float
    bytes: int
    flops: int
    before: tuple[int, ...] = ()

    def task(self, processor: Processor) -> Task:
        """Its seconds on each number of cores."""
        most = self.most
        found = {}
        for many in processor.counts:
            join = processor.fork + processor.join * math.log2(many) if many > 1 else 0.0
            found[many] = processor.slow * self.seconds / min(many, most) + join
        return Task(found)

    @property
    def most(self) -> int:
        """The number of cores up to which it scales."""
        if self.kind not in GRAIN:
            return 1
        most = max(1, self.flops // GRAIN[self.kind])
        return min(most, CHANNELS) if self.bytes > STREAMED and self.flops < INTENSITY * self.bytes else most


@dataclass(frozen=True)
class Simulated:
    """Seconds of a step: in order on all cores, in order on the best number each, in lanes; and what none is below."""

    launches: int
    all_cores: float
    best_each: float
    lanes: float
    bound: float

    @property
    def gain(self) -> float:
        """Times as fast as in order on all cores."""
        return self.all_cores / self.lanes if self.lanes else 1.0

    def lines(self, processor: Processor) -> Iterator[str]:
        """A table."""
        yield f"{counted(self.launches, 'launch', 'launches')} on {counted(processor.cores, 'core')}, simulated"
        rows = ("all cores, in order", self.all_cores), ("best number each, in order", self.best_each)
        for name, seconds in (*rows, ("side by side", self.lanes), ("bound", self.bound)):
            ratio = self.all_cores / seconds if seconds else 1.0
            yield f"{name:<28}{seconds_text(seconds):>12}{ratio:>8.2f} times as fast"


def simulate(rows: Sequence[Row], processor: Processor) -> Simulated:
    """A program's launches on a processor; see the module."""
    tasks = [row.task(processor) for row in rows]
    edges = [list(row.before) for row in rows]
    cores = processor.cores
    in_order = sum(
        task.seconds[cores] if row.kind == "call" else task.seconds[largest(processor, row.most)]
        for row, task in zip(rows, tasks, strict=True)
    )
    each = sum(task.seconds[task.best(cores)] for task in tasks)
    found = min(shortest(edges, tasks, cores)[0].seconds, each) if rows else 0.0
    return Simulated(len(rows), in_order, each, found, bound(edges, tasks, cores))


def largest(processor: Processor, most: int) -> int:
    """The threads of a kernel that scales up to so many."""
    return max(many for many in processor.counts if many <= max(most, 1))


def together(parts: Iterable[Simulated]) -> Simulated:
    """Programs one after the other."""
    found = list(parts)
    names = ("launches", "all_cores", "best_each", "lanes", "bound")
    return Simulated(*(sum(getattr(part, name) for part in found) for name in names))


def programs_of(launches: Sequence[Launched]) -> list[list[Row]]:
    """The rows of each program of a report. Raises `Invalid` if its launches were not measured."""
    found: dict[int, list[Row]] = {}
    for launch in launches:
        if launch.seconds is None:
            raise Invalid("the launches of this report were not measured")
        row = Row(launch.kind, launch.seconds, launch.bytes, launch.flops, tuple(launch.before))
        rows = found.setdefault(launch.program, [])
        if not all(0 <= before < len(rows) for before in row.before):
            raise Invalid(f"launch {len(rows)} of program {launch.program} waits for one that is not before it")
        rows.append(row)
    return list(found.values())


def read(path: Path) -> list[list[Row]]:
    """The programs of the last function of a report's JSON file, measured on one thread. Raises `Invalid`."""
    try:
        function = json.loads(path.read_text(encoding="utf-8"))["functions"][-1]
        launches = [_launched(each) for each in function["launches"]]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise Invalid(f"{path} is not a report with measured launches: {type(error).__name__}: {error}") from error
    return programs_of(launches)


def _launched(entry: Mapping[str, Any]) -> Launched:
    known = {name: entry[name] for name in Launched.__dataclass_fields__ if name in entry}
    return replace(Launched(**known), before=tuple(map(int, entry["before"])))
