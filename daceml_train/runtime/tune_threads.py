"""How many threads each launch takes: found while the first runs do their work, and stored on disk.

More threads are not faster for short launches: to start and to join a team takes microseconds. Every run is timed
launch by launch until the counts are known, with all threads, with one where a launch is short, then with half as
many, a quarter, and so on, as long as the sum falls. No run is lost: its results are those of any other.

A launch takes one thread or as many as all the others that take more. GNU's OpenMP ends the threads that a smaller
team leaves over and starts new ones for a larger one; only to one thread, and back, it changes for nothing.

Results do not depend on what was measured. A kernel's blocks, which decide the order of its additions, are cut for all
threads, and fewer of them run more blocks each. A library's matmul is adjusted if its result on random matrices has
the same bits on any count; other calls of libraries keep all threads.

Liu, Li, Kestor, Vetter, Runtime Concurrency Control and Operation Scheduling for High Performance Neural Network
Training, IPDPS 2019.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from daceml_train.runtime.machine_load import Load, machine
from daceml_train.storage.files import keep

RUNS = 3
"""Timed runs per count; the fastest counts, since noise only adds."""
LONG = 2e-4
"""Seconds on all threads from which a launch is not tried on one."""
GAIN, LEAST = 0.05, 5e-7
"""The share of its time, and the seconds, that further threads must save a launch."""


@dataclass(frozen=True)
class Adjustable:
    """A launch whose threads may be chosen: its kind and sizes, and whether a count changes no bit of its result."""

    text: str
    same: Callable[[int], bool] = lambda count: True

    def key(self, threads: int) -> str:
        """The key under which its times are stored: machine, threads, kernel or matmul, sizes."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:20]
        return f"{machine()}, {threads} threads: {digest}"


@dataclass
class Times:
    """The least seconds of a launch per count of threads, and the counts that would change its result."""

    seconds: dict[int, float] = field(default_factory=dict)
    unequal: list[int] = field(default_factory=list)
    loaded: bool = False
    """Whether other processes had the machine while it was measured."""

    def add(self, count: int, seconds: float) -> None:
        """Add a measurement."""
        self.seconds[count] = min(seconds, self.seconds.get(count, math.inf))

    def best(self, many: int) -> int:
        """One thread, or `many` (all of them where `many` was not tried), which must save enough."""
        more = many if many in self.seconds else max(self.seconds, default=many)
        one = self.seconds.get(1, math.inf)
        saved = one - self.seconds.get(more, 0.0)
        return 1 if saved <= max(GAIN * one, LEAST) and one < math.inf else more

    def least(self, many: int) -> float:
        """Seconds on the best count."""
        return self.seconds.get(self.best(many), 0.0)


@dataclass
class ThreadTuner:
    """Times so far; `path` is the file that stores them between processes (None: in memory only)."""

    path: Path | None = None
    known: dict[str, Times] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            try:
                for key, entry in json.loads(self.path.read_text()).items():
                    seconds = {int(count): float(spent) for count, spent in entry["seconds"].items()}
                    self.known[key] = Times(seconds, list(map(int, entry["unequal"])), bool(entry["loaded"]))
            except (OSError, ValueError, AttributeError, KeyError, TypeError):  # damaged: measured again
                self.known.clear()

    def search(self, launches: Sequence[Adjustable | None], threads: int) -> ThreadSearch | None:
        """The search for a plan's counts; None if there is nothing to choose."""
        return ThreadSearch(self, launches, threads) if threads > 1 and any(launches) else None

    def save(self, found: dict[str, Times]) -> None:
        """Add times, and write them atomically, merged with those that other processes stored in the meantime."""
        with self.lock:
            self.known |= found
            if self.path is None:
                return
            kept = ThreadTuner(self.path).known if self.path.exists() else {}
            entries = {
                key: {"seconds": times.seconds, "unequal": times.unequal, "loaded": times.loaded}
                for key, times in (kept | found).items()
            }
            keep(self.path, json.dumps(entries, indent=0).encode())


