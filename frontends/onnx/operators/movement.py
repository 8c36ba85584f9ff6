"""Operators that move, repeat or create elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.errors import Invalid, Unsupported
from daceml_train.frontends.onnx import elements
from daceml_train.frontends.onnx.host import Host, integer, integers
from daceml_train.frontends.onnx.rules import rule

_ADDRESSABLE = 1 << 48
"""Elements; processors address 2^48 bytes or 2^57."""


@rule("Concat", since=4)
def concat(*xs: Tensor, axis: int) -> Tensor:
    return torch.cat(xs, axis)


@rule("Concat")
def concat_of_channels(*xs: Tensor, axis: int = 1) -> Tensor:
    return torch.cat(xs, axis)


@rule("Transpose")
def transpose(x: Tensor, *, perm: tuple[int, ...] | None = None) -> Tensor:
    return x.permute(perm if perm is not None else tuple(reversed(range(x.dim()))))


@rule("Reshape", since=5, host="extents")
def reshape(x: Tensor, extents: Host, *, allowzero: int = 0) -> Tensor:
    wanted = integers(extents)
    if not allowzero:
        wanted = [x.shape[i] if isinstance(extent, int) and extent == 0 else extent for i, extent in enumerate(wanted)]
    return x.reshape(wanted)


@rule("Reshape")
def reshape_by_attribute(x: Tensor, *, shape: tuple[int, ...], consumed_inputs: Any = None) -> Tensor:
    return reshape(x, list(shape))


@rule("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@rule("Squeeze", since=13, host="axes")
def squeeze(x: Tensor, axes: Host = None) -> Tensor:
    return torch.squeeze(x) if axes is None else torch.squeeze(x, tuple(integers(axes)))


@rule("Squeeze")
def squeeze_by_attribute(x: Tensor, *, axes: tuple[int, ...] | None = None) -> Tensor:
    return squeeze(x, axes)


@rule("Unsqueeze", since=13, host="axes")
def unsqueeze(x: Tensor, axes: Host) -> Tensor:
    chosen = integers(axes)
    rank = x.dim() + len(chosen)
    for axis in sorted(axis % rank for axis in chosen):
        x = x.unsqueeze(axis)
    return x


@rule("Unsqueeze")
def unsqueeze_by_attribute(x: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    return unsqueeze(x, axes)


@rule("Expand", since=8, host="extents")
def expand(x: Tensor, extents: Host) -> Tensor:
    return x.expand(_addressable(torch.broadcast_shapes(x.shape, tuple(integers(extents)))))


@rule("Tile", since=6, host="repeats")
def tile(x: Tensor, repeats: Host) -> Tensor:
    times = integers(repeats)
    if len(times) != x.dim():
        raise Invalid(f"there are {len(times)} repeats for the {x.dim()} dimensions of the operand")
    _addressable([size * count for size, count in zip(x.shape, times, strict=True)])
    return x.repeat(times)


def _addressable(shape: Sequence[Any]) -> Sequence[Any]:
    """The shape, unless no memory could store such an array: PyTorch's own count of elements overflows silently."""
    count = math.prod([size for size in shape if isinstance(size, int)])  # TorchDynamo traces no generator in it
    if count > _ADDRESSABLE:
        raise Invalid(
            f"the node produces an array of shape {tuple(shape)}: {count} elements, more than can be addressed"
        )
    return shape


@rule("Slice", since=10, host="starts ends axes steps")
def cut(x: Tensor, starts: Host, ends: Host, axes: Host = None, steps: Host = None) -> Tensor:
    begins, stops = integers(starts), integers(ends)
    chosen = integers(axes) if axes is not None else list(range(len(begins)))
    strides = integers(steps) if steps is not None else [1] * len(begins)
    for begin, stop, axis, stride in zip(begins, stops, chosen, strides, strict=True):
        axis = axis % x.dim()
        if stride > 0:
            x = x[(slice(None),) * axis + (slice(begin, stop, stride),)]
        else:
            x = _backwards(x, begin, stop, axis, -stride)
    return x


def _backwards(x: Tensor, begin: int, stop: int, axis: int, stride: int) -> Tensor:
    """The elements from `begin` down to before `stop`: a forward slice of the flipped axis."""
    extent = x.shape[axis]
    first = min(begin + extent if begin < 0 else begin, extent - 1)
    last = max(stop + extent if stop < 0 else stop, -1)
    flipped = x.flip(axis)
    return flipped[(slice(None),) * axis + (slice(extent - 1 - first, max(extent - 1 - last, 0), stride),)]


@rule("Slice")
def cut_by_attribute(
    x: Tensor, *, starts: tuple[int, ...], ends: tuple[int, ...], axes: tuple[int, ...] | None = None
) -> Tensor:
    return cut(x, list(starts), list(ends), None if axes is None else list(axes))


