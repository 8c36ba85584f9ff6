"""Measurement: times of programs that are run in turn, so that a slow moment of the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from daceml_train.driver.settings import Settings
from daceml_train.errors import Invalid
from daceml_train.exploration.session.eager_copy import EagerCopy
from daceml_train.exploration.session.program import Inputs, Program, cotangents
from daceml_train.exploration.session.state import State
from daceml_train.exploration.session.subject import Subject

WARMUP = 2
"""Warm-up runs of each program."""


@dataclass(frozen=True)
class Timed:
    """One program's times in seconds; `bytes` as the model counts them, None for PyTorch's own."""

    name: str
    seconds: tuple[float, ...]
    bytes: int | None
    kernels: int
    calls: int

    @property
    def median(self) -> float:
        """The median time."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and the upper quartile."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper


@dataclass(frozen=True)
class Measurement:
    """Programs that were run in turn, by name; `now` is the session's graph."""

    timed: Mapping[str, Timed]
    threads: int

    def __getitem__(self, name: str) -> Timed:
        return self.timed[name]

    def faster(self, name: str, than: str) -> float | None:
        """How many times as fast one is as another; None where their quartiles overlap, which is inconclusive."""
        (a, b), (c, d) = self[name].spread, self[than].spread
        return None if a <= d and c <= b else self[than].median / self[name].median

    def __str__(self) -> str:
        lines = [f"{'':10} {'median':>11} {'quartiles':>23} {'bytes':>15}  ({self.threads} threads)"]
        for name, entry in self.timed.items():
            lower, upper = (1e6 * s for s in entry.spread)
            moved = f"{entry.bytes:15,}" if entry.bytes is not None else f"{'':15}"
            line = f"{name:10} {1e6 * entry.median:9.1f} us {lower:9.1f} .. {upper:9.1f} {moved}"
            if name != "now":
                ratio = self.faster("now", name)
                line += (
                    "  as fast as now, within the spread" if ratio is None else f"  now is {ratio:.2f} times as fast"
                )
            lines.append(line.rstrip())
        return "\n".join(lines)


def measure(subject: Subject, states: Mapping[str, State], options: Settings, eager: bool, repeats: int) -> Measurement:
    """Compile the graphs of `states`, and run each `repeats` times in turn; `eager` adds PyTorch.

    Each program trains copies of its own; compiled programs receive a module's cotangents, as PyTorch does.
    """
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise Invalid(f"repeats is a number of runs of at least 1, given {repeats!r}")
    inputs = Inputs.of(subject)
    runs: dict[str, Callable[[], object]] = {}
    counts: dict[str, tuple[int | None, int, int]] = {}
    for name, state in states.items():
        program = Program.of(state.graph, options)
        runs[name] = _runner(program, inputs)
        counts[name] = state.bytes, program.kernels, program.calls
    if eager:
        seeds = cotangents(subject, subject.training_graph(subject.captured), inputs)
        runs["eager"], counts["eager"] = EagerCopy(subject).step(seeds), (None, 0, 0)
    return Measurement(
        {n: Timed(n, tuple(seconds), *counts[n]) for n, seconds in in_turn(runs, repeats).items()},
        torch.get_num_threads(),
    )


def in_turn(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Sequence[float]]:
    """Seconds of each run, after some that do not count."""
    for run in runs.values():
        for _ in range(WARMUP):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return dict(seconds)


def _runner(program: Program, inputs: Inputs) -> Callable[[], object]:
    tensors = inputs.fresh()
    return lambda: program.run(tensors)
