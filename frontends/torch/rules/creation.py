"""ATen's factory functions and random numbers: tensors made from no other tensor."""

from __future__ import annotations

import functools
from typing import Any

import sympy

from daceml_train.frontends.torch.rules.numbers import element, held
from daceml_train.frontends.torch.rules.translate import RULES, Translator, rule
from daceml_train.ops.operator import Value
from daceml_train.tensor import Dim, DType, Shape

# ---- factory functions -------------------------------------------------------------------------------------------


@rule("full.default", "new_full.default", "full_like.default")
def _full(t: Translator, like: Any, value: Any, *position: Any, **options: Any) -> Value:
    result = t.type
    if isinstance(value, Value):
        return value.cast(result.dtype).expand(result.shape)
    return t.full(held(value, result.dtype), result.shape, result.dtype)


def _filled(t: Translator, *arguments: Any, value: int, **options: Any) -> Value:
    return t.full(value, t.type.shape, t.type.dtype)


for _name in ("zeros.default", "zeros_like.default", "new_zeros.default"):
    RULES[f"aten.{_name}"] = functools.partial(_filled, value=0)
for _name in ("ones.default", "ones_like.default", "new_ones.default"):
    RULES[f"aten.{_name}"] = functools.partial(_filled, value=1)
for _name in (
    "empty.memory_format",
    "empty_like.default",
    "new_empty.default",
    "new_empty_strided.default",
    "empty_strided.default",
    "empty_permuted.default",
):
    RULES[f"aten.{_name}"] = functools.partial(_filled, value=0)


@rule("zero.default")
def _zero(t: Translator, x: Value) -> Value:
    return t.connected(t.full(0, x.shape, x.dtype), x)


@rule("scalar_tensor.default")
def _scalar_tensor(t: Translator, value: Any, **options: Any) -> Value:
    return element(t, value, t.type.dtype)


@rule("arange.start_step", "arange.default", "arange.start")
def _arange(t: Translator, *arguments: Any, **options: Any) -> Value | None:
    start, step = (0, 1) if len(arguments) == 1 else (arguments[0], arguments[2] if len(arguments) > 2 else 1)
    return _iota(t, t.type.shape[0], start=start, step=step)


@rule("prims.iota.default")
def _iota(t: Translator, length: Dim, *, start: Any = 0, step: Any = 1, **options: Any) -> Value | None:
    if isinstance(start, sympy.Expr) or isinstance(step, sympy.Expr):
        steps = t.emit("iota", shape=(length,), dim=0, dtype=t.type.dtype, start=0, step=1)
        return steps * t.value(step, t.type.dtype) + t.value(start, t.type.dtype)
    if not t.type.dtype.is_float:
        start, step = int(start), int(step)
    return t.emit("iota", shape=(length,), dim=0, dtype=t.type.dtype, start=start, step=step)


# ---- random numbers: functions of the seed input, so that a backward pass rematerializes them ---


@rule("rand.default", "rand_like.default", "new_rand.default")
def _rand(t: Translator, *arguments: Any, **options: Any) -> Value:
    return t.uniform(t.type.shape, t.type.dtype)


@rule("randn.default", "randn_like.default")
def _randn(t: Translator, *arguments: Any, **options: Any) -> Value:
    return _normal(t, t.type.shape, t.type.dtype)


def _normal(t: Translator, shape: Shape, dtype: DType) -> Value:
    """Box-Muller transform: a normal from two uniforms."""
    wide = DType.float64 if dtype is DType.float64 else DType.float32
    radius = ((1.0 - t.uniform(shape, wide)).unary("log") * -2.0).unary("sqrt")
    return (radius * (t.uniform(shape, wide) * 6.283185307179586).unary("cos")).cast(dtype)


@rule("normal_functional.default")
def _normal_functional(t: Translator, x: Value, mean: float = 0, std: float = 1, **options: Any) -> Value:
    return _normal(t, x.shape, x.dtype) * std + mean


@rule("uniform.default")
def _uniform(t: Translator, x: Value, low: float = 0, high: float = 1, **options: Any) -> Value:
    return t.uniform(x.shape, x.dtype) * (high - low) + low


@rule("bernoulli.p")
def _bernoulli(t: Translator, x: Value, p: float = 0.5, **options: Any) -> Value:
    return t.uniform(x.shape).compare("lt", p).cast(t.type.dtype)


@rule("bernoulli.Tensor", "bernoulli.default")
def _bernoulli_tensor(t: Translator, x: Value, p: Value | None = None, **options: Any) -> Value:
    chance = x if p is None else p
    drawn = t.emit("lt", t.uniform(t.type.shape), chance.cast(DType.float32))
    return t.connected(drawn.cast(t.type.dtype), chance)


@rule("exponential.default")
def _exponential(t: Translator, x: Value, rate: float = 1, **options: Any) -> Value:
    drawn = t.uniform(x.shape, DType.float64 if x.dtype is DType.float64 else DType.float32)
    return ((1.0 - drawn).unary("log") * (-1 / rate)).cast(x.dtype)


@rule("randint.low", "randint.default", "randint_like.low_dtype", "randint_like.default")
def _randint(t: Translator, *arguments: Any, **options: Any) -> Value | None:
    name = str(t.node.target)
    numbers = [a for a in arguments[1 if "like" in name else 0 :] if isinstance(a, int)]
    low, high = (numbers[0], numbers[1]) if "low" in name else (0, numbers[0])
    return (t.uniform(t.type.shape, DType.float64) * (high - low) + low).unary("floor").cast(t.type.dtype)
