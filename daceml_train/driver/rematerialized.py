"""Arrays that a step rematerializes rather than keeps: in both halves of a partition, or by `Rematerialize` within
one program.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from daceml_train.autodiff.partition import FREE
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.kernel import described
from daceml_train.storage.storable import storable
from daceml_train.tensor import Tensor
from daceml_train.transformations.global_movement.common_subexpressions import identity


@storable
@dataclass(frozen=True)
class Rematerialized:
    """A rematerialized array, its producer, and the user's module."""

    tensor: Tensor
    operators: str
    module: str


def rematerialized_across(forward: Graph, backward: Graph) -> list[Rematerialized]:
    """Arrays of a forward graph that the backward graph recomputes; those that cost nothing are left out."""
    produced = {name for node in forward.nodes for name in node.outputs}
    return [
        _rematerialized(backward, n)
        for n in backward.nodes
        if not produced.isdisjoint(n.outputs) and not isinstance(n.op, FREE)
    ]


def rematerialized_within(graph: Graph) -> list[Rematerialized]:
    """Arrays that equal operators compute a second time from equal operands."""
    return [_rematerialized(graph, node) for node in _repeated(graph)]


def _repeated(graph: Graph) -> Iterator[Node]:
    first: dict[str, str] = {}
    seen: dict[Hashable, Node] = {}
    for node in graph.nodes:
        key = identity(graph, node, tuple(first.get(name, name) for name in node.inputs))
        other = node if key is None else seen.setdefault(key, node)
        if other is not node:
            first.update(zip(node.outputs, (first.get(name, name) for name in other.outputs), strict=True))
            if not isinstance(node.op, FREE):
                yield node


def _rematerialized(graph: Graph, node: Node) -> Rematerialized:
    return Rematerialized(graph.tensors[node.outputs[0]], described(node.op), node.origin.module)
