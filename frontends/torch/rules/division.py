"""ATen's divisions with rounding, and their remainders; a zero among integer divisors raises, as in eager execution."""

from __future__ import annotations

from typing import Any

from daceml_train.frontends.torch.capture.requirements import required
from daceml_train.frontends.torch.rules.translate import Translator, rule
from daceml_train.ops.operator import Value
from daceml_train.tensor import DType

Number = Any


def _divisor(t: Translator, b: Number, dtype: DType) -> Value | None:
    """A divisor of `dtype`; an integer must not be zero when the program runs, nor as a number, which None says."""
    if dtype.is_float:
        return t.value(b, dtype)
    if not isinstance(b, Value):
        return None if b == 0 else t.value(b, dtype)
    divisor = b.cast(dtype)
    return required(t, divisor.compare("ne", 0), "ZeroDivisionError").where(divisor, 1)


@rule("fmod.Tensor", "fmod.Scalar")
def _fmod(t: Translator, a: Number, b: Number) -> Value | None:
    dtype = t.type.dtype
    second = _divisor(t, b, dtype)
    return None if second is None else t.emit("fmod", t.value(a, dtype), second)


@rule("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(t: Translator, a: Number, b: Number, rounding_mode: str | None = None) -> Value | None:
    dtype = t.type.dtype
    match rounding_mode:
        case None:
            return t.emit("div", t.value(a, dtype), t.value(b, dtype))
        case "floor":
            return _floor_divide(t, a, b)
        case _:
            return t.emit("div", t.value(a, dtype), t.value(b, dtype)).unary("trunc") if dtype.is_float else None


@rule("floor_divide.default", "floor_divide.Scalar")
def _floor_divide(t: Translator, a: Number, b: Number) -> Value | None:
    dtype = t.type.dtype
    second = _divisor(t, b, dtype)
    return None if second is None else t.emit("floor_divide", t.value(a, dtype), second)


@rule("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def _remainder(t: Translator, a: Number, b: Number) -> Value | None:
    dtype = t.type.dtype
    first, second = t.value(a, dtype), _divisor(t, b, dtype)
    if second is None:
        return None
    if dtype.is_float:
        return t.emit("remainder", first, second)
    return first - second * t.emit("floor_divide", first, second)
