"""Lane plan: the order, the lanes, the lifetimes, and the waits of launches that run side by side.

The schedule comes first: only what a launch reads and writes orders it. Memory is planned for that schedule, and where
two arrays share memory, all launches of the later one wait for all of the earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from daceml_train.lowering.lanes import LaneSchedule, Task, segments, shortest
from daceml_train.lowering.streams import Access, Work, dependences, reduced

WINDOWS = (None, 64, 16, 4)
"""How far a launch may overtake others, from the fastest schedule to the one with the fewest arrays alive."""


@dataclass
class LanePlan:
    """Launches in the order in which they start, and per segment and lane. A segment of one lane runs in order."""

    order: list[int]
    segments: list[list[list[int]]]
    seconds: float = 0.0
    """What the schedule is expected to take."""
    overlap: dict[int, int] = field(default_factory=dict)
    """Launch -> the last position in the order that starts before it ends, where that is a later one."""

    def __post_init__(self) -> None:
        self.position = {launch: at for at, launch in enumerate(self.order)}
        self.place = {
            launch: (number, lane)
            for number, segment in enumerate(self.segments)
            for lane, launches in enumerate(segment)
            for launch in launches
        }
        """Launch -> segment and lane."""

    @property
    def lanes(self) -> int:
        """The most lanes of a segment."""
        return max(map(len, self.segments), default=1)

    def life(self, touching: Sequence[int]) -> tuple[int, int]:
        """The first and the last position in the order at which an array is in use that these launches touch."""
        first = min(self.position[i] for i in touching)
        return first, max(self.overlap.get(i, self.position[i]) for i in touching)

    def waits(self, edges: Sequence[Sequence[int]]) -> list[list[int]]:
        """Per launch those of other lanes of its segment that it waits for; `edges` are its predecessors.

        What follows from the order within a lane, or from other waits, is left out.
        """
        last: dict[tuple[int, int], int] = {}
        before: list[list[int]] = []
        for at, launch in enumerate(self.order):
            place = self.place[launch]
            own = {self.position[p] for p in edges[launch] if self.place[p][0] == place[0]}
            if place in last:
                own.add(last[place])
            last[place] = at
            before.append(sorted(own))
        found: list[list[int]] = [[] for _ in self.order]
        for at, kept in enumerate(reduced(before)):
            launch = self.order[at]
            found[launch] = [q for p in kept if self.place[q := self.order[p]] != self.place[launch]]
        return found


def lane_plan(
    works: Sequence[Work], tasks: Sequence[Task], cores: int, window: int | None = None
) -> tuple[LanePlan, LaneSchedule]:
    """The fastest plan found in which launches beside others have one core each."""
    schedule, _ = shortest(dependences(works), tasks, cores, wide=False, window=window)
    parts = segments(schedule, cores)
    # Launches of one segment precede those of the next one in the order, too.
    number = {launch: at for at, part in enumerate(parts) for lane in part for launch in lane}
    order = sorted(schedule.order, key=number.__getitem__)
    plan = LanePlan(order, parts, schedule.seconds)
    starts = [schedule.start[i] for i in order]
    for at, launch in enumerate(order):
        last = at
        while last + 1 < len(order) and starts[last + 1] < schedule.end[launch]:
            last += 1
        if last > at:
            plan.overlap[launch] = last
    return plan, schedule


def reuse_edges(
    plan: LanePlan, touching: Mapping[int, Sequence[int]], memory: Mapping[int, tuple[int, int]]
) -> dict[int, set[int]]:
    """Launch -> earlier launches whose arrays had the memory of one of its arrays.

    `touching` has per array the launches that touch it, `memory` the first byte and the one after the last.
    """
    arrays = sorted((a for a in memory if touching.get(a)), key=lambda a: min(plan.position[i] for i in touching[a]))
    works = [Work((), (Access(0, *memory[a]),)) for a in arrays]
    edges: dict[int, set[int]] = {}
    for array, earlier in zip(arrays, dependences(works), strict=True):
        before = {launch for e in earlier for launch in touching[arrays[e]]}
        for launch in touching[array] if before else ():
            edges.setdefault(launch, set()).update(before - {launch})
    return edges
