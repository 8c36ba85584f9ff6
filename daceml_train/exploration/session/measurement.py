"""Measurement: times of programs that are run in turn, so that a slow moment of the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daceml_train.driver.settings import Settings
from daceml_train.errors import Invalid
from daceml_train.exploration.session.eager_copy import EagerCopy
from daceml_train.exploration.session.program import Inputs, Program, cotangents
from daceml_train.exploration.session.progress import CheckProgress, OnProgress, compiling, unheard
from daceml_train.exploration.session.state import State
from daceml_train.exploration.session.subject import Subject

WARMUP = 2
"""Warm-up runs of each program."""
PAUSE = 0.5
"""Seconds between two partial results."""


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

    def _compares(self, *names: str) -> bool:
        """Whether these programs ran more than once; a partial result may lack some."""
        return all(name in self.timed and len(self.timed[name].seconds) > 1 for name in names)

    def __str__(self) -> str:
        lines = [f"{'':10} {'median':>11} {'quartiles':>23} {'bytes':>15}  ({self.threads} threads)"]
        for name, entry in self.timed.items():
            lower, upper = (1e6 * s for s in entry.spread)
            moved = f"{entry.bytes:15,}" if entry.bytes is not None else f"{'':15}"
            line = f"{name:10} {1e6 * entry.median:9.1f} us {lower:9.1f} .. {upper:9.1f} {moved}"
            if name != "now" and self._compares("now", name):
                ratio = self.faster("now", name)
                line += (
                    "  as fast as now, within the spread" if ratio is None else f"  now is {ratio:.2f} times as fast"
                )
            lines.append(line.rstrip())
        return "\n".join(lines)


def measure(
    subject: Subject,
    states: Mapping[str, State],
    options: Settings,
    eager: bool,
    repeats: int,
    progress: OnProgress = unheard,
) -> Measurement:
    """Compile the graphs of `states`, and run each `repeats` times in turn; `eager` adds PyTorch.

    Each program trains copies of its own; compiled programs receive a module's cotangents, as PyTorch does. `progress`
    receives progress and partial results: a run of each program as soon as it has warmed up, PyTorch first, which
    needs no compilation; then all runs so far.
    """
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise Invalid(f"repeats is a number of runs of at least 1, given {repeats!r}")
    inputs = Inputs.of(subject)
    runs: dict[str, Callable[[], object]] = {}
    counts: dict[str, tuple[int | None, int, int]] = {}
    warm: dict[str, list[float]] = {}
    names = [*states, *(["eager"] if eager else [])]

    def so_far(seconds: Mapping[str, Sequence[float]]) -> Measurement:
        known = {n: Timed(n, tuple(seconds[n]), *counts[n]) for n in names if seconds.get(n)}
        return Measurement(known, torch.get_num_threads())

    def prepare(name: str, run: Callable[[], object], *count: Any) -> None:
        runs[name], counts[name] = run, (count[0], count[1], count[2])
        progress(CheckProgress(f"warming up {name}"))
        warm[name] = [_timed(run) for _ in range(WARMUP)][-1:]
        progress(CheckProgress(f"warmed up {name}", result=so_far(warm)))

    if eager:
        seeds = cotangents(subject, subject.training_graph(subject.captured), inputs)
        prepare("eager", EagerCopy(subject).step(seeds), None, 0, 0)
    for name, state in states.items():
        program = Program.of(state.graph, compiling(options, name, progress))
        prepare(name, _runner(program, inputs), state.bytes, program.kernels, program.calls)

    def told(seconds: Mapping[str, Sequence[float]], done: int, left: float) -> None:
        result = so_far(seconds) if done < repeats else None
        progress(CheckProgress(f"running {', '.join(names)} in turn", done, repeats, left, result))

    return so_far(in_turn({name: runs[name] for name in names}, repeats, told, 0))


def in_turn(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    told: Callable[[Mapping[str, Sequence[float]], int, float], None] = lambda *_: None,
    warmup: int = WARMUP,
) -> dict[str, Sequence[float]]:
    """Seconds of each run, after `warmup` that do not count; `told` receives those so far, rounds, and seconds left."""
    for run in runs.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    began = last = time.perf_counter()
    for done in range(1, repeats + 1):
        for name, run in runs.items():
            seconds[name].append(_timed(run))
        now = time.perf_counter()
        if now - last > PAUSE:
            told(seconds, done, (now - began) / done * (repeats - done))
            last = time.perf_counter()
    return dict(seconds)


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _runner(program: Program, inputs: Inputs) -> Callable[[], object]:
    tensors = inputs.fresh()
    return lambda: program.run(tensors)
