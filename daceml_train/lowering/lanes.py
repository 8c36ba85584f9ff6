"""Lanes: which launches run side by side on the cores of a CPU, and when.

List scheduling: of the launches whose predecessors have ended, the one with the longest path to the end of the program
(upward rank) starts first, on as many cores as its mode says. A launch that needs more cores than are free keeps the
later ones waiting. Modes come from an efficiency: a launch takes the most cores that it uses at least that well. A few
efficiencies are tried, and the shortest schedule counts.

Topcuoglu, Hariri, Wu, Performance-Effective and Low-Complexity Task Scheduling for Heterogeneous Computing, 2002; Liu,
Li, Kestor, Vetter, Runtime Concurrency Control and Operation Scheduling, IPDPS 2019.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SYNC_SECONDS = 3e-7
"""The cost of a wait for another lane."""
REGION_SECONDS = 2.5e-6
"""The cost of a segment of several lanes: its threads are started and joined."""
EFFICIENCIES = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.01)
"""The shares of its cores that a launch must use, tried one after the other: from most cores to one each."""


@dataclass(frozen=True)
class Task:
    """A launch: seconds per number of cores, of which it takes one, and whether it runs beside no other."""

    seconds: Mapping[int, float]
    alone: bool = False

    def best(self, most: int) -> int:
        """The number of cores on which it is fastest."""
        return min((many for many in self.seconds if many <= most), key=lambda many: (self.seconds[many], many))

    def efficient(self, share: float, most: int) -> int:
        """The largest number of cores, up to the best one, of which it uses at least this share."""
        least, best = min(self.seconds), self.best(most)
        work = least * self.seconds[least]
        fitting = (m for m in self.seconds if m <= best and work >= share * m * self.seconds[m])
        return max(fitting, default=least)


@dataclass
class LaneSchedule:
    """When and on which cores each launch runs; `lanes[i]` has all cores of a launch that runs alone."""

    start: list[float]
    end: list[float]
    lanes: list[tuple[int, ...]]
    seconds: float
    """From the first start to the last end."""

    @property
    def order(self) -> list[int]:
        """The launches in the order in which they start."""
        return sorted(range(len(self.start)), key=lambda i: (self.start[i], self.end[i], i))


def ranks(edges: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[float]:
    """Per launch the seconds from its start to the end of the longest path from it; `edges` are predecessors."""
    below = [0.0] * len(edges)
    for i in reversed(range(len(edges))):
        below[i] += seconds[i]
        for p in edges[i]:
            below[p] = max(below[p], below[i])
    return below


def scheduled(
    edges: Sequence[Sequence[int]], tasks: Sequence[Task], modes: Sequence[int], cores: int, window: int | None = None
) -> LaneSchedule:
    """The schedule with these numbers of cores per launch.

    With a `window`, a launch starts at most so many places before an earlier one of the list that has not started, so
    that fewer arrays are alive at a time. `edges` are predecessors, which come earlier in the list.
    """
    count = len(tasks)
    window = count if window is None else window
    spent = [task.seconds[mode] for task, mode in zip(tasks, modes, strict=True)]
    width = [cores if task.alone else mode for task, mode in zip(tasks, modes, strict=True)]
    rank = ranks(edges, spent)
    after: list[list[int]] = [[] for _ in range(count)]
    for i, before in enumerate(edges):
        for p in before:
            after[p].append(i)
    left = [len(before) for before in edges]
    ready = [(-rank[i], i) for i in range(count) if not left[i]]
    heapq.heapify(ready)
    free, running = list(range(cores)), list[tuple[float, int]]()
    start, end, lanes = [0.0] * count, [0.0] * count, [()] * count  # type: list[float], list[float], list[tuple[int, ...]]
    now, first, started, done = 0.0, 0, [False] * count, 0
    while done < count:
        held = []
        while ready and free:
            _, i = entry = heapq.heappop(ready)
            while first < count and started[first]:
                first += 1
            if i >= first + window:
                held.append(entry)
                continue
            if width[i] > len(free):
                held.append(entry)
                break
            free, lanes[i] = _taken(free, width[i], _last_core(edges[i], end, lanes))
            sync = SYNC_SECONDS if any(lanes[p] != lanes[i] for p in edges[i]) else 0.0
            start[i], end[i], started[i] = now, now + sync + spent[i], True
            heapq.heappush(running, (end[i], i))
        for entry in held:
            heapq.heappush(ready, entry)
        now, i = heapq.heappop(running)
        ended = [i]
        while running and running[0][0] <= now:
            ended.append(heapq.heappop(running)[1])
        for i in ended:
            free += lanes[i]
            done += 1
            for follower in after[i]:
                left[follower] -= 1
                if not left[follower]:
                    heapq.heappush(ready, (-rank[follower], follower))
        free.sort()
    return LaneSchedule(start, end, lanes, now)


def _last_core(before: Sequence[int], end: Sequence[float], lanes: Sequence[tuple[int, ...]]) -> int:
    """The core of the predecessor that ended last: its result is in that core's cache. -1 if there is none."""
    last = max(before, key=lambda p: end[p], default=None)
    return -1 if last is None else lanes[last][0]


