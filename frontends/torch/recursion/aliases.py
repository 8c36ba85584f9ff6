"""Aliases: recorded values that PyTorch makes views of others, which share a change in place with them.

Levels give each value memory of its own. That differs where user code looks at a value, and then changes it: so what is
a view of a value that is still in use is taken from that value again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from daceml_train.frontends.torch.recursion.effects import memory
from daceml_train.frontends.torch.recursion.lazy import Lazy, known, set_value
from daceml_train.frontends.torch.recursion.runs import Given, Reference, Run, Shared, Step, decoded


def is_alias(results: Iterable[torch.Tensor], operands: Iterable[torch.Tensor]) -> bool:
    """Whether a result has the memory of an operand."""
    with torch._C.DisableTorchFunction():
        return not set(map(memory, operands)).isdisjoint(map(memory, results))


@dataclass
class Alias:
    """The results of one operator of a run that are views; the run lets go of its values and inputs."""

    step: Step
    values: Any
    inputs: Any
    number: int
    """Of the first result among the values."""
    taken: int
    """How many inputs the operators before have taken."""

    @property
    def bases(self) -> Iterator[tuple[bool, int]]:
        """The operands: whether each is a value of the run, and its number."""
        found: list[tuple[bool, int]] = []
        taken = self.taken

        def note(entry: Any) -> None:
            nonlocal taken
            if type(entry) is Reference:
                found.append((entry.local, entry.number))
            elif type(entry) is Given:
                found.append((False, taken))
                taken += 1

        assert self.step.operator is not None
        for entry in self.step.operator[2:]:
            decoded(entry, note)
        return iter(found)

    def restore(self) -> None:
        """Have the results be views of the operands, which are known now."""
        assert self.step.operator is not None
        function, grad, *entries = self.step.operator
        operands = [(self.values if local else self.inputs)[k] for local, k in self.bases]
        given = iter([torch.tensor(a) if type(a) is list else known(a) for a in operands])
        args = [decoded(e, lambda entry: entry.tensor if type(entry) is Shared else next(given)) for e in entries]
        kwargs = args.pop() if self.step.keywords else {}
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            result = function(*args, **kwargs)
        for k, tensor in enumerate([result] if self.step.kind is None else result, self.number):
            if type(value := self.values[k]) is Lazy and value.value is None:
                set_value(value, tensor)


def aliases(runs: Iterable[Run]) -> list[Alias]:
    """Views of values in use, in the order in which they were recorded; found before the runs are computed."""
    return [alias for run in runs if run.at.aliased for alias in _of_run(run)]


def _of_run(run: Run) -> Iterator[Alias]:
    number = taken = 0
    for step in run.at.operators():
        alias = Alias(step, run.values, run.inputs, number, taken)
        bases = list(alias.bases)
        number += len(step.made)
        taken = max([taken, *(k + 1 for local, k in bases if not local)])
        needed = [k for local, k in bases if local]
        results = range(alias.number, number)
        if step.alias and any(_in_use(run, k) for k in results) and all(_in_use(run, k) for k in needed):
            yield alias


def _in_use(run: Run, k: int) -> bool:
    """Whether others read a value of a run, or user code may hold it."""
    if run.values[k] is None:
        return False
    return type(run.used) is not set or k in run.used or sys.getrefcount(run.values[k]) > 2  # the run, this call
