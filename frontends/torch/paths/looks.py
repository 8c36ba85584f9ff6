"""Looks at values: a program computes them while a path is followed, or PyTorch has done so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from daceml_train.frontends.torch.paths.trie import Result, Step
from daceml_train.frontends.torch.paths.values import mapped, memory, numeric, tensors


class Looks(TorchFunctionMode):
    """What a `Recorder` does where user code looks at values."""

    fetch: Callable[[Any, Result], Tensor | None] | None
    """Computes a result that user code looks at; None where nothing is compiled for it."""
    at: Step
    following: bool
    refuse: Callable[[str], None]
    leave: Callable[[], None]
    stands_for: Callable[[Any], Result | None]
    _real: Callable[[Any], Any]

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Result, Tensor] = {}
        """Results that were computed in PyTorch, or by a program."""
        self.known: dict[int, Result] = {}
        """Results by the identity of the tensors that PyTorch computed."""
        self.pending: set[int] = set()
        """The memory of operands that the step changes."""
        self.looked: list[tuple[Step, Result]] = []
        """Which results user code has looked at, and where."""
        self.arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def _look(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that looks at values: a program computes them, or PyTorch has done so."""
        given = tensors((args, kwargs))
        if self.pending and any(memory(t) in self.pending for t in given if not t.is_meta):
            self.refuse("a look at a tensor that the step has changed")
            return function(*self._real(args), **self._real(kwargs))
        if self.following:
            found: dict[int, Tensor] = {}
            for t in given:
                result = self.stands_for(t) if t.is_meta else None
                if result is None:
                    continue
                value = self.values.get(result)
                if value is None and self.fetch is not None:
                    value = self.fetch(self, result)
                if value is None:
                    self.leave()
                    return self._look(function, args, kwargs)
                self.values[result] = found[id(t)] = value
            with torch.no_grad():
                return function(*mapped(args, lambda t: found.get(id(t), t)), **kwargs)
        args, kwargs = self._real(args), self._real(kwargs)
        seen = function(*args, **kwargs)
        self._noted(tensors((args, kwargs)), seen)
        return seen

    def applied(self, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What an `autograd.Function` returns: PyTorch calls its Python code, forward and backward."""
        with torch._C.DisableTorchFunction():  # which calls of the user's own would come to
            if torch.is_grad_enabled() and any(self._requires_gradient(t) for t in args if isinstance(t, Tensor)):
                self.refuse("an autograd.Function")
                args = self._real(args)
        return apply(*args)

    def _requires_gradient(self, tensor: Tensor) -> bool:
        result = self.stands_for(tensor) if tensor.is_meta else None
        return tensor.requires_grad or (result is not None and result.grown)

    def _noted(self, given: Sequence[Tensor], seen: Any) -> None:
        for t in given:
            if (result := self.known.get(id(t))) is not None:
                self.looked.append((self.at, result))
            elif t.requires_grad:
                self.refuse("a look at a parameter's values")
        if isinstance(seen, np.ndarray):
            self.arrays.append((seen, seen.copy()))
        elif any(t.requires_grad for t in tensors(seen)):
            self.refuse("values of a size that depends on data, with a gradient")

    def check_arrays(self) -> None:
        """Refuse calls that change an array which shares memory with a result."""
        if any(not np.array_equal(array, before, equal_nan=True) for array, before in self.arrays if numeric(array)):
            self.refuse("a NumPy array that shares memory with a result is changed")
