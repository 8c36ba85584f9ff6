"""Expressions: operators written as index notation. Derivatives, lowering and fusion come by themselves.

The names to write expressions with; `dt.expression` makes a function of tensors of one.
"""

from typing import Any

from daceml_train.expressions.functions import FUNCTIONS, to_float
from daceml_train.expressions.loops import Size
from daceml_train.expressions.notation import argmax, array, largest, least, logsumexp, product, size, total

_NAMES = {name: function for name, function in FUNCTIONS.items() if name not in ("abs", "round", "pow")}


def __getattr__(name: str) -> Any:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Size",
    "argmax",
    "array",
    "largest",
    "least",
    "logsumexp",
    "product",
    "size",
    "to_float",
    "total",
    *sorted(_NAMES),
]
