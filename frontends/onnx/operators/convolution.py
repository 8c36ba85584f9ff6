"""Convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.errors import Invalid
from daceml_train.frontends.onnx.operators.windows import amounts, padded
from daceml_train.frontends.onnx.rules import rule

_CONVOLUTION = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)

Ints = tuple[int, ...]


@rule("Conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    rank = spatial(x)
    if kernel_shape is not None and tuple(kernel_shape) != tuple(weight.shape[2:]):
        raise Invalid(f"kernel_shape {tuple(kernel_shape)} is not that of the weight, {tuple(weight.shape[2:])}")
    step, spread = strides or (1,) * rank, dilations or (1,) * rank
    before, after = amounts(x, weight.shape[2:], step, spread, pads, auto_pad)
    function = _CONVOLUTION[rank - 1]
    if before == after:
        return function(x, weight, bias, step, tuple(before), spread, group)
    return function(padded(x, before, after), weight, bias, step, 0, spread, group)


def spatial(x: Tensor) -> int:
    """The number of spatial dimensions. Raises `Invalid` where PyTorch has no operator for it."""
    rank = x.dim() - 2
    if not 1 <= rank <= 3:
        raise Invalid(f"an operand of rank {x.dim()} has {rank} spatial dimensions; 1, 2 and 3 are known")
    return rank


@rule("ConvTranspose")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    """Padding removes from the result: PyTorch handles whole multiples, the rest is cropped or added afterwards."""
    rank = spatial(x)
    step, spread = strides or (1,) * rank, dilations or (1,) * rank
    extra = output_padding or (0,) * rank
    before, after = list((pads or (0,) * 2 * rank)[:rank]), list((pads or (0,) * 2 * rank)[rank:])
    wanted = output_shape
    if wanted is None and auto_pad.startswith("SAME"):
        wanted = tuple(x.shape[2 + j] * step[j] for j in range(rank))
    if wanted is not None:
        for j, extent in enumerate(wanted[-rank:]):
            full = (x.shape[2 + j] - 1) * step[j] + extra[j] + (weight.shape[2 + j] - 1) * spread[j] + 1
            total = full - extent
            small, large = total // 2, total - total // 2
            before[j], after[j] = (small, large) if auto_pad == "SAME_UPPER" else (large, small)
    function = _TRANSPOSED[rank - 1]
    if before == after and min(before) >= 0 and all(extra[j] < max(step[j], spread[j]) for j in range(rank)):
        return function(x, weight, bias, step, tuple(before), extra, group, spread)
    result = padded(function(x, weight, None, step, 0, 0, group, spread), [0] * rank, extra)
    result = padded(result, [-amount for amount in before], [-amount for amount in after])
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


@rule("DeformConv", since=19)
def deform_conv(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    offset_group: int = 1,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    """Deformable convolution (Dai et al. 2017; Zhu et al. 2019): a bilinear sample per tap, then a matmul."""
    if x.dim() != 4:
        raise Invalid(f"DeformConv takes an operand of rank 4, given rank {x.dim()}")
    n, channels, height, width = x.shape
    kh, kw = weight.shape[2:]
    (sh, sw), (dh, dw) = strides or (1, 1), dilations or (1, 1)
    top, left = (pads or (0, 0, 0, 0))[:2]
    oh, ow = offset.shape[2:]
    taps = kh * kw
    row = torch.arange(oh, dtype=x.dtype)[:, None] * sh - top
    column = torch.arange(ow, dtype=x.dtype)[None, :] * sw - left
    tap_row = (torch.arange(taps) // kw * dh).to(x.dtype)[:, None, None]
    tap_column = (torch.arange(taps) % kw * dw).to(x.dtype)[:, None, None]
    shift = offset.reshape(n, offset_group, taps, 2, oh, ow)
    y = shift[:, :, :, 0] + row + tap_row
    z = shift[:, :, :, 1] + column + tap_column
    groups = F.pad(x.reshape(n * offset_group, channels // offset_group, height, width), (1, 1, 1, 1))
    y, z, height, width = y + 1, z + 1, height + 2, width + 2  # where an extent is 1, a grid has no unit
    grid = torch.stack([2 * z / max(width - 1, 1) - 1, 2 * y / max(height - 1, 1) - 1], -1).reshape(
        n * offset_group, taps * oh, ow, 2
    )
    sampled = F.grid_sample(groups, grid, align_corners=True)
    sampled = sampled.reshape(n, offset_group, channels // offset_group, taps, oh, ow)
    if mask is not None:
        sampled = sampled * mask.reshape(n, offset_group, 1, taps, oh, ow)
    columns = sampled.reshape(n, group, channels // group * taps, oh * ow)
    kernels = weight.reshape(group, weight.shape[0] // group, -1)
    result = torch.matmul(kernels, columns).reshape(n, weight.shape[0], oh, ow)
    return result if bias is None else result + bias.reshape(-1, 1, 1)


@rule("Col2Im", since=18, host="image block")
def col2im(
    x: Tensor,
    image: list[int],
    block: list[int],
    *,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    """Adds blocks to their positions in the image, for any number of dimensions."""
    rank = len(image)
    step, spread = strides or (1,) * rank, dilations or (1,) * rank
    before, after = list((pads or (0,) * 2 * rank)[:rank]), list((pads or (0,) * 2 * rank)[rank:])
    whole = [image[j] + before[j] + after[j] for j in range(rank)]
    place = torch.zeros((), dtype=torch.int64)
    for j in range(rank):
        count = (whole[j] - (block[j] - 1) * spread[j] - 1) // step[j] + 1
        at = torch.arange(block[j])[:, None] * spread[j] + torch.arange(count) * step[j]
        shape = [1] * (2 * rank)
        shape[j], shape[rank + j] = block[j], count
        place = place * whole[j] + at.reshape(shape)
    taps = place.reshape(-1)
    n, channels = x.shape[0], x.shape[1] // (taps.numel() // x.shape[2])
    flat = torch.zeros(n, channels, _product(whole), dtype=x.dtype)
    filled = flat.index_add(2, taps, x.reshape(n, channels, -1)).reshape(n, channels, *whole)
    return padded(filled, [-amount for amount in before], [-amount for amount in after])


def _product(extents: list[int]) -> int:
    result = 1
    for extent in extents:
        result *= extent
    return result


@rule("ConvInteger", since=10)
def conv_integer(
    x: Tensor,
    weight: Tensor,
    x_zero: Tensor | None = None,
    weight_zero: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    """In float64, which represents every sum of products of 8-bit numbers exactly."""
    left = x.double() - (0 if x_zero is None else x_zero.double())
    right = weight.double() - (0 if weight_zero is None else _per_output(weight_zero, weight).double())
    result = conv(left, right, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides)
    return result.to(torch.int32)


def _per_output(value: Tensor, weight: Tensor) -> Tensor:
    return value.reshape(-1, *[1] * (weight.dim() - 1)) if value.numel() > 1 else value


@rule("QLinearConv", since=10)
def qlinear_conv(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    left = x.double() - x_zero.double()
    right = weight.double() - _per_output(weight_zero, weight).double()
    added = None if bias is None else bias.double()
    total = conv(left, right, added, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides)
    scale = x_scale.double() * weight_scale.double() / y_scale.double()
    scale = scale.reshape(-1, *[1] * (x.dim() - 2)) if scale.numel() > 1 else scale
    bounds = torch.iinfo(y_zero.dtype)
    return torch.clamp(torch.round(total * scale) + y_zero.double(), bounds.min, bounds.max).to(y_zero.dtype)
