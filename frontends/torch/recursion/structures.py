"""What is known of a model's recursion, for all of its calls: structures of cells, and what blocks have recorded."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from daceml_train.frontends.torch.recursion import cells
from daceml_train.frontends.torch.recursion.lazy import Meta
from daceml_train.frontends.torch.recursion.outside import Results
from daceml_train.frontends.torch.recursion.runs import Given, Shared, Step
from daceml_train.frontends.torch.recursion.state import State
from daceml_train.frontends.torch.recursion.watches import Contents, Watch

STATES = 32
"""For how many states of modules records are kept."""


class Structures:
    """What is known of a model's cells, for all of its calls."""

    def __init__(self, codes: Iterable[types.CodeType]) -> None:
        self.start = Step()
        self.given: dict[Meta, Given] = {}
        self.fakes = cells.Fakes()
        self.outside = Results(self.fakes)
        self.shared: dict[Any, Shared] = {}
        self.codes = {id(code): code for code in codes}
        self.blocks: set[types.CodeType] = set()
        """Code that belongs to a function of `codes`, which calls it."""
        self.cells: list[Any] = []
        self.memo: dict[Any, dict[Any, Any]] = {}
        self.last: dict[Any, dict[Any, Callable[..., Any]]] = {}
        self.watches: dict[Any, list[Watch]] = {}
        """Per state of the model's modules, what blocks record, what they recorded last, and what that depends on."""
        self.contents = Contents()
        self.noisy: set[int] = set()
        """The identities of dicts that change at nodes though nothing that blocks read in them does."""
        self.inner = False
        """Whether an operator within the recursion was ever recorded."""
        self.nested = False
        """Whether one was recorded in a call of a function below another call of the same."""
        self.caught = False
        """Whether user code may handle errors of values, which operators therefore have to raise where they are."""
        self.programs: Any = None
        """What compiles forests; None if PyTorch runs them."""

    def of(self, state: State) -> tuple[dict[Any, Any], dict[Any, Callable[..., Any]], list[Watch]]:
        """What is known for a state of the model's modules."""
        if state not in self.memo and len(self.memo) >= STATES:
            for table in (self.memo, self.last, self.watches):
                table.pop(next(iter(table)))
        memo, last = self.memo.setdefault(state, {}), self.last.setdefault(state, {})
        return memo, last, self.watches.setdefault(state, [])

    def shared_by(self, tensors: Iterable[torch.Tensor]) -> dict[int, Shared]:
        """What stands for parameters and buffers in a call, by identity."""
        found: dict[int, Shared] = {}
        for tensor in tensors:
            key = (id(tensor), tensor.requires_grad, tensor.shape, tensor.dtype)
            if key not in self.shared:
                self.shared[key] = Shared(tensor, self.fakes.of_tensor(tensor))
            found[id(tensor)] = self.shared[key]
        return found
