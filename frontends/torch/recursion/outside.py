"""Types of results of operators outside of a recursion, which are learned once and not asked for in every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from daceml_train.frontends.torch.recursion.cells import Fakes
from daceml_train.frontends.torch.recursion.lazy import Lazy, Meta, meta, meta_of

KEPT = 10_000
"""How many types are kept."""
JOINS = (F.cross_entropy, F.nll_loss, F.mse_loss, F.binary_cross_entropy_with_logits)
BY_ROW = frozenset((*JOINS, F.linear, F.log_softmax, F.softmax, F.relu, torch.relu, torch.tanh, torch.sigmoid))
"""Functions whose results have the first size of their operands where they depend on it, whatever it is."""


class Results:
    """What operators return, by the types of their arguments."""

    def __init__(self, fakes: Fakes) -> None:
        self.fakes = fakes
        self.known: dict[Any, tuple[Any, str]] = {}

    def of(self, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, str]:
        """The type of the tensor that a function returns, or another result, and why it cannot wait."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        found = [a.meta if type(a) is Lazy else meta_of(a) if isinstance(a, torch.Tensor) else a for a in leaves]
        rows = 0
        if function in BY_ROW:
            lazies, others = _parted(found, [type(a) is Lazy for a in leaves])
            rows = _rows(lazies, others, function in JOINS)
        entries = [(Meta, *_without(m, rows)) if isinstance(m, Meta) else (type(m), m, repr(m)) for m in found]
        try:
            key = (function, spec, torch.is_grad_enabled(), torch.get_default_dtype(), bool(rows), *entries)
            known = self.known.get(key)
        except TypeError:  # an argument that is no part of a key
            return self.fakes.run(function, args, kwargs)
        if known is None:
            result, why = self.fakes.run(function, args, kwargs)
            known = (_without(meta_of(result), rows) if isinstance(result, torch.Tensor) else result), why
            if len(self.known) >= KEPT:
                self.known.clear()
            self.known[key] = known
        result, why = known
        if type(result) is tuple and result and result[0] is ROW:
            _, shape, dtype, device, requires_grad = result
            result = meta(tuple(rows if size == -1 else size for size in shape), dtype, device, requires_grad)
        return result, why


ROW = object()
"""Marks the type of a tensor, in which -1 stands for the number of rows."""


def _without(m: Meta, rows: int) -> tuple[Any, ...]:
    shape = tuple(-1 if rows and size == rows else size for size in m.shape)
    return ROW, shape, m.dtype, m.device, m.requires_grad


def _parted(found: Sequence[Any], lazy: Sequence[bool]) -> tuple[list[torch.Size], list[torch.Size]]:
    pairs = [(m.shape, each) for m, each in zip(found, lazy, strict=True) if isinstance(m, Meta)]
    return [shape for shape, each in pairs if each], [shape for shape, each in pairs if not each]


def _rows(lazies: Sequence[torch.Size], others: Sequence[torch.Size], joined: bool) -> int:
    """The first size of lazy operands, if no other size is equal to it; else 0.

    Other operands have this number of rows, too, where they are `joined` with the lazy ones row by row.
    """
    first = {shape[:1] for shape in lazies}
    if len(first) != 1 or not (one := first.pop()) or (rows := int(one[0])) < 2:
        return 0
    rest = [*(shape[1:] for shape in lazies), *(shape[1:] if joined else shape for shape in others)]
    return 0 if any(rows in shape for shape in rest) else rows
