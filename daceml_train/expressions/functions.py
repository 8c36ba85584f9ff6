"""Functions of the notation: the elementwise operators of `ops.elementwise`, on terms and NumPy scalars."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from daceml_train.expressions.promotion import FLOATS, common, default_float
from daceml_train.expressions.term import Term, apply, cast, lift, node
from daceml_train.ops.elementwise import TABLE, Elementwise

_ALIASES = {
    "max": "maximum",
    "min": "minimum",
    "bit_and": "bitwise_and",
    "bit_or": "bitwise_or",
    "bit_xor": "bitwise_xor",
    "bit_not": "bitwise_not",
}
"""Names in the formulas of `ops.elementwise` -> operators."""


def _function(kind: str) -> Any:
    def function(*operands: Any) -> Any:
        if any(isinstance(v, Term) for v in operands) or len(operands) != len(TABLE[kind].operands):
            return apply(kind, *operands)  # which counts them
        arrays = [np.asarray(v) for v in operands]
        numeric = arrays[1:] if kind == "where" else arrays
        dtype = np.result_type(*numeric) if kind not in FLOATS else np.result_type(*numeric, np.float16)
        cast_to = [a.astype(dtype) for a in numeric]
        return Elementwise(kind).evaluate(*([arrays[0], *cast_to] if kind == "where" else cast_to))[0][()]

    function.__name__ = function.__qualname__ = kind
    function.__doc__ = f"The elementwise operator `{kind}`: `{TABLE[kind].expression}`."
    return function


FUNCTIONS: dict[str, Any] = {kind: _function(kind) for kind in TABLE}
"""Operator -> a function of terms or NumPy scalars."""
FORMULAS: dict[str, Any] = {**FUNCTIONS, **{name: FUNCTIONS[kind] for name, kind in _ALIASES.items()}}
"""The names that formulas of `ops.elementwise` use."""


def _where(condition: Any, a: Any, b: Any) -> Any:
    """A choice. A number that is chosen at once has the type of both branches, too."""
    result = apply("where", condition, a, b) if any(isinstance(v, Term) for v in (a, b)) else None
    if result is None:
        return FORMULAS["where"](condition, a, b)
    dtype = common(map(lift, (a, b)))
    return node("cast", (result,), dtype) if result.op == "number" and dtype is not None else result


FUNCTIONS["where"] = functools.update_wrapper(_where, FUNCTIONS["where"])


def to_float(value: Any) -> Any:
    """An index, an integer or a condition as a number of the expression's floating-point type."""
    if isinstance(value, Term):
        return cast(lift(value), default_float[-1])
    return float(value)
