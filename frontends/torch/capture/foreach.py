"""PyTorch's operators on lists of tensors as operators on each of them, which is what they are on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_NAMES = """
abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1 floor frac lerp lgamma
log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc
"""
_OF_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""Functions that take no number -> those that do."""
_OTHERWISE = frozenset({"addcdiv.Tensor", "addcmul.Tensor", "pow.ScalarAndTensor"})
"""Overloads with scalars in a tensor, or a number in place of the first list."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Overload -> its decomposition."""
    aten = torch.ops.aten
    found: dict[Any, Callable[..., Any]] = {
        aten._foreach_norm.Scalar: _norms,
        aten._foreach_zero.default: lambda xs: [torch.zeros_like(x) for x in xs],
        aten._foreach_copy.default: _copies,
    }
    for name in _NAMES.split():
        packet = getattr(aten, f"_foreach_{name}")
        for kind in packet.overloads():
            if not kind.endswith("out") and f"{name}.{kind}" not in _OTHERWISE:
                own = _OF_NUMBERS.get(name, name) if kind.startswith("Scalar") else name
                found[getattr(packet, kind)] = functools.partial(_each, getattr(torch, own))
    return found


def _each(function: Callable[..., Tensor], xs: Sequence[Tensor], *further: Any, **keywords: Any) -> list[Tensor]:
    """`function` of each tensor, with its element of each further list."""
    lists = [argument if isinstance(argument, list | tuple) else [argument] * len(xs) for argument in further]
    if function in (torch.addcmul, torch.addcdiv) and len(lists) > 2:
        return [function(x, a, b, value=value) for x, a, b, value in zip(xs, *lists, strict=True)]
    return [function(*own, **keywords) for own in zip(xs, *lists, strict=True)]


def _norms(xs: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(x, ord, dtype=dtype) for x in xs]


def _copies(xs: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> list[Tensor]:
    return [torch.ops.aten.copy(x, source) for x, source in zip(xs, sources, strict=True)]
