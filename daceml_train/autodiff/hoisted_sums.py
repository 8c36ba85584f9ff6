"""Gradients that are sums over the steps of a loop, computed once after it: one matmul of the rows of all steps.

A loop's body reads a parameter in each step, so the parameter's gradient is a sum over steps. Where a step's summand is
a matmul, the sum is the same matmul of all steps' rows, contracted over steps, too: `sum_t a_t.T @ g_t` is
`A.T @ G` of the stacks of a and g. Most of what is stacked exists already: slices that the loop takes, states that
the forward loop keeps. The loop carries no gradient then, which it would read and write in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.movement import Permute, View
from daceml_train.ops.operator import Value
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import simplify

Stacks = Mapping[str, Value]
"""Values of a step, by name, as arrays with one slice per step."""


class _Total(Protocol):
    """Emits the sum over steps of a value."""

    def __call__(self, stacks: Stacks) -> Value: ...


@dataclass(frozen=True)
class HoistedSum:
    """The sum over steps of a value of a step: `total` computes it from the stacks of the values in `reads`."""

    reads: frozenset[str]
    total: Callable[[Stacks], Value]


def hoisted_sum(step: Graph, name: str, existing: Collection[str], same: Collection[str]) -> HoistedSum | None:
    """The sum over steps of the value `name` of `step` as operators after the loop.

    There are stacks of the values in `existing` already; the values in `same` are equal in all steps. None where a
    summand is no matmul or sum over rows, or where more would be stacked per step than the sum has elements.
    """
    producers = {output: node for node in step.nodes for output in node.outputs}
    reads = set[str]()
    total = _total(step, producers, name, reads)
    if total is None or not reads.isdisjoint(same):
        return None
    stacked = sum((step.tensors[read].size for read in sorted(reads - set(existing))), start=0)
    more = simplify(stacked - step.tensors[name].size)
    return None if isinstance(more, int) and more > 0 else HoistedSum(frozenset(reads), total)


def _total(step: Graph, producers: Mapping[str, Node], name: str, reads: set[str]) -> _Total | None:
    node = producers.get(name)
    if node is None:
        return None
    op = node.op
    if isinstance(op, Matmul) and op.chunks == 1 and step.tensors[name].rank == 2:
        return _matmul(step, producers, node, reads)
    if isinstance(op, Reduce) and op.kind == "sum" and not op.keepdim:
        source, dims = node.inputs[0], (0, *(d + 1 for d in op.dims))
        reads.add(source)
        return lambda stacks: stacks[source].sum(dims)
    if isinstance(op, Permute | View):
        inner, shape = _total(step, producers, node.inputs[0], reads), step.tensors[name].shape
        if inner is None:
            return None
        if isinstance(op, Permute):
            return lambda stacks: inner(stacks).permute(op.dims)
        return lambda stacks: inner(stacks).view(shape)
    if isinstance(op, Elementwise) and op.kind == "add":
        if any(step.tensors[n].shape != step.tensors[name].shape for n in node.inputs):
            return None
        parts = [_total(step, producers, n, reads) for n in node.inputs]
        first, second = parts
        if first is None or second is None:
            return None
        return lambda stacks: first(stacks) + second(stacks)
    return None


def _matmul(step: Graph, producers: Mapping[str, Node], node: Node, reads: set[str]) -> _Total:
    """`sum_t a_t @ b_t` as one matmul: what is contracted are the columns of all a, and the rows of all b."""
    (a, a_turned), (b, b_turned) = (_source(producers, name) for name in node.inputs)
    reads |= {a, b}

    def total(stacks: Stacks) -> Value:
        left = stacks[a] if a_turned else stacks[a].permute((0, 2, 1))
        right = stacks[b].permute((0, 2, 1)) if b_turned else stacks[b]
        return _rows(left).permute((1, 0)) @ _rows(right)

    return total


def _source(producers: Mapping[str, Node], name: str) -> tuple[str, bool]:
    """The matrix of which a value is the transpose, and whether it is one: the value itself otherwise."""
    node = producers.get(name)
    if node is not None and isinstance(node.op, Permute) and node.op.dims == (1, 0):
        return node.inputs[0], True
    return name, False


def _rows(stack: Value) -> Value:
    """The rows of all steps."""
    steps, rows, columns = stack.shape
    return stack.view((simplify(steps * rows), columns))
