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
    "lltm": [(3, 5), (3, 4), (3, 4), (3, 4, 5), (3, 4, 4), (3, 4)],
    "scrnn": [(3, 5), (3, 4), (3, 2), (2, 5), (4, 2), (4, 5), (4, 4)],
    "sub_lstm": [(3, 5), (3, 4), (3, 4), (4, 4, 5), (4, 4, 4), (4, 4)],
    "routing": [(2, 5, 3, 4)],
    "channel_shuffle": [(2, 8, 3, 2)],
}
"""Operator -> its operands: sizes of normal numbers, or a function that draws them."""


def operands(specification: Sequence[Any], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The operands of a case; those with a floating-point type require gradients."""
    results = [s() if callable(s) else torch.randn(s, dtype=dtype) for s in specification]
    return [m.to(dtype).requires_grad_() if m.is_floating_point() else m for m in results]


LARGE: dict[str, list[Any]] = {
    "involution": [(4, 4, 16, 28, 28), (4, 4, 7, 7, 28, 28)],
    "correlate": [(2, 64, 32, 32)] * 2,
    "local_attention": [(2, 4, 16, 28, 28)] * 3,
    "capsule": [(4, 16, 14, 14, 4, 4), (16, 16, 3, 3, 4, 4)],
    "deformable": [(4, 32, 128), near(4, 3, 128, low=-1.4, high=1.4), (32, 32, 3)],
    "tropical": [(128, 256), (256, 256)],
    "manhattan": [(256, 128), (256, 128)],
    "circulant": [(32, 8, 32), (16, 8, 32)],
    "ring_conv": [(8, 64, 256), (64, 64, 5)],
    "mi_lstm": [(64, 784), (64, 256), (64, 256), (4, 256, 784), (4, 256, 256)] + [(4, 256)] * 4,
    "pixel_shuffle": [(8, 64, 28, 28)],
    "subspace_attention": [(4, 4, 16, 28, 28), (4, 16), (4, 16)],
    "bilinear": [(4, 32, 28, 28), near(4, 784, 2, low=0, high=27)],
    "shift": [(8, 64, 28, 28), ints(64, low=-1, high=2), ints(64, low=-1, high=2)],
    "strided_lse": [(64, 512)],
    "causal_decay": [(16, 256), near(16, low=0.1, high=1)],
    "embed_sum": [(1000, 64), ints(256, 16, low=0, high=1000)],
    "diagonal_gate": [(512, 512)] * 2,
    "sparse_stride": [(256, 1025), (2,)],
    "lltm": [(64, 784), (64, 128), (64, 128), (3, 128, 784), (3, 128, 128), (3, 128)],
    "scrnn": [(64, 784), (64, 128), (64, 64), (64, 784), (128, 64), (128, 784), (128, 128)],
    "sub_lstm": [(64, 784), (64, 128), (64, 128), (4, 128, 784), (4, 128, 128), (4, 128)],
    "routing": [(8, 256, 10, 16)],
    "channel_shuffle": [(8, 64, 28, 28)],
}
"""Operator -> its operands for measurements."""
WINDOWS = ("involution", "correlate", "local_attention", "capsule", "deformable")
"""The operators that read windows."""
