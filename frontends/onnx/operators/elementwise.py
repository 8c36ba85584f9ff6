"""Elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.frontends.onnx import elements
from daceml_train.frontends.onnx.operators.unsigned import SIGN, WIDER, magnitude, narrow, quotient, remainder, wide
from daceml_train.frontends.onnx.rules import rule


def _sign(x: Tensor) -> Tensor:
    """The sign; of NaN it is NaN."""
    return (wide(x) != 0).to(x.dtype) if x.dtype in WIDER else torch.where(x != x, x, torch.sign(x))


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": magnitude,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": lambda x: torch.bitwise_not(wide(x)).to(x.dtype),
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Det": torch.det,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": _sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}


_ORDERED = (torch.gt, torch.ge, torch.lt, torch.le)


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def elementwise(x: Tensor) -> Tensor:
        return function(x)

    return elementwise


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def elementwise(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype in WIDER:
            ordered = function in _ORDERED
            result = function(wide(a, ordered), wide(b, ordered))
            return result if result.dtype is torch.bool else result.to(a.dtype)
        return function(a, b)

    return elementwise


for _name, _function in _UNARY.items():
    rule(_name)(_unary(_function))
for _name, _operation in _BINARY.items():
    rule(_name, since=7)(_binary(_operation))


def _aligned(a: Tensor, b: Tensor, axis: int | None, broadcast: int) -> Tensor:
    """`b` as operators before version 7 broadcast it: its dimensions start at `axis` of `a`."""
    if not broadcast or axis is None:
        return b
    axis = axis % a.dim()
    return b.reshape(*b.shape, *[1] * (a.dim() - axis - b.dim()))


def _limited(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def elementwise(
        a: Tensor, b: Tensor, *, axis: int | None = None, broadcast: int = 0, consumed_inputs: Any = None
    ) -> Tensor:
        return function(a, _aligned(a, b, axis, broadcast))

    return elementwise


for _name in ("Add", "Sub", "Mul", "And", "Or", "Xor", "Equal", "Greater", "Less"):
    rule(_name)(_limited(_BINARY[_name]))


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b) if a.is_floating_point() or a.is_complex() else quotient(a, b)


rule("Div", since=7)(_divide)
rule("Div")(_limited(_divide))


@rule("Pow", since=7)
def power(a: Tensor, b: Tensor) -> Tensor:
    """The result has the base's type."""
    if not a.is_floating_point() and b.is_floating_point():
        return torch.pow(a.double(), b.double()).to(a.dtype)
    return torch.pow(wide(a), wide(b)).to(a.dtype)


rule("Pow")(_limited(torch.pow))


@rule("Mod", since=10)
def modulo(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    if a.dtype in WIDER:
        return remainder(a, b)
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@rule("BitShift", since=11)
def bit_shift(a: Tensor, b: Tensor, *, direction: str) -> Tensor:
    """In int64: shifts of 64-bit unsigned numbers to the right fill with zeros, so the sign is masked away."""
    left, amount = a.to(torch.int64), b.to(torch.int64)
    if direction == "LEFT":
        return torch.where(amount < 64, left << amount.clamp(max=63), 0).to(a.dtype)
    shifted = left >> amount.clamp(max=63)
    if a.dtype.is_signed:  # beyond the width, only the sign is left
        return shifted.to(a.dtype)
    if a.dtype is torch.uint64:
        mask = torch.where(amount == 0, -1, (1 << (64 - amount).clamp(max=62)) - 1)
        shifted = shifted & torch.where(amount == 1, torch.iinfo(torch.int64).max, mask)
    return torch.where(amount < 64, shifted, 0).to(a.dtype)


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def elementwise(*xs: Tensor) -> Tensor:
        ordered = function is not torch.add
        result = wide(xs[0], ordered)
        for x in xs[1:]:
            result = function(result, wide(x, ordered))
        return narrow(result, xs[0].dtype, ordered)

    return elementwise


rule("Max")(_folded(torch.maximum))
rule("Min")(_folded(torch.minimum))
rule("Sum")(_folded(torch.add))


@rule("Mean")
def mean(*xs: Tensor) -> Tensor:
    return _folded(torch.add)(*xs) / len(xs)


@rule("Where", since=9)
def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, x, y)


@rule("Clip", since=11)
def clip(x: Tensor, lower: Tensor | None = None, upper: Tensor | None = None) -> Tensor:
    """The upper bound wins where the bounds cross, as ONNX specifies."""
    result = wide(x, True)
    if lower is not None:
        result = torch.maximum(result, wide(lower, True))
    if upper is not None:
        result = torch.minimum(result, wide(upper, True))
    return narrow(result, x.dtype, ordered=True)


@rule("Clip")
def clip_between(x: Tensor, *, min: float = -math.inf, max: float = math.inf, consumed_inputs: Any = None) -> Tensor:
    return torch.clamp(x, min, max)


@rule("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


@rule("Celu", since=12)
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.celu(x, alpha)


@rule("Selu")
def selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(torch.clamp(x, max=0)))


