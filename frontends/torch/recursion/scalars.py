"""Scalars: Python's numbers that differ from call to call become data, so that no cell is one number's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from daceml_train.frontends.torch.recursion.lazy import Lazy
from daceml_train.frontends.torch.recursion.runs import Step

SCALED: frozenset[Any] = frozenset(
    getattr(torch.Tensor, f"__{prefix}{name}__")
    for name in ("mul", "add", "sub", "truediv")
    for prefix in ("", "r")
    if hasattr(torch.Tensor, f"__{prefix}{name}__")
) | {getattr(owner, name) for owner in (torch, torch.Tensor) for name in ("mul", "add", "sub", "div")}
"""Functions of a tensor and a number that compute the same with a tensor of that number."""
SEEN = 3
"""How many numbers in one place make it one for data."""


def with_data(at: Step, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of one of `SCALED` at a point of a run, with a tensor in place of a number that differs."""
    if len(args) != 2:
        return args
    for k, a in enumerate(args):
        other = args[1 - k]
        if isinstance(a, np.floating | np.integer):
            a = a.item()  # which PyTorch takes it for
        if type(a) not in (int, float) or type(other) is not Lazy:
            continue
        dtype = other.meta.dtype
        if dtype is not torch.float32 and dtype is not torch.float64:  # others compute in a wider type than theirs
            return args
        seen = at.numbers.setdefault((function, k), set())
        if len(seen) < SEEN:
            seen.add(a)
            return args
        data = torch.tensor(a, dtype=dtype)
        return (args[0], data) if k else (data, args[1])
    return args
