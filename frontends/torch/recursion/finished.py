"""What user code gets of a recursion in the end: tensors in place of lazy values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.recursion.forest import as_tensors
from daceml_train.frontends.torch.recursion.lazy import Lazy, known, outside
from daceml_train.frontends.torch.recursion.recorder import Recorder
from daceml_train.frontends.torch.recursion.runs import Run


class Owned:
    """What modules have of a recursion: values that user code has assigned to attributes and buffers become tensors."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.tables = [table for m in modules for table in (vars(m), m._buffers)]
        self.before = [dict(table) for table in self.tables]

    def settle(self) -> None:
        """Take the tensors of values; what cannot be computed, since it has raised an error, is as it was before."""
        for table, before in zip(self.tables, self.before, strict=True):
            for name, value in list(table.items()):
                if type(value) is not Lazy:
                    continue
                try:
                    table[name] = value.tensor()
                except Exception:  # PyTorch's, of values, which the caller has been told
                    table[name] = before.get(name)


def computed(recorder: Recorder, found: Any) -> Any:
    """A result of user code with tensors in place of lazy ones."""
    leaves, spec = pytree.tree_flatten(found)
    lazies = [leaf for leaf in leaves if type(leaf) is Lazy]
    runs: dict[Run, None] = {}
    for value in lazies:
        if type(value.source) is Run:
            value.source.use(value.index)
            runs[value.source] = None
    recorder.flush(last=runs)
    if not recorder.eager and recorder.exposed.written():
        raise Unsupported(
            "NumPy's writes to a parameter or a buffer within a recursion, whose calls are computed later",
            advice="call the model again: PyTorch runs it from now on",
        )
    with outside(recorder.grad or any(value.meta.requires_grad for value in lazies)):
        as_tensors([lazies])
        leaves = [known(leaf) if type(leaf) is Lazy else leaf for leaf in leaves]
    recorder.traced.clear()  # which keeps frames, with what their calls refer to
    return pytree.tree_unflatten(leaves, spec)