def _taken(free: list[int], count: int, preferred: int) -> tuple[list[int], tuple[int, ...]]:
    """The cores that remain, and those that are taken."""
    if count == 1 and preferred in free:
        return [c for c in free if c != preferred], (preferred,)
    return free[count:], tuple(free[:count])


def shortest(
    edges: Sequence[Sequence[int]],
    tasks: Sequence[Task],
    cores: int,
    wide: bool = True,
    window: int | None = None,
) -> tuple[LaneSchedule, list[int]]:
    """The shortest schedule over all efficiencies, and the cores of each launch.

    Without `wide`, a launch beside others has one core: what takes more runs alone.
    """
    found: tuple[float, LaneSchedule, list[int]] | None = None
    tried = set()
    for share in EFFICIENCIES:
        modes = [task.best(cores) if task.alone else task.efficient(share, cores) for task in tasks]
        if tuple(modes) in tried:
            continue
        tried.add(tuple(modes))
        shaped = tasks if wide else [_alone(task, mode) for task, mode in zip(tasks, modes, strict=True)]
        result = scheduled(edges, shaped, modes, cores, window)
        cost = result.seconds + (0.0 if wide else REGION_SECONDS * sum(len(s) > 1 for s in segments(result, cores)))
        if found is None or cost < found[0]:
            found = cost, result, modes
    assert found is not None
    found[1].seconds = found[0]
    return found[1], found[2]


def _alone(task: Task, mode: int) -> Task:
    return task if task.alone or mode == 1 else Task(task.seconds, alone=True)


def segments(schedule: LaneSchedule, cores: int) -> list[list[list[int]]]:
    """Launches per lane and segment: launches on all cores end a segment; one lane where no other has launches."""
    parts: list[list[list[int]]] = []
    together = False
    for i in schedule.order:
        alone = len(schedule.lanes[i]) == cores
        if alone or not together:
            parts.append([[] for _ in range(1 if alone else cores)])
        together = not alone
        parts[-1][0 if alone else schedule.lanes[i][0]].append(i)
    joined: list[list[list[int]]] = []
    for part in parts:
        lanes = [lane for lane in part if lane]
        if len(lanes) == 1 and joined and len(joined[-1]) == 1:
            joined[-1][0].extend(lanes[0])
        else:
            joined.append(lanes)
    return joined


def bound(edges: Sequence[Sequence[int]], tasks: Sequence[Task], cores: int) -> float:
    """Seconds that no schedule is shorter than: the critical path, or all work shared out."""
    least = [task.seconds[task.best(cores)] for task in tasks]
    work = sum(min(many * spent for many, spent in task.seconds.items()) for task in tasks)
    return max(max(ranks(edges, least), default=0.0), work / cores)
