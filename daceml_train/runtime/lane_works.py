"""What the launches of a bound plan access on a CPU, and which of them may run beside others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from daceml_train.lowering.program import (
    Allocation,
    BufferView,
    CallLaunch,
    ControlLaunch,
    CopyLaunch,
    KernelLaunch,
    Launch,
    Program,
    touched,
    views,
)
from daceml_train.lowering.streams import Access, Work

ORDER = -1
"""What launches access as if it were memory that keep their order: library calls that may fail, draw random numbers, or
communicate; and updates, which must not come before such a call that may fail."""


class Bound(Protocol):
    """The interface of a bound plan that this module uses."""

    program: Program
    value: Callable[..., int]
    """The value of a size, for a number of blocks."""

    def bytes_of(self, slot: int) -> int:
        """Bytes of a slot."""


def written(launch: Launch) -> set[int]:
    """Slots that a launch writes."""
    match launch:
        case KernelLaunch(places=places, writes=writes):
            return {places[i].slot for i in writes}
        case CallLaunch(returns=returns, writes=writes, direct=direct, arguments=arguments):
            out = {arguments[0].slot} if direct else set()
            return {*writes, *(slot for slot in returns if slot is not None), *out}
        case CopyLaunch(pairs=pairs):
            return {target.slot for target, _ in pairs}
        case ControlLaunch(returns=returns):
            return set(returns)


def works(bound: Bound, ordered: Callable[[int], bool]) -> list[Work]:
    """What each launch accesses: its arrays, by what computes them and not by the memory that they share.

    `ordered` says of a launch whether it keeps its order among others of its kind.
    """
    program = bound.program
    columns = _Columns(bound)
    found = []
    for index, launch in enumerate(program.launches):
        writes = written(launch)
        reads, changes = list[Access](), list[Access]()
        for slot in dict.fromkeys(touched(launch)):
            (changes if slot in writes else reads).append(columns.access(slot, launch))
        if ordered(index):
            changes.append(Access(ORDER, 0, 1))
        elif any(program.slots[slot].mutable for slot in writes):
            reads.append(Access(ORDER, 0, 1))
        found.append(Work(tuple(reads), tuple(changes)))
    return found


class _Columns:
    """Which columns of an array a launch touches: the operands of a concatenation are written side by side."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self.seen: dict[int, list[BufferView]] = {}
        whole = set()
        for launch in bound.program.launches:
            for view in views(launch):
                self.seen.setdefault(view.slot, []).append(view)
            if isinstance(launch, CallLaunch | ControlLaunch):
                whole |= {slot for slot in launch.returns if slot is not None}
        self.period = {slot: self._period(slot) for slot in self.seen if slot not in whole}

    def access(self, slot: int, launch: Launch) -> Access:
        """The columns of an array that a launch touches; all of it where its views are not columns."""
        period = self.period.get(slot, 0)
        spans = [self._columns(view, period) for view in views(launch) if view.slot == slot] if period else []
        known = [span for span in spans if span is not None]
        if not known:
            return Access(slot, 0, max(period, 1))
        return Access(slot, min(a for a, _ in known), max(b for _, b in known))

    def _period(self, slot: int) -> int:
        """The length of the rows of which all views of an array are columns; 0 if there are no such rows."""
        entry = self.bound.program.slots[slot]
        if entry.home is not Allocation.arena:
            return 0  # whoever comes first allocates it
        views_ = self.seen[slot]
        strides = {self.bound.value(s) for v in views_ for s in v.strides} - {0}
        for period in sorted(strides - {1}, reverse=True):
            spans = [self._columns(view, period) for view in views_]
            if all(v.dtype is entry.dtype for v in views_) and None not in spans and len(set(spans)) > 1:
                return period
        return 0

    def _columns(self, view: BufferView, period: int) -> tuple[int, int] | None:
        first, inner = self.bound.value(view.offset) % period, 1
        for size, stride in zip(map(self.bound.value, view.shape), map(self.bound.value, view.strides), strict=True):
            if stride % period:
                inner += (size - 1) * stride
        return (first, first + inner) if first + inner <= period else None
