"""Arguments of functions that user code calls: which of them are lazy, and what many of them are as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from daceml_train.frontends.torch.recursion import columns
from daceml_train.frontends.torch.recursion.effects import settled
from daceml_train.frontends.torch.recursion.lazy import Lazy, Meta, lazy_of, meta
from daceml_train.frontends.torch.recursion.runs import Pick


def joined_type(function: Any, args: Any, kwargs: Any) -> Meta | None:
    """The type of many lazy values of one type that are concatenated or stacked; None for anything else."""
    if function not in (torch.cat, torch.stack) or kwargs or not 1 <= len(args) <= 2 or not args[0]:
        return None
    parts, dim = args[0], args[1] if len(args) == 2 else 0
    if type(parts) not in (list, tuple) or type(dim) is not int or type(parts[0]) is not Lazy:
        return None
    if not columns.unknown(parts) or len(columns.metas(parts)) != 1:
        return None
    one = parts[0].meta
    shape = list(one.shape)
    rank = len(shape) + (function is torch.stack)
    if not -rank <= dim < rank or not shape:
        return None
    if function is torch.stack:
        shape.insert(dim % rank, len(parts))
    else:
        shape[dim] *= len(parts)
    return meta(tuple(shape), one.dtype, one.device, one.requires_grad and torch.is_grad_enabled())


def picked(tensor: Any, index: Any) -> Lazy | None:
    """A slice of a tensor that has a gradient, whose position is data; None for other subscripts."""
    if settled(tensor) is not tensor:
        return None
    length = len(tensor) if tensor.ndim else 0
    if type(index) is slice and index.step in (None, 1):
        start, stop, _ = index.indices(length)
        if stop - start <= 0:
            return None
        shape, pick = (stop - start, *tensor.shape[1:]), Pick(tensor, start, stop - start)
    elif type(index) is int and -length <= index < length:
        shape, pick = tuple(tensor.shape[1:]), Pick(tensor, index % length, None)
    else:
        return None
    return lazy_of(pick, 0, meta(shape, tensor.dtype, tensor.device, torch.is_grad_enabled()))


def name_of(function: Any) -> str:
    """What a message calls a function."""
    return str(getattr(function, "__name__", function))


def laziness(args: Iterable[Any]) -> int:
    """1: a lazy value is among the arguments; 2: a tensor with a gradient; 4: a lazy value that is known."""
    state = 0
    for a in args:
        kind = type(a)
        if kind is Lazy:
            state |= 1 if a.value is None else 6 if a.meta.requires_grad else 4
        elif kind is list or kind is tuple:
            state |= _laziness_of(a)
        elif kind is not int and kind is not float and isinstance(a, torch.Tensor) and a.requires_grad:
            state |= 2
    return state


def _laziness_of(parts: Any) -> int:
    """`laziness` of a list or tuple, of one look where all parts are of one kind."""
    if parts and type(parts[0]) is Lazy and columns.unknown(parts):
        return 1
    return 0 if set(map(type, parts)) <= NUMBERS else laziness(parts)


NUMBERS = {int, float, bool}


def lazy_values(found: Any) -> Iterator[Lazy]:
    """The values in arguments that are not known."""
    if type(found) is Lazy:
        if found.value is None:
            yield found
    elif type(found) in (list, tuple):
        for f in found:
            yield from lazy_values(f)
    elif type(found) is dict:
        for f in found.values():
            yield from lazy_values(f)