@rule("Split", since=13, host="parts")
def split(
    x: Tensor, parts: Host = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int
) -> tuple[Tensor, ...]:
    if parts is not None:
        return torch.split(x, integers(parts), axis)
    extent, count = x.shape[axis], num_outputs or outputs
    part = -(-extent // count)
    last = extent - part * (count - 1)
    parts = [part] * (count - 1) + [last] if last >= 0 else [max(0, min(part, extent - i * part)) for i in range(count)]
    return torch.split(x, parts, axis)


@rule("Split")
def split_by_attribute(
    x: Tensor, also: Host = None, *, axis: int = 0, split: tuple[int, ...] | None = None, outputs: int
) -> tuple[Tensor, ...]:
    return _split(x, None if split is None else list(split), axis, outputs)


def _split(x: Tensor, parts: list[int] | None, axis: int, outputs: int) -> tuple[Tensor, ...]:
    return split(x, parts, axis=axis, outputs=outputs)


_MODES = {"edge": "replicate", "reflect": "reflect", "wrap": "circular"}


@rule("Pad", since=11, host="pads axes")
def pad(x: Tensor, pads: Host, value: Tensor | None = None, axes: Host = None, *, mode: str = "constant") -> Tensor:
    amounts = integers(pads)
    chosen = list(range(x.dim())) if axes is None else [axis % x.dim() for axis in integers(axes)]
    before = dict(zip(chosen, amounts[: len(chosen)], strict=True))
    after = dict(zip(chosen, amounts[len(chosen) :], strict=True))
    if mode == "constant":
        ordered = itertools.chain.from_iterable((before.get(d, 0), after.get(d, 0)) for d in reversed(range(x.dim())))
        return _pad_constant(x, list(ordered), value)
    if mode not in _MODES:
        raise Unsupported(f"Pad has no mode {mode!r}")
    for axis in chosen:
        x = _pad_indexed(x, axis, before[axis], after[axis], mode)
    return x


def _pad_constant(x: Tensor, amounts: list[int], value: Tensor | None) -> Tensor:
    if value is None:
        return F.pad(x, amounts)
    if value.numel() == 1 and value.dtype in (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32):
        return F.pad(x, amounts, value=value.reshape(()).item())
    inside = F.pad(torch.ones_like(x, dtype=torch.bool), amounts, value=False)
    return torch.where(inside, F.pad(x, amounts), value.reshape(()).to(x.dtype))


def _pad_indexed(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    """Negative amounts crop first; then every index outside is mapped to one inside."""
    extent = x.shape[axis]
    x = x.narrow(axis, max(-before, 0), extent - max(-before, 0) - max(-after, 0))
    extent = x.shape[axis]
    at = torch.arange(-max(before, 0), extent + max(after, 0))
    if mode == "edge":
        at = at.clamp(0, extent - 1)
    elif mode == "wrap":
        at = at % extent
    elif extent == 1:
        at = torch.zeros_like(at)
    else:
        at = at.abs() % (2 * (extent - 1))
        at = torch.where(at >= extent, 2 * (extent - 1) - at, at)
    return x.index_select(axis, at)


@rule("Pad", since=2)
def pad_by_attribute(x: Tensor, *, pads: tuple[int, ...], mode: str = "constant", value: float = 0.0) -> Tensor:
    return pad(x, list(pads), torch.tensor(value, dtype=x.dtype), mode=mode)


@rule("Pad")
def pad_first(x: Tensor, *, paddings: tuple[int, ...], mode: str = "constant", value: float = 0.0) -> Tensor:
    return pad(x, list(paddings), torch.tensor(value, dtype=x.dtype), mode=mode)


@rule("ConstantOfShape", since=9, host="extents")
def constant_of_shape(extents: Host, *, value: Tensor | None = None) -> Tensor:
    if value is None:
        return torch.zeros(integers(extents))
    return value.reshape(()).expand(integers(extents))


@rule("Range", since=11, host="start limit delta")
def interval(start: Host, limit: Host, delta: Host, *, stash_type: int = 1, element: torch.dtype) -> Tensor:
    return torch.arange(integer(start), integer(limit), integer(delta), dtype=element)


@rule("EyeLike", since=9)
def eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    element = x.dtype if dtype is None else elements.dtype(dtype, "the result of EyeLike")
    rows, columns = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])
    return (columns - rows == k).to(element)


@rule("Trilu", since=14, host="k")
def triangle(x: Tensor, k: Host = None, *, upper: int = 1) -> Tensor:
    diagonal = 0 if k is None else integer(k)
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@rule("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    b = blocksize
    n, c, h, w = x.shape
    if mode == "CRD":
        return x.reshape(n, c // b // b, b, b, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // b // b, h * b, w * b)
    return x.reshape(n, b, b, c // b // b, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // b // b, h * b, w * b)


@rule("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    b = blocksize
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // b, b, w // b, b)
    if mode == "CRD":
        return parts.permute(0, 1, 3, 5, 2, 4).reshape(n, c * b * b, h // b, w // b)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


@rule("ReverseSequence", since=10)
def reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    time = torch.arange(x.shape[time_axis])
    length = lengths[:, None]
    at = torch.where(time < length, length - 1 - time, time)  # [batch, time]
    at = at if batch_axis < time_axis else at.t()
    shape = [1] * x.dim()
    shape[batch_axis], shape[time_axis] = x.shape[batch_axis], x.shape[time_axis]
    return torch.gather(x, time_axis, at.reshape(shape).expand(x.shape))
