"""Memory planning: offsets in one arena for arrays with known live ranges.

Arrays whose live ranges do not overlap share memory. Of two plans, the smaller one is used. One places arrays by size,
the largest first, each into the tightest gap between those that are live at the same time (Pisarchyk & Lee,
"Efficient Memory Management for Deep Neural Net Inference", 2020, "greedy by size"). The other is a linear scan over
the launches with a best-fit free list that merges neighbors, as in a heap allocator run ahead of time.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Alignment in bytes: a cache line, and the widest vector."""
PLACED_BY_SIZE = 2048
"""The largest number of arrays placed by size, in time quadratic in it; smaller arrays follow them in memory."""


@dataclass(frozen=True)
class Lifetime:
    """An array's bytes, and the first and last launch that touch it."""

    bytes: int
    first: int
    last: int


def plan_arena(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """An offset per array, and the arena's size in bytes. Arrays of no bytes get offset 0."""
    return min(_by_size(lifetimes), _by_time(lifetimes), key=lambda plan: plan[1])


def lower_bound(lifetimes: Sequence[Lifetime]) -> int:
    """The peak of live bytes, each array rounded up to the alignment: a lower bound of any plan."""
    changes = [(x.first, _aligned(x.bytes)) for x in lifetimes] + [(x.last + 1, -_aligned(x.bytes)) for x in lifetimes]
    total = most = 0
    for _, change in sorted(changes):
        total += change
        most = max(most, total)
    return most


def _by_size(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    offsets = [0] * len(lifetimes)
    order = sorted(
        (i for i, x in enumerate(lifetimes) if x.bytes > 0),
        key=lambda i: (-lifetimes[i].bytes, lifetimes[i].first - lifetimes[i].last, i),
    )
    placed: list[tuple[int, int, int, int]] = []  # (offset, end, first launch, last launch), sorted
    top = 0
    for i in order[:PLACED_BY_SIZE]:
        life, need = lifetimes[i], _aligned(lifetimes[i].bytes)
        tightest, chosen, reached = -1, -1, 0
        for offset, end, first, last in placed:
            if first <= life.last and life.first <= last:
                gap = offset - reached
                if gap >= need and (tightest < 0 or gap < tightest):
                    tightest, chosen = gap, reached
                reached = max(reached, end)
        offsets[i] = chosen if chosen >= 0 else reached
        top = max(top, offsets[i] + need)
        bisect.insort(placed, (offsets[i], offsets[i] + need, life.first, life.last))
    rest = order[PLACED_BY_SIZE:]
    above, size = _by_time([lifetimes[i] for i in rest])
    for i, offset in zip(rest, above, strict=True):
        offsets[i] = top + offset
    return offsets, top + size


def _by_time(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    offsets = [0] * len(lifetimes)
    order = sorted((i for i, x in enumerate(lifetimes) if x.bytes > 0), key=lambda i: lifetimes[i].first)
    ends: list[tuple[int, int]] = []  # (last launch, array), sorted
    free: list[tuple[int, int]] = []  # (offset, bytes), sorted by offset
    top = 0
    for i in order:
        life = lifetimes[i]
        while ends and ends[0][0] < life.first:
            _, dead = ends.pop(0)
            _give_back(free, offsets[dead], _aligned(lifetimes[dead].bytes))
        need = _aligned(life.bytes)
        fitting = [(size, offset) for offset, size in free if size >= need]
        if fitting:
            size, offset = min(fitting)
            free.remove((offset, size))
            if size > need:
                bisect.insort(free, (offset + need, size - need))
        elif free and free[-1][0] + free[-1][1] == top:  # grow the last gap
            offset, _ = free.pop()
            top = offset + need
        else:
            offset, top = top, top + need
        offsets[i] = offset
        bisect.insort(ends, (life.last, i))
    return offsets, top


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _give_back(free: list[tuple[int, int]], offset: int, size: int) -> None:
    at = bisect.bisect(free, (offset, 0))
    if at < len(free) and free[at][0] == offset + size:
        size += free.pop(at)[1]
    if at > 0 and sum(free[at - 1]) == offset:
        offset, before = free[at - 1][0], free.pop(at - 1)[1]
        size, at = size + before, at - 1
    free.insert(at, (offset, size))
