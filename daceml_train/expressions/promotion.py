"""Promotion: the element types in which expressions compute, by PyTorch's rules, and the numbers that fit them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from daceml_train.errors import Invalid
from daceml_train.tensor import DType

_PACKAGE = str(Path(__file__).parents[1])
_PYTHON = Path(contextlib.__file__).parent
"""The folder of Python's own modules, such as `contextlib`."""


def location() -> str:
    """The user's line that is executing: the innermost frame outside of this package and Python's own library."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith(_PACKAGE) or "/frontends/torch/" in name
        if not ours and Path(name).parent != _PYTHON:
            return f"{Path(name).name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


_RANK = (
    (DType.bool,),
    (DType.uint8, DType.int8),
    (DType.int16,),
    (DType.int32,),
    (DType.int64,),
    (DType.float16, DType.bfloat16),
    (DType.float32,),
    (DType.float64,),
)


def promote(a: DType, b: DType) -> DType:
    """The type in which values of two types are combined, by PyTorch's rules."""
    if a is b:
        return a
    ranks = [next((n for n, group in enumerate(_RANK) if t in group), -1) for t in (a, b)]
    if -1 in ranks:
        raise Invalid(f"expressions do not compute with {a.short} and {b.short}", where=location())
    if ranks[0] == ranks[1]:
        return _RANK[ranks[0] + 1][0]
    return a if ranks[0] > ranks[1] else b


_FLOATS = """
div sqrt rsqrt reciprocal exp expm1 log log1p sin cos tan atan asin acos asinh acosh atanh atan2 exp2 log2 log10 hypot
tanh sigmoid erf silu gelu_erf gelu_tanh elu hardsigmoid hardswish cosh sinh logaddexp xlogy xlog1py logsigmoid entr
mish logit softplus bce
"""
FLOATS = frozenset(_FLOATS.split())
"""Operators whose result is floating-point, whatever their operands are."""
LOGICAL = ("logical_and", "logical_or", "logical_not")
"""Operators on conditions."""
default_float = [DType.float32]
"""The type that integers become in floating-point functions: that of the trace in progress is the last."""


def common(terms: Iterable[Any], floating: bool = False) -> DType | None:
    """The element type that terms are cast to as operands; None if all are numbers."""
    found: DType | None = None
    weak_float = False
    for term in terms:
        if term.dtype is None:
            weak_float |= isinstance(term.value, float)
        else:
            found = term.dtype if found is None else promote(found, term.dtype)
    if found is not None and not found.is_float and (floating or weak_float):
        return default_float[-1]
    return found


def fits(value: Any, dtype: DType) -> bool:
    """Whether a number is no integer, or one that a type has."""
    if not isinstance(value, int) or dtype.is_float or dtype is DType.bool:
        return True
    bits = 8 * dtype.bytes
    return 0 <= value < 1 << bits if dtype is DType.uint8 else -(1 << bits - 1) <= value < 1 << bits - 1


def number_in(value: Any, dtype: DType) -> Any:
    """A number as one of an element type. Raises `Invalid` where the type has no such number.

    As in PyTorch, negative numbers of unsigned types wrap around, so that `x + -1` is `x - 1`.
    """
    if dtype is DType.bool:
        return bool(value)
    try:
        if dtype.is_float:
            return float(value)
        number = int(value)
    except (OverflowError, ValueError):
        number = 2**64
    if dtype is DType.uint8 and -256 < number < 0:
        number += 256
    if dtype.is_float or not fits(number, dtype):
        advice = "" if dtype.is_float else "cast the operand to a wider type before it is passed"
        raise Invalid(f"the number {value} does not fit {dtype.name}", where=location(), advice=advice)
    return number
