"""A bound plan on a GPU: its inputs on the device, its launches' streams, and out-of-memory messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from daceml_train.analysis.device_model import DeviceModel
from daceml_train.errors import DeviceMismatch
from daceml_train.lowering.device import GPU
from daceml_train.lowering.program import (
    Allocation,
    CallLaunch,
    ControlLaunch,
    CopyLaunch,
    KernelLaunch,
    Launch,
    Program,
    touched,
)
from daceml_train.lowering.streams import Access, Schedule, Work, schedule
from daceml_train.tensor import Dim, DType, show_shape

ARENA, INNER = -1, -2
"""The arena, and that of bodies of control flow, as memory that launches access; the others are slots."""
WORDS_PER_THREAD = 4
"""Bytes that a thread of a kernel moves at once."""
FLOPS_PER_THREAD = 1e4
"""Operations per thread at which a library call saturates the device."""


class Bound(Protocol):
    """What this module requires of a program for one set of sizes (`executable.BoundPlan`)."""

    program: Program
    work: Any
    """Launch -> bytes moved and operations, where they are known."""
    offsets: dict[int, int]
    used: list[int]
    arena_bytes: int

    def bytes_of(self, slot: int) -> int:
        """Bytes of a slot."""
        ...

    @property
    def value(self) -> Callable[[Dim], int]:
        """The value of a size."""
        ...


def placed(program: Program, device: GPU, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs on the device: 0-d ones are copied there, others must be there. Raises `Invalid` by name."""
    tensors = []
    for entry, tensor in zip(program.inputs, inputs, strict=True):
        if not device.holds(tensor):
            if tensor.ndim or entry.mutable:
                name = entry.path or entry.name
                raise DeviceMismatch(f"{name} is on {tensor.device}, the program runs on {device.torch}")
            tensor = tensor.to(device.torch)
        tensors.append(tensor)
    return tensors


def schedule_of(plan: Bound, model: DeviceModel) -> Schedule:
    """The streams on which a plan's launches run in a CUDA graph."""
    return schedule([work(plan, i, launch, model) for i, launch in enumerate(plan.program.launches)])


def work(plan: Bound, index: int, launch: Launch, model: DeviceModel) -> Work:
    """What a launch accesses, and an estimate of its time."""
    slots = dict.fromkeys(touched(launch))
    match launch:
        case KernelLaunch(places=places, writes=writes):
            written = {places[i].slot for i in writes}
        case CallLaunch(returns=returns, writes=writes):
            written = {*writes, *(slot for slot in returns if slot is not None)}
        case CopyLaunch(pairs=pairs):
            written = {target.slot for target, _ in pairs}
        case ControlLaunch(returns=returns):
            written = set(returns)
    accesses = {slot: _access(plan, slot) for slot in slots}
    words = sum(a.stop - a.start for a in accesses.values()) / 4
    moved, flops = (4 * words, 0) if plan.work is None else plan.work(index, plan.value)
    rate = model.vector if isinstance(launch, KernelLaunch) else model.peaks.get(_dtype(plan, slots), model.vector)
    seconds = model.launch_seconds + max(moved / model.bandwidth, flops / rate)
    busy = max(words / WORDS_PER_THREAD, flops / FLOPS_PER_THREAD) / model.resident
    inner = (Access(INNER, 0, 1),) if isinstance(launch, ControlLaunch) else ()
    return Work(
        tuple(a for slot, a in accesses.items() if slot not in written),
        (*(a for slot, a in accesses.items() if slot in written), *inner),
        seconds,
        min(1.0, busy),
    )


def _dtype(plan: Bound, slots: Iterable[int]) -> str:
    """The type in which a library call multiplies: the narrowest floating-point type of its arrays."""
    types = {plan.program.slots[slot].dtype for slot in slots}
    return min((t for t in types if t.is_float), key=lambda t: (t.bytes, t.name), default=DType.float32).name


def _access(plan: Bound, slot: int) -> Access:
    """All bytes of a slot."""
    size = max(1, plan.bytes_of(slot))
    start = plan.offsets.get(slot)
    return Access(slot, 0, size) if start is None else Access(ARENA, start, start + size)


def biggest(plan: Bound, cause: str, most: int = 5) -> str:
    """An out-of-memory message: the biggest arrays of a plan, and where they are produced."""
    program = plan.program
    sizes = {i: plan.bytes_of(i) for i in plan.used}
    lines = [cause.splitlines()[0] if cause else "out of memory"]
    lines.append(f"the arena of planned arrays takes {plan.arena_bytes / 2**20:.1f} MiB; the biggest arrays:")
    for index in sorted(sizes, key=lambda i: -sizes[i])[:most]:
        slot = program.slots[index]
        if slot.home is Allocation.input:
            where = f"the input {program.inputs[slot.input].path or program.inputs[slot.input].name}"
        else:
            where = f"produced at {program.launches[slot.first].origin}"
        shape = show_shape([plan.value(size) for size in slot.shape])
        lines.append(f"  {sizes[index] / 2**20:.1f} MiB  {slot.dtype.short}{shape}  {where}")
    return "\n".join(lines)
