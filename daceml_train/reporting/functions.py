"""From the records of compilation to what a report shows of each compiled function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from daceml_train.driver.records import Record
from daceml_train.passes.base import LEVELS
from daceml_train.passes.pipeline import PassRecord
from daceml_train.reporting.model import Change, Compiled, Kept, Launched
from daceml_train.reporting.numbers import number
from daceml_train.reporting.schedule import Schedule
from daceml_train.tensor import Dim

_LATER = LEVELS[1:]
"""The levels that see forward and backward pass; what runs before them sees the forward pass alone."""


def functions_of(records: Sequence[Record]) -> tuple[Compiled, ...]:
    """Records in the order of compilation, a backward pass joined to the forward pass before it."""
    groups: list[list[Record]] = []
    for record in records:
        if groups and len(groups[-1]) == 1 and record.name == f"{groups[-1][0].name} backward":
            groups[-1].append(record)
        else:
            groups.append([record])
    return tuple(_compiled(group) for group in groups)


def _compiled(group: Sequence[Record]) -> Compiled:
    first = group[0]
    linked = [r.executable for r in group if r.executable is not None]
    sizes = {name: value for executable in linked for name, value in executable.sizes.items()}
    levels = tuple(_levels(group, sizes))
    captured = number(first.bytes_captured, sizes)
    calls: dict[str, int] = {}
    for record in group:
        for name, count in record.calls.items():
            calls[name] = calls.get(name, 0) + count
    programs = [Schedule(r.executable.program, r.costs, sizes) for r in group if r.executable is not None]
    launches = [
        launch
        for i, (program, record) in enumerate(zip(programs, group, strict=False))
        for launch in _launches(i, program, record)
    ]
    memory = [size for p in programs for size in p.memory()]
    inputs = [p.inputs() for p in programs]
    kept = [k for p in programs[:1] for k in p.kept(*(after.program for after in programs[1:]))]
    stages: dict[str, float] = {}
    for record in group:
        for stage, seconds in record.seconds.items():
            stages[stage] = max(stages.get(stage, 0.0), seconds)  # both halves note the loading of the pair
    return Compiled(
        name=first.name,
        programs=len(group),
        captured=captured,
        moved=levels[-1].after if levels else captured,
        flops=number(_sum(r.flops for r in group), sizes),
        levels=levels,
        passes=tuple(_passes(group, sizes)),
        kernels=sum(r.kernels for r in group),
        distinct_kernels=sum(r.distinct_kernels for r in group),
        calls=dict(sorted(calls.items())),
        fallbacks=tuple(dict.fromkeys(fallback for record in group for fallback in record.fallbacks)),
        stages=stages,
        warm=first.warm,
        arena=max((executable.arena.capacity for executable in linked), default=0),
        sizes=sizes,
        launches=tuple(launches),
        memory=tuple(memory),
        inputs=max(inputs, default=0),
        kept=tuple(kept),
        recomputed=tuple(_recomputed(group, sizes)),
        device=linked[0].device.name if linked else "cpu",
        left_out=tuple(first.left_out),
        constant_sizes=tuple(first.constant_sizes),
        notes=tuple(note for record in group for note in record.notes),
        needs_python=first.needs_python,
        network=_network(group, sizes),
        autotuned=_autotuned(executable.autotuned() for executable in linked),
    )


def _launches(number_: int, program: Schedule, record: Record) -> Iterator[Launched]:
    executable = record.executable
    known = ((), ()) if executable is None else (executable.shapes(), executable.shares())
    return program.launches(number_, _seconds(record), *known)


def _autotuned(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The counts of both halves."""
    pairs = list(counts)
    return sum(measured for measured, _ in pairs), sum(changed for _, changed in pairs)


def _network(group: Sequence[Record], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Collectives, and the bytes that each rank sends."""
    sent = [number(cost.network, sizes) for record in group for cost in record.costs if cost.network]
    return len(sent), sum(size for size in sent if isinstance(size, int))


def _recomputed(group: Sequence[Record], sizes: Mapping[str, int]) -> list[Kept]:
    """Rematerialized arrays, the largest first."""
    found = []
    for array in (a for record in group for a in record.recomputed):
        size = number(array.tensor.bytes, sizes)
        shape = ", ".join(str(number(extent, sizes)) for extent in array.tensor.shape)
        type_text = f"{array.tensor.dtype.name}[{shape}]"
        found.append(Kept(type_text, size if isinstance(size, int) else 0, array.operators, array.module))
    return sorted(found, key=lambda k: -k.bytes)


def _passes(group: Sequence[Record], sizes: Mapping[str, int]) -> Iterator[tuple[str, Change]]:
    """Level and change of each pass; forward and backward pass have the same ones and are added up."""
    for level in LEVELS:
        of_level = [[p for p in record.passes if p.level == level] for record in group]
        for same in zip(*(ps for ps in of_level if ps), strict=True):
            change = _change(same[0].name, same, same, sizes)
            if level != "distribution" or any(change.messages):
                yield level, change


def _levels(group: Sequence[Record], sizes: Mapping[str, int]) -> Iterator[Change]:
    """One change per level; for levels after the partition, forward and backward pass are added up."""
    before: Sequence[PassRecord] = ()
    for level in _LATER:
        of_level = [[p for p in record.passes if p.level == level] for record in group]
        starts, ends = [ps[0] for ps in of_level if ps], [ps[-1] for ps in of_level if ps]
        if not starts:
            continue
        if len(before) == 1 and len(starts) == 2:
            yield _cut(before[0], starts, sizes)
        change = _change(level, starts, ends, sizes)
        if level == "distribution" and not any(change.messages):
            continue  # of a process that trains alone
        yield dataclasses.replace(change, seconds=sum(p.seconds for ps in of_level for p in ps))
        before = ends


def _cut(joint: PassRecord, halves: Sequence[PassRecord], sizes: Mapping[str, int]) -> Change:
    after = number(_sum(p.bytes_before for p in halves), sizes)
    operators = joint.operators_after, sum(p.operators_before for p in halves)
    flops = number(_sum(p.flops[0] for p in halves), sizes)
    return Change("partition into forward and backward", number(joint.bytes_after, sizes), after, operators, 0.0, flops)


def _change(name: str, starts: Sequence[PassRecord], ends: Sequence[PassRecord], sizes: Mapping[str, int]) -> Change:
    before = number(_sum(p.bytes_before for p in starts), sizes)
    after = number(_sum(p.bytes_after for p in ends), sizes)
    operators = sum(p.operators_before for p in starts), sum(p.operators_after for p in ends)
    flops = number(_sum(p.flops[1] for p in ends), sizes)
    network = number(_sum(p.network[0] for p in starts), sizes), number(_sum(p.network[1] for p in ends), sizes)
    messages = sum(p.messages[0] for p in starts), sum(p.messages[1] for p in ends)
    return Change(name, before, after, operators, sum(p.seconds for p in ends), flops, network, messages)


def _sum(sizes: Iterator[Dim] | Sequence[Dim]) -> Dim:
    total: Dim = 0
    for size in sizes:
        total = total + size
    return total


# ---- numbers --------------------------------------------------------------------------------------------------------


def _seconds(record: Record) -> list[float]:
    """The measured seconds per launch; empty if nothing was measured."""
    timing = record.executable.timing if record.executable is not None else None
    return timing.median() if timing is not None else []
