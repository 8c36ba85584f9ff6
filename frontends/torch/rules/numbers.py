"""Numbers in place of elements: PyTorch converts some of them to an element type only if that holds them."""

from __future__ import annotations

import math
from typing import Any

import torch

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.rules.translate import Translator
from daceml_train.frontends.torch.types import TORCH_DTYPES
from daceml_train.ops.operator import Value
from daceml_train.tensor import DType


def element(t: Translator, operand: Any, dtype: DType) -> Value:
    """As `Translator.value`, where PyTorch refuses numbers that `dtype` does not hold."""
    return t.value(held(operand, dtype), dtype)


def held(number: Any, dtype: DType) -> Any:
    """`number`, if it is none or if `dtype` holds it. Otherwise `Unsupported`: PyTorch raises its own error.

    As `c10::overflows`: infinity and NaN are floating-point numbers, and a negative number may wrap to an unsigned one.
    """
    if isinstance(number, bool) or not isinstance(number, int | float) or dtype is DType.bool:
        return number
    kind = TORCH_DTYPES[dtype]
    if dtype.is_float:
        fits = not math.isfinite(number) or abs(number) <= torch.finfo(kind).max
    else:
        least, most = torch.iinfo(kind).min, torch.iinfo(kind).max
        fits = (least or -most) <= number <= most
    if not fits:
        raise Unsupported(f"{number} as {dtype.short}, which does not hold it")
    return number
