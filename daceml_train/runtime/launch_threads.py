"""The threads of each launch of a bound plan: what may be adjusted, and the search that finds how many are fastest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sympy

from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.lowering.aten import Placeholder
from daceml_train.lowering.lane_plan import LanePlan
from daceml_train.lowering.program import BufferView, CallLaunch, CopyLaunch, KernelLaunch, Launch, Program
from daceml_train.runtime import contention
from daceml_train.runtime.contention import Contention
from daceml_train.runtime.executor import Plan
from daceml_train.runtime.same_bits import PURE, matrix_of, same_call, same_matmul
from daceml_train.runtime.timing import per_launch
from daceml_train.runtime.tune_threads import Adjustable, ThreadTuner

LARGE = 2e9
"""Operations from which a matmul is not run to find out whether one thread would change its result: it keeps all."""


class Bound(Protocol):
    """The interface of a bound plan that this module uses."""

    program: Program
    threads: int
    order: list[int]
    """Per entry of the plan, the launch of the program."""
    value: Callable[..., int]
    """The value of a size, for a number of blocks."""
    onednn: dict[int, Any]
    """Matmul launches that run in oneDNN."""
    plan: Any
    work: Any
    """Launch -> bytes moved and operations, where they are known."""
    lanes: LanePlan | None
    """Which launches run side by side; None if they run in order."""
    launch_threads: LaunchThreads | None
    in_lanes: Any
    """Segments and waits of the lanes, as the executor takes them."""

    def blocks(self, code: KernelCode) -> int:
        """The number of blocks that a kernel is cut into."""


@dataclass(frozen=True)
class Share:
    """What a launch has of the processor: its threads, and, where launches run side by side, its segment and lane."""

    threads: int
    segment: int = -1
    lane: int = 0
    position: int = 0
    """Its position in the order in which launches start."""
    before: tuple[int, ...] = ()
    """Launches that must have ended when it starts, whatever memory they share."""


def share(bound: Bound, index: int, before: Sequence[int]) -> Share:
    """The share of a launch of a bound plan, which depends on these."""
    threads = bound.threads if bound.launch_threads is None else bound.launch_threads.count(index)
    if bound.lanes is None:
        return Share(threads, before=tuple(before))
    segment, lane = bound.lanes.place[index]
    if len(bound.lanes.segments[segment]) > 1:
        threads = 1
    return Share(threads, segment, lane, bound.lanes.position[index], tuple(before))


def contention_of(bound: Bound) -> Contention | None:
    """What drops the threads of a plan where others have the cores; None for a plan that has one thread."""
    if bound.threads < 2:
        return None

    def use(many: bool) -> None:
        if bound.launch_threads is not None:
            bound.launch_threads.use(many)

    found = Contention(bound.threads, use, limit=contention.quota())
    if contention.crowded():
        found.wait()
    return found


class LaunchThreads:
    """Runs a plan with the threads of a search: it is told the seconds of each run until it is `done`."""

    def __init__(self, bound: Bound, tuner: ThreadTuner) -> None:
        self.bound = bound
        rules = bound.program.rules
        self._pinned = {} if rules is None else dict(rules.threads)
        """Launches whose numbers of threads are given."""
        self.search = tuner.search(self.adjustable(), bound.threads)
        """None where there is nothing to choose."""
        launches = enumerate(bound.program.launches)
        self._alone = {i for i, launch in launches if isinstance(launch, CopyLaunch) or self._one_block(launch)}
        """Launches that run on the calling thread, whatever the count."""
        self._use()

    @property
    def done(self) -> bool:
        """Whether the counts are known."""
        return self.search is None or self.search.done

    def adjustable(self) -> list[Adjustable | None]:
        """Per launch what its threads depend on; None if it takes all of them in any case."""
        return [self._adjusted(index, launch) for index, launch in enumerate(self.bound.program.launches)]

    def add(self, launches: Sequence[int], seconds: Sequence[float]) -> None:
        """Tell the search what a run with its counts took, as `Timing.add`."""
        if self.search is None:
            return
        with self.search.lock:
            if not self.search.done:
                self.search.add(per_launch(launches, seconds))
                self._use()

    def _adjusted(self, index: int, launch: Launch) -> Adjustable | None:
        if index in self._pinned:
            return None
        if isinstance(launch, KernelLaunch):
            code = self.bound.program.codes[launch.code]
            blocks = self.bound.blocks(code)
            sizes = [self.bound.value(d, blocks) for d in code.integers]
            return Adjustable(f"kernel {code.key} {sizes}") if blocks > 1 else None
        if not isinstance(launch, CallLaunch) or index in self.bound.onednn:
            return None
        value, threads = self.bound.value, self.bound.threads
        if launch.direct:
            matrices = [matrix_of(a, value) for a in launch.arguments]
            return Adjustable(
                f"{launch.target} {matrices}", functools.partial(same_matmul, launch.target, matrices, threads)
            )
        if launch.target not in PURE:
            return None
        returned = [matrix_of(self.bound.program.slots[slot], value) for slot in launch.returns if slot is not None]
        shown = [self._shown(a) for a in launch.arguments]
        as_called = functools.partial(same_call, launch, returned, value, threads)
        return Adjustable(f"{launch.target} {shown} {returned}", as_called)

    def _shown(self, argument: Any) -> Any:
        """An argument of a call at the sizes of the plan."""
        if isinstance(argument, BufferView | Placeholder):
            return matrix_of(argument, self.bound.value)
        return self.bound.value(argument) if isinstance(argument, sympy.Expr) else argument

    def _one_block(self, launch: Launch) -> bool:
        return isinstance(launch, KernelLaunch) and self.bound.blocks(self.bound.program.codes[launch.code]) == 1

    def count(self, index: int) -> int:
        """The threads of a launch that runs in order."""
        if index in self._alone:
            return 1
        chosen = 0 if self.search is None else self.search.counts[index]
        found = self._pinned.get(index, chosen)
        return min(found, self.bound.threads) or self.bound.threads

    def by_one(self, index: int) -> bool:
        """Whether a launch runs on one thread, whatever the count."""
        return index in self._alone or self._pinned.get(index) == 1

    def pinned(self, index: int) -> bool:
        """Whether a launch's number of threads is given."""
        return index in self._pinned

    def entries(self, order: Sequence[int]) -> list[int]:
        """Threads per entry of a plan whose entries belong to these launches; see `Plan.threads`."""
        counts = [0] * len(self.bound.program.launches) if self.search is None else list(self.search.counts)
        for launch, count in self._pinned.items():
            counts[launch] = 0 if count >= self.bound.threads else count
        entries = []
        for position, launch in enumerate(order):
            released = position > 0 and order[position - 1] == launch
            entries.append(-1 if released or launch in self._alone else counts[launch])
        return entries if any(counts) else []

    def use(self, many: bool) -> None:
        """Run with the counts of the search and in lanes, or on one thread each and in order, from here on."""
        bound = self.bound
        assert isinstance(bound.plan, Plan)
        if many:
            self._use()
            if bound.in_lanes is not None:
                bound.plan.lanes(*bound.in_lanes)
            return
        bound.plan.threads([-1 if launch in self._alone else self._ones[launch] for launch in bound.order])
        bound.plan.lanes([], [])

    @functools.cached_property
    def _ones(self) -> list[int]:
        """Per launch 1, or 0 where one thread would change its result."""
        found, same = [], dict[str, bool]()
        for index, launch in enumerate(self.adjustable()):
            times = None
            if self.search is not None and (key := self.search.keys[index]) is not None:
                times = self.search.times[key]
            if launch is None:
                found.append(int(self._pinned.get(index) == 1))
            elif times is not None and (1 in times.seconds or 1 in times.unequal):
                found.append(int(1 in times.seconds))
            elif self.bound.work is not None and self.bound.work(index, self.bound.value)[1] > LARGE:
                found.append(0)
            else:
                if launch.text not in same:
                    same[launch.text] = launch.same(1)
                found.append(int(same[launch.text]))
        return found

    def _use(self) -> None:
        """Run with the counts of the search from here on."""
        if self.search is None and not self._pinned:
            return
        assert isinstance(self.bound.plan, Plan)
        self.bound.plan.threads(self.entries(self.bound.order))
