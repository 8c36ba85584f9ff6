"""Aliases: recorded values that PyTorch makes views of others, which share a change in place with them.

Levels give each value memory of its own. That differs where user code looks at a value, and then changes it: so what is
a view of a value that is still in use is taken from that value again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from daceml_train.frontends.torch.recursion.effects import memory
from daceml_train.frontends.torch.recursion.lazy import Lazy, known, set_value
from daceml_train.frontends.torch.recursion.runs import Given, Reference, Run, Shared, Step, decoded


def is_alias(results: Iterable[torch.Tensor], operands: Iterable[torch.Tensor]) -> bool:
    """Whether a result has the memory of an operand."""
    with torch._C.DisableTorchFunction():
        return not set(map(memory, operands)).isdisjoint(map(memory, results))


class Aliases:
    """The results of a run that are views of values in use, which it lets go of when it is computed."""

    def __init__(self, run: Run) -> None:
        self.values, self.inputs = run.values, run.inputs
        self.steps: list[tuple[int, Step, list[Any]]] = []
        """Operators that make views, with the numbers of their first results, and where their operands are."""
        number = taken = 0
        own: set[int] = set()
        for step in run.at.operators():
            operands, taken = _operands(step, taken)
            results = range(number, number + len(step.made))
            number += len(step.made)
            if step.alias and all(k in own or _in_use(run, k) for local, k in operands if local):
                own.update(results)
                self.steps.append((results.start, step, operands))
        self.needed = any(_in_use(run, k) for k in own)

    def restore(self) -> None:
        """Have them be views of their operands, which are known now."""
        own: dict[int, torch.Tensor] = {}
        for number, step, operands in self.steps:
            assert step.operator is not None
            function, grad, *entries = step.operator
            tensors = iter([own[k] if local and k in own else self._operand(local, k) for local, k in operands])

            def of(entry: Any, tensors: Iterator[torch.Tensor] = tensors) -> torch.Tensor:
                return entry.tensor if type(entry) is Shared else next(tensors)

            args = [decoded(entry, of) for entry in entries]
            kwargs = args.pop() if step.keywords else {}
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
                result = function(*args, **kwargs)
            for k, tensor in enumerate([result] if step.kind is None else result, number):
                own[k] = tensor
                if type(value := self.values[k]) is Lazy and value.value is None:
                    set_value(value, tensor)

    def _operand(self, local: bool, k: int) -> torch.Tensor:
        found: Any = self.values[k] if local else self.inputs[k]
        result: torch.Tensor = torch.tensor(found) if type(found) is list else known(found)
        return result


def _operands(step: Step, taken: int) -> tuple[list[tuple[bool, int]], int]:
    """Whether each operand is a value of the run, and its number; how many inputs are taken then, after `taken`."""
    found: list[tuple[bool, int]] = []

    def note(entry: Any) -> None:
        nonlocal taken
        if type(entry) is Reference:
            found.append((entry.local, entry.number))
        elif type(entry) is Given:
            found.append((False, taken))
            taken += 1

    assert step.operator is not None
    for entry in step.operator[2:]:
        decoded(entry, note)
    return found, taken


def aliases(runs: Iterable[Run]) -> list[Aliases]:
    """Views of values in use, in the order in which they were recorded; found before the runs are computed."""
    return [found for run in runs if run.at.aliased and (found := Aliases(run)).needed]


def _in_use(run: Run, k: int) -> bool:
    """Whether others read a value of a run, or user code may hold it."""
    if run.values[k] is None:
        return False
    return type(run.used) is not set or k in run.used or sys.getrefcount(run.values[k]) > 2  # the run, this call
