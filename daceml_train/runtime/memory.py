"""Memory planning: offsets in one arena for arrays with known lifetimes.

Arrays whose lifetimes do not overlap share memory. Linear scan over the launches with a best-fit free list that
merges neighbours, as in a heap allocator run ahead of time.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector."""


@dataclass(frozen=True)
class Lifetime:
    """An array's bytes, and the first and last launch that touch it."""

    bytes: int
    first: int
    last: int


def plan_arena(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """An offset per array, and the arena's size in bytes. Arrays of no bytes get offset 0."""
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
        elif free and free[-1][0] + free[-1][1] == top:  # grow the last hole
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
