"""Which launches run side by side: a schedule from measured seconds, tried against the launches in order.

Once the threads of each launch are known, three runs in order are timed launch by launch, a schedule is computed, and
if it promises enough, runs in lanes and in order take turns, of which the faster way stays. All of these runs do their
work. What was found is stored on disk, and a later process measures nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from daceml_train.lowering.lane_plan import WINDOWS, LanePlan, lane_plan
from daceml_train.lowering.lanes import Task
from daceml_train.lowering.program import LaneRules
from daceml_train.runtime.lane_entries import Bound as Entries
from daceml_train.runtime.lane_entries import beside, edges_of
from daceml_train.runtime.lane_works import works
from daceml_train.runtime.launch_threads import LaunchThreads
from daceml_train.runtime.machine_load import Load, machine
from daceml_train.runtime.timing import per_launch
from daceml_train.runtime.tune_threads import ThreadTuner
from daceml_train.storage.files import keep

TIMED, TURNS = 3, 6
"""Runs that are timed launch by launch, and runs of each of the two ways; the fastest counts, since noise only adds."""
PROMISED, MEASURED = 0.93, 0.96
"""The share of the time in order that a schedule may take to be tried, and then to be used."""

Addresses = ctypes.Array[ctypes.c_void_p]


class Bound(Entries, Protocol):
    """The interface of a bound plan that this module uses."""

    threads: int
    arena_bytes: int
    launch_threads: LaunchThreads | None

    def collect(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Run, and view the results as the program's outputs."""
        ...

    def arena_for(self, lanes: LanePlan | None) -> tuple[list[int], list[int], int]:
        """The slots in the arena, their offsets, and its size, for launches in this order."""

    def adopt(self, other: Any) -> None:
        """Run as another plan from here on."""


@dataclass(frozen=True)
class Found:
    """What was found for a plan: the launches per segment and lane, or nothing, where they run in order."""

    order: tuple[int, ...] = ()
    segments: tuple[tuple[tuple[int, ...], ...], ...] = ()
    overlap: tuple[tuple[int, int], ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)
    """Least seconds of a run in order, and in lanes."""

    @staticmethod
    def of(plan: LanePlan | None, seconds: tuple[float, float] = (0.0, 0.0)) -> Found:
        """What is stored of a plan."""
        if plan is None:
            return Found(seconds=seconds)
        parts = tuple(tuple(tuple(lane) for lane in part) for part in plan.segments)
        return Found(tuple(plan.order), parts, tuple(plan.overlap.items()), seconds)

    def plan(self, edges: list[list[int]]) -> LanePlan | None:
        """The plan; None if launches run in order, or if it is no order of these launches."""
        parts = [[list(lane) for lane in part] for part in self.segments]
        if sorted(self.order) != list(range(len(edges))) or [i for p in parts for lane in p for i in lane] == []:
            return None
        if sorted(i for part in parts for lane in part for i in lane) != list(range(len(edges))):
            return None
        plan = LanePlan(list(self.order), parts, self.seconds[1], dict(self.overlap))
        kept = all(
            plan.position[p] < plan.position[i] and plan.place[p][0] <= plan.place[i][0]
            for i, before in enumerate(edges)
            for p in before
        )
        return plan if kept and max(plan.overlap.values(), default=0) < len(edges) else None


