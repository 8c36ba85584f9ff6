"""Footprint: the planned bytes of a lowered program at each launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from daceml_train.lowering.arena import Lifetime, plan_arena
from daceml_train.lowering.program import Allocation, KernelLaunch, Program, library_results
from daceml_train.tensor import Dim


@dataclass(frozen=True)
class Footprint:
    """Planned bytes: the arena's size, and the live bytes at each launch in it (without scratch arrays) and in the
    pool.

    Results of library calls count for the pool, although those of PyTorch's own operators use memory donated by the
    arena.
    """

    arena_bytes: int
    arena: tuple[int, ...]
    scratch: tuple[int, ...]
    pool: tuple[int, ...]
    elsewhere: int
    """The peak of bytes in the pool that the arena does not donate."""
    inputs: int

    @property
    def live(self) -> tuple[int, ...]:
        """Live bytes of arrays in arena and pool per launch, without scratch."""
        return tuple(a + b for a, b in zip(self.arena, self.pool, strict=True))

    @property
    def peak(self) -> int:
        """The peak of live bytes of arrays."""
        return max(self.live, default=0)

    @property
    def pool_peak(self) -> int:
        """The peak of bytes of library calls and results in the pool."""
        return max(self.pool, default=0)

    @property
    def planned(self) -> int:
        """Bytes of a run besides its inputs: the arena, and the peak of the rest of the pool."""
        return self.arena_bytes + self.elsewhere


def footprint(program: Program, value: Callable[[Dim], int], returned: frozenset[int] = frozenset()) -> Footprint:
    """The footprint of `program` for sizes that `value` evaluates.

    `returned` are slots that a library call allocates though lowering planned them in the arena. Results for the user
    live to the end.
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
