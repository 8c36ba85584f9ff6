"""The functions that elementwise expressions may call, as NumPy evaluates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from daceml_train.ops.operator import Array


def _erf(x: Array) -> Array:
    import torch  # NumPy has no erf; torch's is exact to the last bit in float64

    return torch.erf(torch.as_tensor(x)).numpy()


def _pow(a: Array, b: Array) -> Array:
    """The power; a negative power of an integer is truncated, as in PyTorch, and that of 0 is 0."""
    if not np.issubdtype(np.result_type(a, b), np.integer):
        return np.asarray(np.power(a, b))
    powers = np.power(a, np.maximum(b, 0))
    odd = np.where(np.equal(np.bitwise_and(b, 1), 1), a, 1)
    return np.where(np.less(b, 0), np.where(np.abs(a) == 1, odd, 0), powers)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "atan": np.arctan,
    "erf": _erf,
    "abs": np.abs,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan2": np.arctan2,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "exp2": np.exp2,
    "log2": np.log2,
    "log10": np.log10,
    "hypot": np.hypot,
    "copysign": np.copysign,
    "bit_and": np.bitwise_and,
    "bit_or": np.bitwise_or,
    "bit_xor": np.bitwise_xor,
    "bit_not": np.invert,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "trunc": np.trunc,
    "sign": lambda x: np.where(x > 0, 1, np.where(x < 0, -1, 0)),
    "pow": _pow,
    "fmod": np.fmod,
    "max": lambda a, b: np.where((a > b) | (a != a), a, b),
    "min": lambda a, b: np.where((a < b) | (a != a), a, b),
    "where": np.where,
    "isnan": np.isnan,
    "sigmoid": lambda x: np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x)))),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "floor_divide": np.floor_divide,
    "isinf": np.isinf,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_not": np.logical_not,
}
"""Functions an expression may call, with their NumPy meaning, which is PyTorch's: `max` and `min` keep NaN and return
the second of equal operands, such as zeros of different signs; the sign of NaN is 0."""