class LaneStore:
    """Schedules by plan, on disk."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def known(self) -> dict[str, Found]:
        """What is stored; nothing if the file is damaged."""
        if self.path is None or not self.path.exists():
            return {}
        try:
            entries = json.loads(self.path.read_text())
            return {
                key: Found(
                    tuple(map(int, e["order"])),
                    tuple(tuple(tuple(map(int, lane)) for lane in part) for part in e["segments"]),
                    tuple((int(a), int(b)) for a, b in e["overlap"]),
                    (float(e["seconds"][0]), float(e["seconds"][1])),
                )
                for key, e in entries.items()
            }
        except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError):
            return {}

    def save(self, key: str, found: Found) -> None:
        """Add an entry, and write all of them atomically."""
        if self.path is not None:
            entries = {**self.known(), key: found}
            keep(self.path, json.dumps({key: asdict(entry) for key, entry in entries.items()}).encode())


class LaneTrial:
    """Runs a plan until it is known which of its launches run side by side, and afterwards."""

    @staticmethod
    def of(bound: Bound, tuner: ThreadTuner, bind: Callable[[LanePlan], Any]) -> LaneTrial | None:
        """The trial of a plan; None where its launches run in order in any case."""
        rules = bound.program.rules
        if rules is None or bound.threads < 2 or rules.lanes == 1 or len(bound.program.launches) < 2:
            return None
        path = None if tuner.path is None else tuner.path.with_name("lanes.json")
        return LaneTrial(bound, rules, LaneStore(path), bind)

    def __init__(self, bound: Bound, rules: LaneRules, store: LaneStore, bind: Callable[[LanePlan], Any]) -> None:
        self.bound, self.rules, self.store, self.bind = bound, rules, store, bind
        self.cores = min(bound.threads, rules.lanes) if rules.lanes else bound.threads
        self.lock = threading.Lock()
        self.done, self.measured = False, 0
        """Whether it is decided, and how many runs were measured for that."""
        self.candidate: Any = None
        self.seconds: list[list[float]] = []
        self.turns: tuple[list[float], list[float]] = ([], [])
        """Seconds of runs in order, and in lanes."""
        self._load: Load | None = None
        self.edges: list[list[int]] = []

    # ---- running ---
    def run(self, inputs: Addresses) -> list[torch.Tensor]:
        """Run the plan on these addresses; see `BoundPlan.run_addresses`."""
        if self.done:
            return self._plainly(self.bound, inputs)
        with self.lock:
            if not self.done and self._load is None:
                self._begin()
            if self.done:
                return self._plainly(self.bound, inputs)
            if self.candidate is None:
                return self._timed(inputs)
            return self._turn(inputs)

    def _plainly(self, bound: Any, inputs: Addresses, profile: bool = False) -> list[torch.Tensor]:
        plan = bound.plan
        return self.bound.collect(lambda: plan.run_addresses(inputs, profile=profile))

    def _begin(self) -> None:
        self._load, self.edges = Load(), edges_of(self.bound)
        self.key = self._key()
        if (known := self.store.known().get(self.key)) is not None:
            plan = known.plan(self.edges)
            if plan is not None:
                self._adopt(self.bind(plan))
            self.done = True

    def _key(self) -> str:
        integers = []
        for launch in self.bound.program.launches:
            code = getattr(launch, "code", None)
            kernel = None if code is None else self.bound.program.codes[code]
            sizes = [] if kernel is None else [self.bound.value(d, 1) for d in kernel.integers]
            name = str(getattr(launch, "target", "")) if kernel is None else kernel.key
            integers.append([type(launch).__name__, name, sizes])
        memory = sorted((slot, self.bound.bytes_of(slot)) for slot in self.bound.offsets)
        text = repr((integers, memory, self.edges, self.rules))
        return f"{machine()}, {self.bound.threads} threads: {hashlib.sha256(text.encode()).hexdigest()[:20]}"

    def _timed(self, inputs: Addresses) -> list[torch.Tensor]:
        outputs = self._plainly(self.bound, inputs, profile=True)
        self.measured += 1
        self.seconds.append(per_launch(self.bound.order, self.bound.plan.seconds()))
        if len(self.seconds) == TIMED:
            plan = self.proposed([min(each) for each in zip(*self.seconds, strict=True)])
            if plan is None:
                self._decide(None)
            else:
                self.candidate = self.bind(plan)
                self._counts()
        return outputs

    def _counts(self) -> None:
        """Threads of the launches that run alone, in the candidate."""
        threads = self.bound.launch_threads
        if threads is not None:
            self.candidate.plan.threads(threads.entries(self.candidate.order))

    def _turn(self, inputs: Addresses) -> list[torch.Tensor]:
        way = len(self.turns[0]) > len(self.turns[1])
        begin = time.perf_counter()
        outputs = self._plainly(self.candidate if way else self.bound, inputs)
        self.turns[way].append(time.perf_counter() - begin)
        self.measured += 1
        if len(self.turns[1]) == TURNS:
            in_order, in_lanes = (min(each[1:]) for each in self.turns)  # the first run of each warms up
            self._decide(self.candidate if in_lanes < MEASURED * in_order else None, (in_order, in_lanes))
        return outputs

    def _decide(self, chosen: Any, seconds: tuple[float, float] = (0.0, 0.0)) -> None:
        assert self._load is not None
        if not self._load.high():
            self.store.save(self.key, Found.of(None if chosen is None else chosen.lanes, seconds))
        if chosen is not None:
            self._adopt(chosen)
        self.candidate, self.done = None, True

    def _adopt(self, chosen: Any) -> None:
        self.bound.adopt(chosen)
        if self.bound.launch_threads is not None:
            self.bound.launch_threads.use(True)

    # ---- the schedule ---
    def tasks(self, seconds: list[float]) -> list[Task]:
        """Each launch with its seconds, measured in order, and on one thread where that was tried."""
        threads = self.bound.launch_threads
        search = None if threads is None else threads.search
        alone = set(self.rules.alone)
        found = []
        for index, spent in enumerate(seconds):
            key = None if search is None else search.keys[index]
            times = {} if search is None or key is None else search.times[key].seconds
            by_one = threads is not None and threads.by_one(index)
            if index in alone or not (beside(self.bound, index) and (by_one or 1 in times)):
                found.append(Task({1: spent}, alone=True))
            elif by_one:
                found.append(Task({1: spent}))
            else:
                more = min((s for count, s in times.items() if count > 1), default=spent)
                found.append(Task({1: times[1], self.cores: more}))
        return found

    def proposed(self, seconds: list[float]) -> LanePlan | None:
        """The schedule that promises most and stays within the memory; None if none promises enough."""
        tasks = self.tasks(seconds)
        accesses = works(self.bound, lambda index: not beside(self.bound, index))
        for window in WINDOWS:
            plan, _ = lane_plan(accesses, tasks, self.cores, window)
            if plan.lanes < 2 or plan.seconds > PROMISED * sum(seconds):
                return None
            if self.bound.arena_for(plan)[2] <= self.rules.memory * self.bound.arena_bytes:
                return plan
        return None
