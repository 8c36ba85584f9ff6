"""Rules on arithmetic: identities that hold to the last bit, signs of zero, infinities and NaN included.

Hence `x + 0` stays where x may be -0.0, `x - x` where it may be infinite, and constants are not reassociated.
"""

from __future__ import annotations

import math

from daceml_train.ops.elementwise import Cast
from daceml_train.ops.movement import Expand, View
from daceml_train.ops.operator import Value
from daceml_train.tensor import DType, broadcast, same, same_shape
from daceml_train.transformations.intra_operator.peephole import Rule, Rules, Site

_EXACT_IN: dict[DType, frozenset[DType]] = {
    DType.bool: frozenset(DType),
    DType.uint8: frozenset(DType) - {DType.bool, DType.int8},
    DType.int8: frozenset(DType) - {DType.bool, DType.uint8},
    DType.int16: frozenset({DType.int32, DType.int64, DType.float32, DType.float64, DType.complex64, DType.complex128}),
    DType.int32: frozenset({DType.int64, DType.float64, DType.complex128}),
    DType.bfloat16: frozenset({DType.float32, DType.float64, DType.complex64, DType.complex128}),
    DType.float16: frozenset({DType.float32, DType.float64, DType.complex64, DType.complex128}),
    DType.float32: frozenset({DType.float64, DType.complex64, DType.complex128}),
    DType.float64: frozenset({DType.complex128}),
    DType.complex64: frozenset({DType.complex128}),
}
"""Element type -> other types that hold each of its values exactly."""


def like_result(s: Site, x: Value) -> Value:
    """`x` in the shape of the result, to which it broadcasts."""
    return x if same_shape(x.shape, s.result.shape) else x.expand(s.result.shape)


# ---- neutral elements -----------------------------------------------------------------------------------------------
def times_one(s: Site) -> Value | None:
    """X * 1 => x"""
    a, b = s.operands
    if s.constant(b) == 1:
        return like_result(s, a)
    return like_result(s, b) if s.constant(a) == 1 else None


def over_one(s: Site) -> Value | None:
    """X / 1 => x"""
    return like_result(s, s.x) if s.constant(s.operands[1]) == 1 else None


def plus_zero(s: Site) -> Value | None:
    """X + 0 => x, for integers, and for floats if the zero is -0.0"""
    for x, other in (s.operands, s.operands[::-1]):
        zero = s.constant(other)
        if zero == 0 and (not s.result.dtype.is_float or math.copysign(1, zero) < 0):
            return like_result(s, x)
    return None


def minus_zero(s: Site) -> Value | None:
    """X - 0 => x, unless the zero is -0.0"""
    zero = s.constant(s.operands[1])
    return like_result(s, s.x) if zero == 0 and math.copysign(1, zero) > 0 else None


def power(s: Site) -> Value | None:
    """pow(x, p) => x, square(x), sqrt(x), rsqrt(x) or reciprocal(x), as PyTorch computes them"""
    exponent = s.constant(s.operands[1])
    if exponent == 1:
        return like_result(s, s.x)
    kinds = {2: "square"} | ({0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"} if s.result.dtype.is_float else {})
    return like_result(s, s.x).unary(kinds[exponent]) if exponent in kinds else None


# ---- signs ----------------------------------------------------------------------------------------------------------
def twice(kind: str) -> Rule:
    """The rule that an operator applied twice is nothing."""

    def rule(s: Site) -> Value | None:
        """f(f(x)) => x"""
        inner = s.of_kind(s.x, kind)
        return inner[0] if inner else None

    return rule


def plus_negative(s: Site) -> Value | None:
    """A + -b => a - b"""
    a, b = s.operands
    if inner := s.of_kind(b, "neg"):
        return a - inner[0]
    if inner := s.of_kind(a, "neg"):
        return b - inner[0]
    return None


def minus_negative(s: Site) -> Value | None:
    """A - -b => a + b"""
    inner = s.of_kind(s.operands[1], "neg")
    return s.x + inner[0] if inner else None


# ---- choices --------------------------------------------------------------------------------------------------------
def decided(s: Site) -> Value | None:
    """where(True, a, b) => a;  where(False, a, b) => b;  where(c, a, a) => a"""
    condition, yes, no = s.operands
    known = s.constant(condition)
    if known is None and yes.name != no.name:
        return None
    return like_result(s, no if known is not None and not known else yes)


def with_itself(s: Site) -> Value | None:
    """max(x, x) => x, and so for the other idempotent operators"""
    return s.x if s.x.name == s.operands[1].name else None


# ---- element types --------------------------------------------------------------------------------------------------
def same_cast(s: Site) -> Value | None:
    """cast(x), to the type it has => x"""
    return s.x if s.x.dtype is s.result.dtype else None


def cast_of_exact_cast(s: Site) -> Value | None:
    """cast(cast(x)) => cast(x), where the inner cast loses nothing"""
    results = s.made_by(s.x, Cast)
    if results is None or s.x.dtype not in _EXACT_IN.get(results[1][0].dtype, ()):
        return None
    return results[1][0].cast(s.result.dtype)


# ---- shapes ---------------------------------------------------------------------------------------------------------
def broadcast_instead(s: Site) -> Value | None:
    """f(expand(x), y) => f(x, y), and f(view(x), y) => f(x, y), where the view adds leading ones"""
    operands = list(s.operands)
    for position in range(len(operands)):
        others = [v.shape for i, v in enumerate(operands) if i != position]
        while (source := _before_broadcast(s, operands[position])) is not None:
            if not same_shape(broadcast(source.shape, *others), s.result.shape):
                break
            operands[position] = source
    if [v.name for v in operands] == [v.name for v in s.operands]:
        return None
    return operands[0].apply(s.op, *operands[1:])


def _before_broadcast(s: Site, x: Value) -> Value | None:
    if results := s.made_by(x, Expand):
        return results[1][0]
    if made_view := s.made_by(x, View):
        source = made_view[1][0]
        added = x.tensor.rank - source.tensor.rank
        ones = added > 0 and all(same(size, 1) for size in x.shape[:added])
        return source if ones and same_shape(x.shape[added:], source.shape) else None
    return None


ARITHMETIC: Rules = {
    "mul": (times_one,),
    "div": (over_one,),
    "add": (plus_zero, plus_negative),
    "sub": (minus_zero, minus_negative),
    "pow": (power,),
    "neg": (twice("neg"),),
    "logical_not": (twice("logical_not"),),
    "where": (decided,),
    "maximum": (with_itself,),
    "minimum": (with_itself,),
    "logical_and": (with_itself,),
    "logical_or": (with_itself,),
    "cast": (same_cast, cast_of_exact_cast),
    "elementwise": (broadcast_instead,),
}
"""None of these changes a value, and none adds bytes."""