class ThreadSearch:
    """The counts of one plan: `counts` are those of its next run, whose seconds `add` is told unless it is `done`."""

    def __init__(self, tuner: ThreadTuner, launches: Sequence[Adjustable | None], threads: int) -> None:
        self.tuner, self.launches, self.threads = tuner, launches, threads
        self.keys = [None if launch is None else launch.key(threads) for launch in launches]
        self.lock = threading.Lock()
        known = {key: tuner.known[key] for key in self.keys if key in tuner.known}
        self.runs = 0
        """Runs that were timed."""
        self.times: dict[str, Times] = {}
        self.restart()
        if all(key is None or (key in known and not known[key].loaded) for key in self.keys):
            self.times = known
            self._decide(min((many for many in self._halves() if self._measured(many)), key=self._total))

    def restart(self) -> None:
        """Measure from here on, as if nothing were known."""
        self.times = {key: Times() for key in self.keys if key is not None}
        self.done, self.loaded = False, False
        self._plan = [self.threads, *[self.threads, 1] * RUNS]  # the first run warms up: it is not counted
        self._current = self._plan.pop(0)
        self._tried = [self.threads]
        self._begun: Load | None = None
        self.counts = self._counts(self.threads)

    def _halves(self) -> list[int]:
        """The counts above one: all threads, half of them, a quarter."""
        return [self.threads >> by for by in range(self.threads.bit_length() - 1)]

    def _measured(self, many: int) -> bool:
        return any(many in times.seconds for times in self.times.values())

    def _total(self, many: int) -> float:
        return sum(self.times[key].least(many) for key in self.keys if key is not None)

    def _counts(self, many: int) -> list[int]:
        """Per launch the count for a run with `many`: 0, which is all, where it is not tried."""
        counts = []
        for launch, key in zip(self.launches, self.keys, strict=True):
            count = many if launch is not None and key is not None and self._tries(launch, self.times[key], many) else 0
            counts.append(0 if count == self.threads else count)
        return counts

    def _tries(self, launch: Adjustable, times: Times, count: int) -> bool:
        """Whether a launch is run with this count: not on one thread if it is long, nor if that changes its result."""
        if count == self.threads or count in times.seconds:
            return True
        if (count == 1 and times.seconds.get(self.threads, 0.0) > LONG) or count in times.unequal:
            return False
        if launch.same(count):
            return True
        times.unequal.append(count)
        return False

    def add(self, seconds: Sequence[float]) -> None:
        """The seconds per launch of a run with `counts`."""
        self.runs += 1
        if self._begun is None:
            self._begun = Load()
        else:
            self._note(seconds)
        if self._plan:
            self._current = self._plan.pop(0)
            self.counts = self._counts(self._current)
            return
        best = min(self._tried, key=self._total)
        half = self._tried[-1] // 2
        if best == self._tried[-1] and half > 1:  # fewer threads were faster, or there was nothing to compare yet
            self._tried.append(half)
            self._plan, self._current = [half] * (RUNS - 1), half
            self.counts = self._counts(half)
            return
        self.loaded = self._begun.high()
        for times in self.times.values():
            times.loaded = self.loaded
        self.tuner.save(self.times)
        self._decide(best)

    def _note(self, seconds: Sequence[float]) -> None:
        """Equal launches share their times: the mean of a run counts as one."""
        spent: dict[str, list[float]] = {}
        for key, count, taken in zip(self.keys, self.counts, seconds, strict=True):
            if key is not None and (count or self.threads) == self._current:
                spent.setdefault(key, []).append(taken)
        for key, each in spent.items():
            self.times[key].add(self._current, sum(each) / len(each))

    def _decide(self, many: int) -> None:
        """Use the best count of each launch, one or `many`, from here on."""
        best = [self.threads if key is None else self.times[key].best(many) for key in self.keys]
        self.counts = [0 if count == self.threads else count for count in best]
        self.done = True
