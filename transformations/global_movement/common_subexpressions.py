"""CommonSubexpressions: an array that exists already is not made again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.control import draws
from daceml_train.ops.elementwise import Elementwise
from daceml_train.passes.base import Pass, without_dead_code

COMMUTATIVE = frozenset({"add", "mul", "eq", "ne", "logical_and", "logical_or"})
"""Elementwise operators that give the same bits with their operands exchanged (`maximum` of 0.0 and -0.0 does not)."""


@dataclass(frozen=True)
class CommonSubexpressions(Pass):
    """Use the results of an operator in place of those of a later one that is equal to it and reads the same.

        x -> [f] -> a, x -> [f] -> b     =>     x -> [f] -> a = b

    Sums and products of the same two operands are equal in either order. Operators that draw from PyTorch's generator
    are never merged; `uniform` is a function of its seed and stream, so it is. One sweep: the operands of an operator
    are merged before it is looked up. The bytes never grow; they shrink by those of the later operator.
    """

    level = "global_movement"

    def run(self, graph: Graph) -> Graph:
        other = graph.empty()
        now = {name: name for name in graph.inputs}
        made: dict[Hashable, tuple[str, ...]] = {}
        for node in graph.nodes:
            inputs = tuple(now[i] for i in node.inputs)
            key = identity(graph, node, inputs)
            outputs = None if key is None else made.get(key)
            if outputs is None:
                outputs = tuple(v.name for v in other.append(node.op, inputs, node.outputs, node.origin))
                if key is not None:
                    made[key] = outputs
            now.update(zip(node.outputs, outputs, strict=True))
        return without_dead_code(graph.finish(other, now))


def identity(graph: Graph, node: Node, inputs: tuple[str, ...]) -> Hashable | None:
    """What equal operators share: the operator, what it reads and what it makes; None where it must not be merged."""
    if draws(node.op):
        return None
    if isinstance(node.op, Elementwise) and node.op.kind in COMMUTATIVE:
        inputs = tuple(sorted(inputs))
    results = tuple(str(graph.tensors[name]) for name in node.outputs)
    key = (node.op, repr(node.op), inputs, results)  # equal operators may differ in the sign of a zero: repr tells
    try:
        hash(key)
    except TypeError:  # an attribute that cannot be hashed
        return None
    return key
