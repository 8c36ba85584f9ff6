"""Footprint: the bytes that a lowered program holds at each of its launches, as it is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from daceml_train.lowering.arena import Lifetime, plan_arena
from daceml_train.lowering.program import Allocation, KernelLaunch, Program, library_results
from daceml_train.tensor import Dim


@dataclass(frozen=True)
class Footprint:
    """Planned bytes: the arena's size, and what lives at each launch in it (scratch arrays apart) and in the pool.

    Results of library calls count as the pool's, although those of PyTorch's own take memory that the arena offers.
    """

    arena_bytes: int
    arena: tuple[int, ...]
    scratch: tuple[int, ...]
    pool: tuple[int, ...]
    elsewhere: int
    """The most bytes at one launch that lie in the pool and are not offered by the arena."""
    inputs: int

    @property
    def live(self) -> tuple[int, ...]:
        """Bytes of arrays in arena and pool per launch, without scratch."""
        return tuple(a + b for a, b in zip(self.arena, self.pool, strict=True))

    @property
    def peak(self) -> int:
        """The most bytes of arrays at one launch."""
        return max(self.live, default=0)

    @property
    def pool_peak(self) -> int:
        """The most bytes that library calls and results hold in the pool."""
        return max(self.pool, default=0)

    @property
    def planned(self) -> int:
        """Bytes that a run takes besides its inputs: the arena, and the rest of the pool at its fullest."""
        return self.arena_bytes + self.elsewhere


def footprint(program: Program, value: Callable[[Dim], int], returned: frozenset[int] = frozenset()) -> Footprint:
    """What `program` takes for sizes that `value` gives.

    `returned` are slots that a library call makes though lowering planned them in the arena. What is handed to the
    user lives to the end.
    """
    count = len(program.launches)
    handed = {place.slot for place in program.outputs}
    scratch_slots = {
        place.slot
        for launch in program.launches
        if isinstance(launch, KernelLaunch) and (kept := len(program.codes[launch.code].scratch))
        for place in launch.places[-kept:]
    }
    offered = library_results(program) | (returned - handed)
    change = {kind: [0] * (count + 1) for kind in ("arena", "scratch", "pool", "elsewhere")}
    inputs, lifetimes = 0, []
    for index, slot in enumerate(program.slots):
        if slot.home is Allocation.input:
            inputs += value(slot.bytes)
            continue
        if slot.first < 0:
            continue
        last = count - 1 if index in handed else slot.last
        kind = "scratch" if index in scratch_slots else "arena"
        if slot.home is not Allocation.arena or index in returned:
            kind = "pool"
        if kind != "pool" or index in offered:
            lifetimes.append(Lifetime(value(slot.bytes), slot.first, slot.last))
        for curve in ("pool", "elsewhere") if kind == "pool" and index not in offered else (kind,):
            change[curve][slot.first] += value(slot.bytes)
            change[curve][last + 1] -= value(slot.bytes)
    curves = {}
    for kind, steps in change.items():
        curves[kind] = tuple(accumulate(steps[:count]))
    _, size = plan_arena(lifetimes)
    elsewhere = max(curves["elsewhere"], default=0)
    return Footprint(size, curves["arena"], curves["scratch"], curves["pool"], elsewhere, inputs)
