"""Prepacked weights: oneDNN lays out weights once instead of at every call.

Its convolutions and matmuls read weights in a blocked order that depends on the shapes and the processor
(https://uxlfoundation.github.io/oneDNN/dev_guide_inference.html, "weights packing"); given a plain array, they copy it
into that order first, which for few images takes as long as the convolution. Where a weight stays the same between
calls, it is copied once, into an opaque PyTorch tensor, and the call becomes `mkldnn::_convolution_pointwise` or
`mkldnn::_linear_pointwise`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from daceml_train.lowering.program import Allocation, BufferView, CallLaunch, Packing, Program, ProgramInput, touched
from daceml_train.runtime.tune_matmul import SMALLEST, available, onednn_call
from daceml_train.tensor import Dim, DType, Tensor, same_shape

FEWEST_ROWS = 8
"""A matmul with fewer rows reads its weight once in any layout, and the BLAS has a special case for it."""


def pack(program: Program, held: Collection[str]) -> Program:
    """The program with calls that take weights in oneDNN's layout, where the weights are the inputs `held`.

    An input is packed if a single call reads it, as its weight, in float32. The program is changed in place.
    """
    if not available() or not hasattr(torch.ops.mkldnn, "_reorder_convolution_weight"):
        return program
    readers: dict[int, list[int]] = {}
    for index, launch in enumerate(program.launches):
        for number in set(touched(launch)):
            readers.setdefault(number, []).append(index)
    given = {place.slot for place in program.outputs}
    for index, launch in enumerate(program.launches):
        if not isinstance(launch, CallLaunch):
            continue
        found = _convolution(program, launch) or _product(program, launch)
        if found is None:
            continue
        weight, packing, call = found
        slot = program.slots[weight.slot]
        entry = program.inputs[slot.input] if slot.home is Allocation.input else None
        alone = readers[weight.slot] == [index] and _count(launch.arguments, weight.slot) == 1
        if entry is None or entry.name not in held or entry.mutable or not alone or weight.slot in given:
            continue
        program.inputs[slot.input] = replace(entry, packing=packing)
        program.slots[weight.slot] = replace(slot, opaque=True)
        program.launches[index] = call
        for returned in call.returns:
            if returned is not None:
                program.slots[returned] = replace(program.slots[returned], home=Allocation.result)
    return program


def packed(entry: ProgramInput, tensor: torch.Tensor) -> torch.Tensor:
    """What a program takes for its input `entry`: `tensor` in the layout of the entry."""
    packing = entry.packing
    if packing is None:
        return tensor
    weight = tensor.detach()
    if tuple(weight.stride()) != entry.strides:
        weight = torch.empty_strided(entry.shape, entry.strides, dtype=weight.dtype, device="cpu").copy_(weight)
    seen = weight.as_strided(packing.shape, packing.strides, weight.storage_offset() + packing.offset)
    result: torch.Tensor = getattr(torch.ops.mkldnn, packing.target)(seen, *packing.arguments)
    return result


def _convolution(program: Program, launch: CallLaunch) -> tuple[BufferView, Packing, CallLaunch] | None:
    """A convolution's weight, its packing, and the call that takes the packed weight."""
    if launch.target != "aten::convolution" or launch.returns == (None,):
        return None
    x, weight, bias, stride, padding, dilation, transposed, _, groups = launch.arguments
    sizes = _integers(weight.shape, weight.strides, (weight.offset,))
    if transposed or sizes is None or not weight.dtype is x.dtype is DType.float32 or len(x.shape) not in (4, 5):
        return None
    shape = _integers(x.shape)
    arguments = (list(padding), list(stride), list(dilation), groups, None if shape is None else list(shape[0]))
    packing = Packing("_reorder_convolution_weight", sizes[0], sizes[1], sizes[2][0], arguments)
    whole = replace(weight, shape=weight.shape, offset=0)
    values = (x, whole, bias, padding, stride, dilation, groups, "none", (), "")
    return weight, packing, replace(launch, target="mkldnn::_convolution_pointwise", arguments=values)


def _product(program: Program, launch: CallLaunch) -> tuple[BufferView, Packing, CallLaunch] | None:
    """The right operand of a matmul, its packing, and the call that takes the packed operand."""
    if not launch.direct or launch.target not in ("mm", "addmm"):
        return None
    out, *added, a, weight = launch.arguments
    sizes, rows = _integers(weight.shape, weight.strides, (weight.offset,)), a.shape[0]
    if sizes is None or not weight.dtype is a.dtype is out.dtype is DType.float32:
        return None
    slot = program.slots[out.slot]
    whole = same_shape(out.shape, slot.shape) and same_shape(out.strides, Tensor(out.shape).strides)
    whole = whole and same_shape(slot.strides, out.strides) and slot.home in (Allocation.arena, Allocation.fresh)
    over = any(c.slot == out.slot for c in added)
    (inner, columns), (outer_step, inner_step) = sizes[0], sizes[1]
    few = isinstance(rows, int) and (rows < FEWEST_ROWS or rows * inner * columns < SMALLEST)
    if not whole or over or few:
        return None
    batch = rows if isinstance(rows, int) else None
    packing = Packing("_reorder_linear_weight", (columns, inner), (inner_step, outer_step), sizes[2][0], (batch,))
    c = added[0] if added else None
    how = "nothing" if c is None else "row" if len(c.shape) == 1 else "matrix"
    seen = replace(weight, shape=(columns, inner), strides=(inner_step, outer_step), offset=0)
    overload, values = onednn_call(a, seen, c, how)  # type: ignore[arg-type]
    call = CallLaunch(
        "mkldnn::_linear_pointwise", overload, tuple(map(_tuple, values)), (out.slot,), False, launch.origin
    )
    return weight, packing, call


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _integers(*dims: Sequence[Dim]) -> list[tuple[int, ...]] | None:
    """The sizes as numbers; None if any of them is symbolic."""
    if not all(isinstance(d, int) for group in dims for d in group):
        return None
    return [tuple(int(d) for d in group) for group in dims]


def _count(arguments: Sequence[Any], slot: int) -> int:
    """How many of a call's arguments are in a slot."""
    return sum(isinstance(a, BufferView) and a.slot == slot for a in arguments)
