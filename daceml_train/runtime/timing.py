"""Timing: the seconds of each launch of a program, over several runs."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence


def per_launch(launches: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Seconds per launch: `seconds[i]` belongs to launch `launches[i]`."""
    added = [0.0] * (max(launches, default=-1) + 1)
    for launch, spent in zip(launches, seconds, strict=True):
        added[launch] += spent
    return added


class Timing:
    """Seconds per launch and run. An executable adds to it while it is set; see `Executable.time`."""

    def __init__(self) -> None:
        self._runs: list[list[float]] = []
        self._lock = threading.Lock()

    def add(self, launches: Sequence[int], seconds: Sequence[float]) -> None:
        """Add one run: `seconds[i]` belongs to launch `launches[i]`; those of equal launches are added up."""
        run = per_launch(launches, seconds)
        with self._lock:
            if self._runs and len(self._runs[0]) != len(run):
                self._runs.clear()
            self._runs.append(run)

    @property
    def runs(self) -> int:
        """How many runs were measured."""
        return len(self._runs)

    def median(self) -> list[float]:
        """Per launch the median over the runs; empty before the first."""
        with self._lock:
            return [statistics.median(of) for of in zip(*self._runs, strict=True)]

    def last(self) -> list[float]:
        """Per launch the seconds of the last run; empty before the first."""
        with self._lock:
            return list(self._runs[-1]) if self._runs else []
