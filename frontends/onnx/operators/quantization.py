"""Quantized arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from daceml_train.errors import Unsupported
from daceml_train.frontends.onnx import elements
from daceml_train.frontends.onnx.operators.elementwise import cast
from daceml_train.frontends.onnx.rules import rule


def _spread(value: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """A scale or zero point broadcast to `x`: to all elements, along an axis, or to blocks."""
    if value.dim() == 0 or (value.numel() == 1 and not block_size):
        return value.reshape(())
    axis = axis % x.dim()
    if block_size:
        return value.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    shape = [1] * x.dim()
    shape[axis] = value.shape[0]
    return value.reshape(shape)


@rule("QuantizeLinear", since=10)
def quantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
    types: tuple[int, ...],
) -> Tensor:
    """round(x / scale) + zero, saturated; halves round to even."""
    number = types[2] if zero is not None and len(types) > 2 else output_dtype
    element = zero.dtype if zero is not None else elements.dtype(output_dtype) if output_dtype else torch.uint8
    wide = scale.dtype if not precision else elements.dtype(precision)
    ratio = x.to(wide) / _spread(scale, x, axis, block_size).to(wide)
    if element.is_floating_point:
        return cast(ratio, to=number or elements.number(element), saturate=saturate)
    shift = 0 if zero is None else _spread(zero, x, axis, block_size).to(torch.int64)
    low, high = elements.bounds(number, element)
    whole = torch.clamp(torch.round(ratio).double(), -(2.0**40), 2.0**40).to(torch.int64)  # beyond, int64 would wrap
    return torch.clamp(whole + shift, low, high).to(element)


@rule("DequantizeLinear", since=10)
def dequantize(
    x: Tensor, scale: Tensor, zero: Tensor | None = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Tensor:
    element = elements.dtype(output_dtype) if output_dtype else scale.dtype
    if x.dtype is torch.int32 or not x.is_floating_point():
        whole = x.to(torch.int64)
        shifted = whole if zero is None else whole - _spread(zero, x, axis, block_size).to(torch.int64)
        exact = torch.promote_types(scale.dtype, torch.float32)  # 16 bits do not represent every int32
    else:
        shifted, exact = x, scale.dtype
    return (shifted.to(exact) * _spread(scale, x, axis, block_size).to(exact)).to(element)


@rule("DynamicQuantizeLinear", since=11)
def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = torch.clamp(x.min(), max=0), torch.clamp(x.max(), min=0)
    scale = torch.where(high == low, 1.0, high - low) / 255
    zero = torch.round(torch.clamp(-low / scale, 0, 255))
    return torch.clamp(torch.round(x / scale) + zero, 0, 255).to(torch.uint8), scale, zero.to(torch.uint8)


@rule("MatMulInteger", since=10)
def matmul_integer(a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
    """In float64, which represents every such sum exactly and has a library matmul."""
    left, right = a.double(), b.double()
    if a_zero is not None:
        left = left - (a_zero.reshape(-1, 1) if a_zero.dim() == 1 and a_zero.numel() > 1 else a_zero).double()
    if b_zero is not None:
        right = right - b_zero.double()
    return torch.matmul(left, right).to(torch.int32)


@rule("QLinearMatMul", since=10)
def qlinear_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    if y_zero.dtype.is_floating_point:
        raise Unsupported("QLinearMatMul on float8 is not supported")

    def rows(value: Tensor) -> Tensor:
        return (value.unsqueeze(-1) if value.dim() == 1 and value.numel() > 1 else value).double()

    total = torch.matmul(a.double() - rows(a_zero), b.double() - b_zero.double())
    scaled = total * (rows(a_scale) * b_scale.double() / rows(y_scale))
    bounds = torch.iinfo(y_zero.dtype)
    return torch.clamp(torch.round(scaled) + rows(y_zero), bounds.min, bounds.max).to(y_zero.dtype)
