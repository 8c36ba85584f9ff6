"""Levels in the executor: plans of cells that take their number of rows at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_double, c_int64, c_void_p

from daceml_train.errors import Invalid
from daceml_train.lowering.program import Cells, Gather
from daceml_train.runtime.executor import Plan, PlanView
from daceml_train.runtime.native_library import library

SAMPLES = (1021, 509, 263, 760)
"""Numbers of rows for which a cell is bound, to find how its plan's integers depend on that number."""


def capacity(count: int) -> int:
    """The number of rows for which the arena of a cell is planned: a power of two, so few batches differ in it.

    Memory that a run does not touch costs nothing.
    """
    return max(1024, 1 << (count - 1).bit_length())


def varying(bind: Callable[[int], Plan]) -> Plan:
    """A plan for any number of rows, from plans for a few. Raises `Invalid` if it does not depend linearly on it."""
    samples = [bind(rows) for rows in SAMPLES]
    plan = samples[0]
    handles = (c_void_p * len(samples))(*[each._handle for each in samples])
    plan._checked(plan._native.plan_vary(plan._handle, handles, (c_int64 * len(SAMPLES))(*SAMPLES), len(SAMPLES)))
    return plan


def add_levels(
    plan: Plan,
    bodies: Sequence[Plan],
    operands: Sequence[PlanView],
    results: Sequence[int],
    cells: Cells,
    counts: Sequence[int],
    reverse: bool,
    tag: int,
) -> int:
    """Launch levels in `plan`; `results` are result slots. See `ops.levels` for the meaning."""
    if len(bodies) != len(counts):
        raise Invalid(f"levels of {len(counts)} kinds takes as many bodies, given {len(bodies)}")
    numbers: list[int] = []

    def write(items: Sequence[int]) -> None:
        numbers.extend((len(items), *items))

    write([view.number for view in operands])
    write(results)
    numbers.extend((cells.count, reverse))
    own = cells.count
    for kind, count in enumerate(counts):
        numbers.append(count)
        write(cells.rows[kind])
        write(cells.shared[kind])
        write(cells.states[kind])
        write(range(own, own + cells.own[kind]))
        write([number for pair in cells.children[kind] for number in pair])
        write(cells.written[kind])
        write([number for gather in cells.gathers[kind] for number in _numbers(gather)])
        write([number for added in cells.added[kind] for number in (added.output, added.start)])
        own += cells.own[kind]
    plan._bodies += bodies
    handles = (c_void_p * len(bodies))(*[body._handle for body in bodies])
    native = plan._native
    return plan._added(native.plan_levels(plan._handle, handles, len(bodies), (c_int64 * len(numbers))(*numbers), tag))


def _numbers(gather: Gather) -> tuple[int, ...]:
    return gather.result, len(gather.children), *gather.children


def last_seconds(most: int) -> list[float]:
    """Seconds per level of the last levels that this thread ran, in the order in which they ran; `most` at most."""
    found = (c_double * most)()
    count: int = library().levels_seconds(found, most)
    return list(found[: min(count, most)])
