"""Reachability: which steps of a program some of its values need, and which values depend on which.

A graph's nodes and a body's statements both have `inputs` and `outputs` and stand in topological order, so each walk is
one sweep, and written once for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Step(Protocol):
    """What reads some values and produces others: a `Node` or a `Statement`."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values produced."""


S = TypeVar("S", bound=Step)


def required(steps: Sequence[S], names: Iterable[str | None]) -> tuple[list[S], set[str]]:
    """The steps that values `names` need, in order, and all values read: `names` and those steps' operands."""
    read = {name for name in names if name is not None}
    kept: list[S] = []
    for step in reversed(steps):
        if not read.isdisjoint(step.outputs):
            read.update(step.inputs)
            kept.append(step)
    return kept[::-1], read


def ancestors(steps: Sequence[Step], names: Iterable[str]) -> set[str]:
    """The values from which `names` are computed, `names` included, and what is produced along with any of them."""
    kept, found = required(steps, names)
    return found.union(*(step.outputs for step in kept))


def descendants(steps: Iterable[Step], names: Iterable[str]) -> set[str]:
    """The values that are computed from any of `names`, these included."""
    found = set(names)
    for step in steps:
        if not found.isdisjoint(step.inputs):
            found.update(step.outputs)
    return found