@rule("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@rule("PRelu", since=7)
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


@rule("PRelu")
def prelu_of_channels(x: Tensor, slope: Tensor) -> Tensor:
    """Before version 7 a one-dimensional slope belongs to the channels."""
    return torch.where(x < 0, x * (slope.reshape(-1, *[1] * (x.dim() - 2)) if slope.numel() > 1 else slope), x)


@rule("ThresholdedRelu", since=10)
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, torch.zeros_like(x))


@rule("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return torch.clamp(alpha * x + beta, 0, 1)


@rule("Softplus")
def softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=40.0)  # beyond it the exact result is x; without one the exponential overflows


@rule("Gelu", since=20)
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@rule("Swish", since=24)
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@rule("Shrink", since=9)
def shrink(x: Tensor, *, lambd: float = 0.5, bias: float = 0.0) -> Tensor:
    kept = torch.where(x > lambd, x - bias, torch.zeros_like(x))
    return torch.where(x < -lambd, x + bias, kept).to(x.dtype)


@rule("IsInf", since=10)
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    if x.dtype.itemsize == 1:
        x = x.float()
    none = torch.zeros_like(x, dtype=torch.bool)
    return (torch.isposinf(x) if detect_positive else none) | (torch.isneginf(x) if detect_negative else none)


def _first(x: Tensor, axis: int) -> tuple[Tensor, tuple[int, ...]]:
    """`x` as the matrix that operators before version 13 made of it, and its shape."""
    axis = axis % x.dim() if x.dim() else 0
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), tuple(x.shape)


@rule("Softmax", since=13)
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


@rule("Softmax")
def softmax_of_rows(x: Tensor, *, axis: int = 1) -> Tensor:
    rows, shape = _first(x, axis)
    return torch.softmax(rows, 1).reshape(shape)


@rule("LogSoftmax", since=13)
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, axis)


@rule("LogSoftmax")
def log_softmax_of_rows(x: Tensor, *, axis: int = 1) -> Tensor:
    rows, shape = _first(x, axis)
    return torch.log_softmax(rows, 1).reshape(shape)


@rule("Hardmax", since=13)
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.zeros_like(x).scatter(axis, torch.argmax(x, axis, keepdim=True), 1)


@rule("Hardmax")
def hardmax_of_rows(x: Tensor, *, axis: int = 1) -> Tensor:
    rows, shape = _first(x, axis)
    return hardmax(rows, axis=1).reshape(shape)


@rule("Identity")
def identity(x: Any) -> Any:
    return x


def _cast(x: Tensor, number: int, saturate: int, round_mode: str = "up") -> Tensor:
    """As ONNX converts: into float8 with saturation if asked for, into narrow integers modulo their width."""
    element = elements.dtype(number, "the result of a cast")
    if number in elements.BITS:
        bits = elements.BITS[number]
        low = x.to(torch.int64) & (2**bits - 1)
        return (torch.where(low >= 2 ** (bits - 1), low - 2**bits, low) if element is torch.int8 else low).to(element)
    if number == _FLOAT4:
        return _float4(x.float()).to(element)
    if element is torch.float8_e8m0fnu:
        return _power_of_two(x, saturate, round_mode)
    if element in _FLOAT8 and saturate:
        # The greatest finite number where PyTorch's cast gives NaN or infinity.
        greatest = torch.finfo(element).max
        wide = x.float()
        x = torch.where(wide.isnan(), wide, wide.clamp(-greatest, greatest))
    elif element is torch.float8_e4m3fn:  # it has no infinity: what rounds beyond 448 is NaN
        x = torch.where(x.abs() > 464, torch.nan, x)
    if x.is_floating_point() and element in WIDER:
        if element is torch.uint64:
            high = x >= 2.0**63
            return (torch.where(high, x - 2.0**63, x).to(torch.int64) ^ torch.where(high, SIGN, 0)).to(element)
        return x.to(torch.int64).to(element)
    return x.to(element)


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_FLOAT4 = 23


def _power_of_two(x: Tensor, saturate: int, round_mode: str) -> Tensor:
    """The exponent of a float32 alone, rounded as asked; beyond the greatest it saturates or is NaN."""
    bits = x.float().view(torch.int32)
    exponent, rest = (bits >> 23) & 255, bits & 0x7FFFFF
    if round_mode != "down":
        exponent = exponent + (rest >= (0x400000 if round_mode == "nearest" else 1)).int()
    exponent = exponent.clamp(max=254 if saturate else 255)
    return torch.where(x.isnan(), 255, exponent).to(torch.uint8).view(torch.float8_e8m0fnu)


def _float4(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign of x, halves to even; NaN is -0, as in `ml_dtypes`."""
    x = torch.where(x.isnan(), -0.0, x)
    size = x.abs().clamp(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, x)


@rule("Cast")
def cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return _cast(x, to, saturate, round_mode)


@rule("CastLike", since=15)
def cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up", types: tuple[int, ...]) -> Tensor:
    return _cast(x, types[1] or elements.number(like.dtype), saturate, round_mode)


@rule("BitCast", since=26)
def bit_cast(x: Tensor, *, to: int) -> Tensor:
    """The same bits as another type of the same width."""
    return x.contiguous().view(elements.dtype(to, "the result of BitCast"))
