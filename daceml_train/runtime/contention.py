"""Know when not to: several threads on cores that others use wait for each other, so launches drop to one thread.

A barrier of threads of which one has no core lasts as long as a time slice. Steps that are slower than they were are
noticed, launches then run on one thread, in order, which stays if it is faster, and they climb back once the cores are
idle again, or after some time to compare. No bit of a result depends on it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

SLOW, DRIFTED, LEAST = 4.0, 1.4, 3e-5
"""A run is slow, or has drifted, that takes so many times its best, and so many seconds more."""
SLOW_RUNS, DRIFTED_RUNS = 2, 16
"""Runs of each kind, of which each cancels one that is not, after which threads drop to one."""
ONE_RUNS = 4
"""Runs on one thread whose mean is compared with the mean of those: one thread stays if it is faster."""
LOOKS, LONGEST = 1.0, 32.0
"""Seconds on one thread after which the cores are looked at; doubled after each climb that was too early."""
BUSY, PAYS = 4.0, 20.0
"""However busy the cores are, the chosen threads are tried after so many times those seconds, if that is so many times
what they lost the last time: a process that takes turns with others never sees an idle core.
"""
IDLE = 0.8
"""The share of the time that each further core must have been idle."""


def quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """The cores' worth of time that the control group of this process may use; infinite where nothing limits it."""
    try:
        if (root / "cpu.max").exists():
            most, period = (root / "cpu.max").read_text().split()
            return math.inf if most == "max" else int(most) / int(period)
        most, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return math.inf if int(most) < 0 else int(most) / int(period)
    except (OSError, ValueError):
        return math.inf


def crowded() -> bool:
    """Whether as many others are ready to run right now as there are cores."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return False
    return running - 1 >= (os.cpu_count() or 1)


class Cores:
    """The idle time of the cores that this process may use."""

    def __init__(self, path: Path = Path("/proc/stat")) -> None:
        self.path, self.own = path, os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self.before = self._idle()

    def _idle(self) -> tuple[float, float]:
        """Seconds of all cores together that they were idle, and now."""
        ticks = 0
        try:
            for line in self.path.read_text().splitlines():
                name, _, rest = line.partition(" ")
                if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self.own:
                    ticks += sum(map(int, rest.split()[3:5]))
        except (OSError, ValueError):
            return 0.0, time.perf_counter()
        return ticks / os.sysconf("SC_CLK_TCK"), time.perf_counter()

    def idle(self) -> float:
        """How many cores were idle, on average, since the last call."""
        now = self._idle()
        (idle, at), self.before = self.before, now
        return (now[0] - idle) / max(now[1] - at, 1e-9)


class Contention:
    """Whether a plan's launches have the threads that were chosen, or one each; `use(many)` switches."""

    def __init__(
        self,
        threads: int,
        use: Callable[[bool], None],
        cores: Callable[[], float] | None = None,
        limit: float = math.inf,
    ) -> None:
        self.threads, self.use, self.limited = threads, use, limit < threads
        self._cores = cores or Cores().idle
        self.many = True
        """Whether launches have the threads that were chosen."""
        self._best, self._slow = math.inf, 0
        self._drifted, self._seconds, self._runs = 0, 0.0, 0
        """Runs that drifted, less those that did not; seconds and number of runs since the first one."""
        self._one_runs, self._spent, self._dropped = 0, 0.0, 0.0
        self._wait, self._climbed = LOOKS, math.inf
        """Seconds on one thread before the next look; seconds on the chosen threads since the last climb."""
        self._untried = False
        """Whether the chosen threads have not run yet: the first runs on one thread are what they are compared with."""
        if self.limited:
            self._drop()

    def wait(self) -> None:
        """Begin with some runs on one thread: others seem to have the cores."""
        if self.many:
            self._drop()
            self._untried = True

    def add(self, seconds: float) -> None:
        """Tell what a run took."""
        if self.many:
            self._add_many(seconds)
        elif not self.limited:
            self._add_one(seconds)

    def _add_many(self, seconds: float) -> None:
        self._best = min(self._best, seconds)
        self._climbed += seconds
        drifted = seconds > DRIFTED * self._best + LEAST
        if drifted or self._drifted:
            self._seconds, self._runs = self._seconds + seconds, self._runs + 1
        if not drifted:
            self._slow, self._drifted = max(self._slow - 1, 0), max(self._drifted - 1, 0)
            if not self._drifted:
                self._seconds, self._runs = 0.0, 0
            return
        self._drifted += 1
        self._slow = self._slow + 1 if seconds > SLOW * self._best + LEAST else max(self._slow - 1, 0)
        if self._slow >= SLOW_RUNS or self._drifted >= DRIFTED_RUNS:
            self._wait = min(2 * self._wait, LONGEST) if self._climbed < self._wait else LOOKS
            self._drop()

    def _drop(self) -> None:
        self.many, self._one_runs, self._spent, self._dropped = False, 0, 0.0, 0.0
        self._cores()
        self.use(False)

    def _climb(self, best: float) -> None:
        self.many, self._slow, self._drifted, self._best, self._climbed = True, 0, 0, best, 0.0
        self._seconds, self._runs = 0.0, 0
        self.use(True)

    def _add_one(self, seconds: float) -> None:
        self._spent += seconds
        self._dropped += seconds
        self._one_runs += 1
        one = self._dropped / self._one_runs
        if self._one_runs == ONE_RUNS and self._untried:
            self._untried = False
            self._climb(one)
        elif self._one_runs == ONE_RUNS and one * self._runs > self._seconds:
            self._climb(self._seconds / self._runs)  # it was slow for another reason, and is slower on one thread
        elif self._spent > self._wait:
            self._spent = 0.0
            idle = self._cores() >= IDLE * (self.threads - 1)
            if idle or self._dropped > max(BUSY * self._wait, PAYS * (self._seconds - one * self._runs)):
                self._climb(one)
