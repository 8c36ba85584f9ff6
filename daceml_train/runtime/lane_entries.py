"""A lane plan as the executor takes it: positions in its list, and what each entry waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from daceml_train.lowering.lane_plan import LanePlan, reuse_edges
from daceml_train.lowering.program import CallLaunch, CopyLaunch, KernelLaunch, Program
from daceml_train.lowering.streams import dependences
from daceml_train.runtime.lane_works import works
from daceml_train.runtime.same_bits import PURE


class Bound(Protocol):
    """The interface of a bound plan that this module uses."""

    program: Program
    value: Callable[..., int]
    onednn: dict[int, Any]
    order: list[int]
    """Per entry of the executor's list, the launch of the program; further entries of a launch release slots."""
    last_use: dict[int, list[int]]
    offsets: dict[int, int]
    touching: list[list[int]]
    plan: Any

    def bytes_of(self, slot: int) -> int:
        """Bytes of a slot."""


def beside(bound: Bound, index: int) -> bool:
    """Whether a launch may run beside others: kernels of ours, copies, matmuls and convolutions.

    Other library calls may fail, draw random numbers, or communicate: they keep their order and run alone.
    """
    launch = bound.program.launches[index]
    if isinstance(launch, CallLaunch):
        return index not in bound.onednn and (launch.direct or launch.target in PURE)
    return isinstance(launch, KernelLaunch | CopyLaunch)


def edges_of(bound: Bound) -> list[list[int]]:
    """Per launch the earlier launches of the program that it depends on, by the arrays that they touch."""
    return dependences(works(bound, lambda index: not beside(bound, index)))


def run_in_lanes(bound: Bound, lanes: LanePlan) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Let the executor run the plan's launches in these lanes; returns what it was told."""
    edges = [set(before) for before in edges_of(bound)]
    memory = {slot: (at, at + bound.bytes_of(slot)) for slot, at in bound.offsets.items()}
    for launch, before in reuse_edges(lanes, dict(enumerate(bound.touching)), memory).items():
        edges[launch] |= before
    segments, waits = entries_of(bound, lanes, lanes.waits([sorted(before) for before in edges]))
    bound.plan.lanes(segments, waits)
    return segments, waits


def entries_of(
    bound: Bound, lanes: LanePlan, waits: Sequence[Sequence[int]]
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Segments and waits over the entries of the executor's list, from those over launches.

    The release of a slot waits for all that touch it in other lanes.
    """
    entries: dict[int, list[int]] = {}
    for position, launch in enumerate(bound.order):
        entries.setdefault(launch, []).append(position)
    segments = [[[e for launch in lane for e in entries[launch]] for lane in part] for part in lanes.segments]
    found: list[list[int]] = [[] for _ in bound.order]
    for launch, (own, *releases) in entries.items():
        found[own] = [entries[earlier][0] for earlier in waits[launch]]
        for release, slot in zip(releases, bound.last_use.get(launch, ()), strict=True):
            others = (i for i in bound.touching[slot] if lanes.place[i][0] == lanes.place[launch][0])
            found[release] = [entries[i][0] for i in others if lanes.place[i] != lanes.place[launch]]
    return segments, found
