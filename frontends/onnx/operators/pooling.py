"""Pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.frontends.onnx.host import Host, integers
from daceml_train.frontends.onnx.operators.convolution import spatial
from daceml_train.frontends.onnx.operators.windows import amounts, beyond, padded
from daceml_train.frontends.onnx.rules import rule

Ints = tuple[int, ...]
_MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_CONVOLUTION = (F.conv1d, F.conv2d, F.conv3d)


def _geometry(
    x: Tensor,
    kernel: Ints,
    strides: Ints | None,
    dilations: Ints | None,
    pads: Ints | None,
    auto_pad: str,
    ceil_mode: int,
) -> tuple[Ints, Ints, list[int], list[int], list[int]]:
    rank = spatial(x)
    step, spread = strides or (1,) * rank, dilations or (1,) * rank
    before, after = amounts(x, kernel, step, spread, pads, auto_pad)
    extra = beyond(x, kernel, step, spread, before, after) if ceil_mode else [0] * rank
    return step, spread, before, after, extra


def _sum(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(first, second, strict=True)]


@rule("MaxPool")
def max_pool(
    x: Tensor,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    storage_order: int = 0,
    strides: Ints | None = None,
    outputs: int,
) -> Tensor | tuple[Tensor, Tensor]:
    rank = spatial(x)
    step, spread, before, after, extra = _geometry(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    function = _MAX[rank - 1]
    simple = before == after and not any(extra) and all(2 * p <= k for p, k in zip(before, kernel_shape, strict=True))
    if outputs == 1 and simple and x.is_floating_point():
        return function(x, kernel_shape, step, tuple(before), spread)
    values = x if x.is_floating_point() else x.to(torch.float32)
    whole = padded(values, before, _sum(after, extra), -math.inf)
    if outputs == 1:
        return function(whole, kernel_shape, step, 0, spread).to(x.dtype)
    result, flat = function(whole, kernel_shape, step, 0, spread, return_indices=True)
    return result.to(x.dtype), _unpadded_index(flat, x, whole, before, storage_order)


def _unpadded_index(flat: Tensor, x: Tensor, whole: Tensor, before: Sequence[int], storage_order: int) -> Tensor:
    """ONNX counts over the whole tensor without padding; column-major counts spatial dimensions from the first."""
    places: list[Tensor] = []
    rest = flat
    for j in reversed(range(len(before))):
        places.insert(0, rest % whole.shape[2 + j] - before[j])
        rest = rest // whole.shape[2 + j]
    extents = list(x.shape[2:])
    if storage_order:
        places, extents = places[::-1], extents[::-1]
    index = torch.zeros_like(flat)
    for place, extent in zip(places, extents, strict=True):
        index = index * extent + place
    n, channels = x.shape[:2]
    plane = torch.arange(n * channels).reshape(n, channels, *[1] * len(before))
    return index + plane * math.prod(x.shape[2:])


@rule("MaxUnpool", since=9, host="extents")
def max_unpool(
    x: Tensor,
    indices: Tensor,
    extents: Host = None,
    *,
    kernel_shape: Ints,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    rank = spatial(x)
    step = strides or (1,) * rank
    gone = pads or (0,) * 2 * rank
    own = [(x.shape[2 + j] - 1) * step[j] + kernel_shape[j] - gone[j] - gone[rank + j] for j in range(rank)]
    target = list(x.shape[:2]) + own if extents is None else integers(extents)
    # Indices count over the result without `extents`; each is decomposed and counted over the requested one.
    place, rest, stride = torch.zeros_like(indices), indices, 1
    for extent, wanted in zip(reversed([*x.shape[:2], *own]), reversed(target), strict=True):
        place = place + rest % extent * stride
        rest = rest // extent
        stride *= wanted
    result = torch.zeros(math.prod(target), dtype=x.dtype)
    return result.scatter(0, place.reshape(-1), x.reshape(-1)).reshape(target)


@rule("AveragePool")
def average_pool(
    x: Tensor,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    rank = spatial(x)
    step, spread, before, after, extra = _geometry(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    simple = before == after and not any(extra) and all(2 * p <= k for p, k in zip(before, kernel_shape, strict=True))
    if simple and set(spread) == {1}:
        return _AVERAGE[rank - 1](x, kernel_shape, step, tuple(before), False, bool(count_include_pad))
    counted = torch.ones(1, 1, *x.shape[2:], dtype=x.dtype)
    counted = padded(counted, before, after, 1.0 if count_include_pad else 0.0)
    counted = padded(counted, [0] * rank, extra)
    total = _window_sum(padded(x, before, _sum(after, extra)), kernel_shape, step, spread)
    return total / _window_sum(counted, kernel_shape, step, spread)


def _window_sum(x: Tensor, kernel: Ints, step: Ints, spread: Ints) -> Tensor:
    n, channels = x.shape[:2]
    planes = x.reshape(n * channels, 1, *x.shape[2:])
    total = _CONVOLUTION[len(kernel) - 1](planes, torch.ones(1, 1, *kernel, dtype=x.dtype), None, step, 0, spread)
    return total.reshape(n, channels, *total.shape[2:])


@rule("LpPool", since=2)
def lp_pool(
    x: Tensor,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    p: int = 2,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    step, spread, before, after, extra = _geometry(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    powers = padded(x.abs() ** p, before, _sum(after, extra))
    return _window_sum(powers, kernel_shape, step, spread) ** (1.0 / p)


@rule("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


@rule("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    return x.amax(tuple(range(2, x.dim())), keepdim=True)


@rule("GlobalLpPool", since=2)
def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    return (x.abs() ** p).sum(tuple(range(2, x.dim())), keepdim=True) ** (1.0 / p)
