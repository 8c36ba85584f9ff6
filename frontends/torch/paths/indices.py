"""Indices of tensors: lists and arrays are data, masks are positions, and integers that change are data as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a function of PyTorch along a path."""

INDEXING = frozenset([Tensor.__getitem__, Tensor.__setitem__])


def entries_of(index: Any) -> tuple[Any, ...]:
    """The parts of an index, one per dimension that it names."""
    return index if isinstance(index, tuple) else (index,)


def as_data(index: Any) -> Any:
    """An index with tensors in place of lists and arrays, whose values may differ from call to call."""
    if isinstance(index, tuple):
        data = any(isinstance(part, list | np.ndarray | np.generic) for part in index)
        return tuple(map(as_data, index)) if data else index
    if isinstance(index, np.generic):
        return index.item()
    listed = isinstance(index, list) and index and all(type(i) in (int, bool) for i in index)
    return torch.tensor(index) if listed or isinstance(index, np.ndarray) else index


def has_integers(function: Any, arguments: Any) -> bool:
    """Whether an index reads by integers, or writes one, so that these could be data."""
    if function is Tensor.__getitem__:
        return varies(arguments[1])
    return function is Tensor.__setitem__ and isinstance(arguments[2], int)


def varies(index: Any) -> bool:
    """Whether an index has integers that could be data."""
    simple = (int, slice, type(None), type(...))
    parts = entries_of(index)
    fits = all((isinstance(part, simple) and type(part) is not bool) or _scalar(part) for part in parts)
    return fits and any(type(part) is int for part in parts)


def integers_as_data(x: Tensor, index: Any) -> Any:
    """An index with tensors in place of its integers. Raises `IndexError` as PyTorch does."""
    if not varies(index):
        return index
    parts, found, dimension = entries_of(index), [], 0
    torch.empty(x.shape, device="meta")[tuple(0 if isinstance(part, Tensor) else part for part in parts)]
    for place, part in enumerate(parts):
        if type(part) is int:
            part = torch.tensor(part % x.shape[dimension])
        found.append(part)
        if part is ...:
            dimension = x.ndim - sum(other is not None for other in parts[place + 1 :])
        elif part is not None:
            dimension += 1
    return tuple(found)


def _scalar(part: Any) -> bool:
    if not isinstance(part, Tensor) or part.ndim:
        return False
    return not part.dtype.is_floating_point and part.dtype is not torch.bool


def scalar_index(index: Any) -> int | None:
    """The place of an integer tensor without dimensions in an index of slices and integers; None if there is none."""
    parts = entries_of(index)
    found = [i for i, part in enumerate(parts) if isinstance(part, Tensor)]
    if not found or not all(_scalar(parts[i]) for i in found):
        return None
    others = (part for part in parts if not isinstance(part, Tensor))
    plain_parts = all(part is None or part is ... or isinstance(part, slice | int) for part in others)
    return found[0] if plain_parts else None


def selected(run: Run, x: Any, index: Any, place: int) -> Any:
    """An element along a dimension, at a position that a tensor without dimensions has."""
    parts = list(entries_of(index))
    position, parts[place] = parts[place], slice(None)
    before: Sequence[Any] = parts[:place]
    dims = sum(part is None or isinstance(part, slice) for part in before)
    if any(part is ... for part in before):
        dims += x.ndim - sum(part is not None and part is not ... for part in parts)
    whole = run(Tensor.__getitem__, (x, tuple(parts)), {})
    row = run(Tensor.reshape, (position, 1), {})
    return run(Tensor.squeeze, (run(torch.index_select, (whole, dims, row), {}), dims), {})


def without_masks(run: Run, index: Any) -> Any:
    """An index with the positions of elements in place of masks."""
    parts = entries_of(index)
    if not any(isinstance(part, Tensor) and part.dtype is torch.bool for part in parts):
        return index
    found: list[Any] = []
    for part in parts:
        if isinstance(part, Tensor) and part.dtype is torch.bool:
            found += run(Tensor.nonzero, (part,), {}).unbind(1)
        else:
            found.append(part)
    return tuple(found)
