"""Cases: the operators of the gallery with inputs of small sizes for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def ints(*shape: int, low: int, high: int) -> Callable[[], torch.Tensor]:
    """Integers, for indices."""
    return lambda: torch.randint(low, high, shape)


def near(*shape: int, low: float, high: float) -> Callable[[], torch.Tensor]:
    """Numbers in a range, for positions."""
    return lambda: torch.rand(shape, dtype=torch.float64) * (high - low) + low


SMALL: dict[str, list[Any]] = {
    "capsule": [(2, 3, 7, 6, 2, 3), (4, 3, 3, 3, 3, 2)],
    "shift": [(2, 5, 6, 7), ints(5, low=-2, high=3), ints(5, low=-2, high=3)],
    "correlate": [(2, 3, 8, 7), (2, 3, 8, 7)],
    "involution": [(2, 2, 3, 6, 5), (2, 2, 3, 3, 6, 5)],
    "local_attention": [(1, 2, 3, 8, 9)] * 3,
    "bilinear": [(2, 3, 6, 5), near(2, 7, 2, low=-0.8, high=5.3)],
    "mi_lstm": [(3, 5), (3, 4), (3, 4), (4, 4, 5), (4, 4, 4), (4, 4), (4, 4), (4, 4), (4, 4)],
    "subspace_attention": [(2, 2, 3, 5, 6), (2, 3), (2, 3)],
    "deformable": [(2, 3, 9), near(2, 3, 9, low=-1.4, high=1.4), (4, 3, 3)],
    "tropical": [(4, 6), (5, 6)],
    "manhattan": [(4, 6), (5, 6)],
    "circulant": [(2, 3, 5), (4, 3, 5)],
    "ring_conv": [(2, 3, 8), (4, 3, 3)],
    "pixel_shuffle": [(2, 8, 3, 4)],
    "strided_lse": [(2, 14)],
    "diagonal_gate": [(5, 5), (5, 5)],
    "causal_decay": [(3, 7), near(3, low=0.1, high=1)],
    "embed_sum": [(9, 4), ints(5, 3, low=0, high=9)],
    "sparse_stride": [(2, 13), (2,)],
}
"""Operator -> its operands: sizes of normal numbers, or a function that draws them."""


def operands(specification: Sequence[Any], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The operands of a case; those with a floating-point type require gradients."""
    made = [s() if callable(s) else torch.randn(s, dtype=dtype) for s in specification]
    return [m.to(dtype).requires_grad_() if m.is_floating_point() else m for m in made]
