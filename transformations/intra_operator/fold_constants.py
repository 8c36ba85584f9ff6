"""FoldConstants: operators on constants are evaluated at compile time; kernels contain the results as literals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from daceml_train.ops.elementwise import JUMPS, Elementwise, Full
from daceml_train.ops.movement import Pad
from daceml_train.ops.operator import Array, Value
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import DType, product, same_shape
from daceml_train.transformations.intra_operator.movement import same_number
from daceml_train.transformations.intra_operator.peephole import Peephole, Rules, Site

_EXACT = {DType.float32: 2**24, DType.float16: 2**11, DType.bfloat16: 2**8}
"""The element type represents all integers up to this bound exactly; 2**53 for the types not listed."""


@dataclass(frozen=True)
class FoldConstants(Peephole):
    """Evaluate operators whose operands are uniform constants; the results are again uniform constants (`full`).

        full(a), full(b) -> [f] -> y     =>     full(f(a, b)) = y

    The pass looks through views, permutations, expansions and slices of constants but does not fold them: they are
    free, and a `full` of an expanded size might have to be stored where its source is not. Floats are computed in
    float64 and rounded once, to the element type, when they are used, compared, or become another type. NaN,
    expressions over sizes and complex numbers are not folded. The bytes never grow.
    """

    def rules(self) -> Rules:
        return _RULES


def elementwise_of_full(s: Site) -> Value | None:
    """f(full(a), full(b)) => full(f(a, b))"""
    numbers = [s.constant(v) for v in s.operands]
    if any(n is None for n in numbers):
        return None
    known = [(n, v.dtype) for n, v in zip(numbers, s.operands, strict=True) if n is not None]
    if isinstance(s.op, Elementwise) and s.op.kind in JUMPS:
        known = [(_rounded(n, dtype), dtype) for n, dtype in known]
    (y,) = s.op.evaluate(*(_array(n, dtype) for n, dtype in known))
    return _full(s, y.item())


def cast_of_full(s: Site) -> Value | None:
    """cast(full(a)) => full(a), rounded to the type that it had"""
    number = s.constant(s.x)
    if number is None or isinstance(number, complex):
        return None
    (y,) = s.op.evaluate(_array(_rounded(number, s.x.dtype), s.x.dtype))
    return _full(s, y.item())


def _rounded(number: float | int | bool, dtype: DType) -> float | int | bool:
    """A number as its element type holds it."""
    if not dtype.is_float or dtype is DType.float64:
        return number
    with np.errstate(over="ignore"):
        if dtype is DType.float16:
            return float(np.float16(number))
        single = np.float32(number)
    if dtype is DType.float32 or not np.isfinite(single):
        return float(single)
    bits = int(single.view(np.uint32))  # bfloat16: the upper half, rounded to even
    bits += 0x7FFF + ((bits >> 16) & 1)
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))


def scalar_operand(s: Site) -> Value | None:
    """f(x, full(shape)) => f(x, full()), where x alone determines the shape"""
    operands = list(s.operands)
    for position, operand in enumerate(s.operands):
        number = s.constant(operand)
        arrays = [v.shape for i, v in enumerate(operands) if i != position]
        if number is None or not operand.shape or not arrays:
            continue
        # no operand exceeds the result's shape, so one operand of that shape determines it
        if any(same_shape(shape, s.result.shape) for shape in arrays):
            (operands[position],) = s.sweep.emit(Full(number, (), operand.dtype))
    if all(a is b for a, b in zip(operands, s.operands, strict=True)):
        return None
    return operands[0].apply(s.op, *operands[1:])


def pad_of_full(s: Site) -> Value | None:
    """pad(full(a)), with a => full(a)"""
    assert isinstance(s.op, Pad)
    number = s.constant(s.x)
    return _full(s, number) if number is not None and same_number(number, s.op.value) else None


def concat_of_full(s: Site) -> Value | None:
    """concat(full(a), full(a)) => full(a)"""
    numbers = [s.constant(v) for v in s.operands]
    first = numbers[0]
    if first is None or any(n is None or not same_number(n, first) for n in numbers):
        return None
    return _full(s, first)


def reduce_of_full(s: Site) -> Value | None:
    """sum(full(a)) => full(n * a), where that is exact;  max(full(a)) => full(a)"""
    assert isinstance(s.op, Reduce)
    number = s.constant(s.x)
    count = product(s.x.shape[d] for d in s.op.dims)
    if number is None or s.x.dtype is DType.bool:
        return None
    if s.op.kind in ("max", "min"):
        return _full(s, number)
    if s.op.kind == "sum" and isinstance(count, int) and float(number).is_integer():
        total = number * count
        return _full(s, total) if abs(total) <= _EXACT.get(s.x.dtype, 2**53) else None
    return None


def _array(number: float | int | bool, dtype: DType) -> Array:
    return np.asarray(number, "float64" if dtype.is_float else dtype.numpy)


def _full(s: Site, number: float | int | bool) -> Value | None:
    if isinstance(number, float) and math.isnan(number):
        return None
    (y,) = s.sweep.emit(Full(number, s.result.shape, s.result.dtype))
    return y


_REDUCE = (reduce_of_full,)

_RULES: Rules = {
    **dict.fromkeys(("reduce.sum", "reduce.max", "reduce.min"), _REDUCE),
    "pad": (pad_of_full,),
    "concat": (concat_of_full,),
    "cast": (cast_of_full,),
    "elementwise": (elementwise_of_full, scalar_operand),
}
