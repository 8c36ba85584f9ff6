"""Resize in all its modes: along each axis a matmul with a small matrix of interpolation weights.

Coordinates and weights follow ONNX's operator text and reference (`onnx.reference.ops.op_resize`); the common cases
run in PyTorch's own operator, which returns the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.errors import Invalid, Unsupported
from daceml_train.frontends.onnx.host import Host, integers
from daceml_train.frontends.onnx.rules import rule


@rule("Resize", since=11, host="roi scales sizes")
def resize(
    x: Tensor,
    roi: Host = None,
    scales: Host = None,
    sizes: Host = None,
    *,
    antialias: int = 0,
    axes: tuple[int, ...] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    chosen = [axis % x.dim() for axis in axes] if axes is not None else list(range(x.dim()))
    extents, factors = _target(x, chosen, scales, sizes, keep_aspect_ratio_policy)
    windows = integers(roi) if roi else []
    result = x if x.is_floating_point() or mode == "nearest" else x.to(torch.float64)
    beyond: list[tuple[int, Tensor]] = []
    for at, axis in enumerate(chosen):
        n, o, factor = x.shape[axis], extents[at], factors[at]
        if isinstance(n, int) and isinstance(o, int) and n == o and factor == 1 and not windows:
            continue
        window = (windows[at], windows[len(chosen) + at]) if windows else (0.0, 1.0)
        place = _coordinates(n, o, factor, coordinate_transformation_mode, window)
        if coordinate_transformation_mode == "tf_crop_and_resize":
            beyond.append((axis, (place < 0) | (place > n - 1)))
        if mode == "nearest":
            result = result.index_select(axis, _nearest(place, nearest_mode, n))
        else:
            matrix = _weights(place, n, factor, mode, bool(antialias), bool(exclude_outside), cubic_coeff_a)
            result = torch.tensordot(result, matrix.to(result.dtype), ([axis], [1])).movedim(-1, axis)
    for axis, outside in beyond:
        shape = [1] * x.dim()
        shape[axis] = -1
        result = torch.where(outside.reshape(shape), extrapolation_value, result)
    if result.dtype is x.dtype:
        return result
    bounds = torch.iinfo(x.dtype)
    return torch.clamp(torch.round(result), bounds.min, bounds.max).to(x.dtype)


def _target(x: Tensor, axes: Sequence[int], scales: Host, sizes: Host, policy: str) -> tuple[list[Any], list[Any]]:
    """The extents of the result along `axes`, and the factors for coordinates."""
    if sizes:
        wanted = integers(sizes)
        factors: list[Any] = [extent / x.shape[axis] for extent, axis in zip(wanted, axes, strict=True)]
        if policy == "stretch":
            return wanted, factors
        common = min(factors) if policy == "not_larger" else max(factors)
        return [math.floor(common * x.shape[axis] + 0.5) for axis in axes], [common] * len(axes)
    if not scales:
        raise Invalid("neither scales nor sizes is given")
    factors = integers(scales)
    return [int(x.shape[axis] * factor) for axis, factor in zip(axes, factors, strict=True)], factors


def _coordinates(n: int, o: int, factor: float, mode: str, window: tuple[float, float]) -> Tensor:
    """The position of each of `o` results among `n` elements."""
    i = torch.arange(o, dtype=torch.float64)
    if mode == "half_pixel":
        return (i + 0.5) / factor - 0.5
    if mode == "half_pixel_symmetric":
        return n / 2 * (1 - o / (factor * n)) + (i + 0.5) / factor - 0.5
    if mode == "pytorch_half_pixel":
        return (i + 0.5) / factor - 0.5 if o > 1 else i
    if mode == "align_corners":
        return i * ((n - 1) / (factor * n - 1)) if o > 1 else i
    if mode == "asymmetric":
        return i / factor
    if mode == "tf_half_pixel_for_nn":
        return (i + 0.5) / factor
    if mode == "tf_crop_and_resize":
        start, end = window
        return start * (n - 1) + i * ((end - start) * (n - 1) / (o - 1)) if o > 1 else i + 0.5 * (start + end) * (n - 1)
    raise Unsupported(f"Resize has no coordinate transformation {mode!r}")


def _nearest(place: Tensor, mode: str, n: Any) -> Tensor:
    if mode == "round_prefer_floor":
        at = torch.ceil(place - 0.5)
    elif mode == "round_prefer_ceil":
        at = torch.floor(place + 0.5)
    elif mode in ("floor", "ceil"):
        at = torch.floor(place) if mode == "floor" else torch.ceil(place)
    else:
        raise Unsupported(f"Resize has no nearest mode {mode!r}")
    return at.to(torch.int64).clamp(0, n - 1)


def _weights(place: Tensor, n: Any, factor: Any, mode: str, antialias: bool, exclude: bool, a: float) -> Tensor:
    """[results, n]: the weight of each element. Elements beyond the edge count as the edge, or not at all."""
    narrow = min(factor, 1.0) if antialias else 1.0
    reach = {"linear": 1, "cubic": 2}.get(mode)
    if reach is None:
        raise Unsupported(f"Resize has no mode {mode!r}")
    width = math.ceil(reach / narrow) + 1
    taps = torch.arange(-width, width + 1, dtype=torch.float64)
    at = torch.floor(place)[:, None] + taps
    distance = ((at - place[:, None]) * narrow).abs()
    weight = (1 - distance).clamp(min=0) if mode == "linear" else _cubic(distance, a)
    outside = (at < 0) | (at > n - 1)
    if exclude:
        weight = torch.where(outside, 0.0, weight)
    if exclude or antialias:
        weight = weight / weight.sum(1, keepdim=True)
    index = at.clamp(0, n - 1).to(torch.int64)
    return torch.zeros(place.shape[0], n, dtype=torch.float64).scatter_add(1, index, weight)


def _cubic(t: Tensor, a: float) -> Tensor:
    """Keys' kernel (1981)."""
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((t - 5) * t + 8) * t * a - 4 * a
    return torch.where(t <= 1, near, torch.where(t < 2, far, torch.zeros_like(t)))


@rule("Resize", since=10, host="scales")
def resize_by_scales(x: Tensor, scales: Host, *, mode: str = "nearest") -> Tensor:
    return resize(x, None, scales, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")


@rule("Upsample", since=9, host="scales")
def upsample(x: Tensor, scales: Host, *, mode: str = "nearest") -> Tensor:
    return resize_by_scales(x, scales, mode=mode)


@rule("Upsample")
def upsample_by_attribute(x: Tensor, *, scales: tuple[float, ...], mode: str = "nearest") -> Tensor:
    return resize_by_scales(x, list(scales), mode=mode)


@rule("GridSample", since=16)
def grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    names = {"linear": "bilinear", "cubic": "bicubic"}
    if x.dim() == 5 and mode in ("cubic", "bicubic"):
        raise Unsupported("cubic GridSample over three dimensions is not supported")
    return F.grid_sample(x, grid, names.get(mode, mode), padding_mode, bool(align_corners))
