"""CommonSubexpressions: common-subexpression elimination (CSE)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.collective import Collective
from daceml_train.ops.control import draws
from daceml_train.ops.elementwise import Elementwise
from daceml_train.passes.base import Pass, without_dead_code

COMMUTATIVE = frozenset({"add", "mul", "eq", "ne", "logical_and", "logical_or"})
"""Bitwise-commutative elementwise operators (`maximum` of 0.0 and -0.0 is not)."""


@dataclass(frozen=True)
class CommonSubexpressions(Pass):
    """Replace the results of an operator by those of an earlier, equal operator on the same operands.

        x -> [f] -> a, x -> [f] -> b     =>     x -> [f] -> a = b

    Sums and products of the same two numbers are equal in either order. Operators that draw from PyTorch's generator
    are never merged; `uniform` is a function of its seed and stream, so it may be. The pass is one sweep, in which an
    operator's operands are merged before the operator is looked up. The bytes never grow; they shrink by those of the
    later operator.
    """

    level = "global_movement"

    def run(self, graph: Graph) -> Graph:
        other = graph.empty()
        now = {name: name for name in graph.inputs}
        results: dict[Hashable, tuple[str, ...]] = {}
        for node in graph.nodes:
            inputs = tuple(now[i] for i in node.inputs)
            key = identity(graph, node, inputs)
            outputs = None if key is None else results.get(key)
            if outputs is None:
                outputs = tuple(v.name for v in other.append(node.op, inputs, node.outputs, node.origin))
                if key is not None:
                    results[key] = outputs
            now.update(zip(node.outputs, outputs, strict=True))
        return without_dead_code(graph.finish(other, now))


def identity(graph: Graph, node: Node, inputs: tuple[str, ...]) -> Hashable | None:
    """The key that equal nodes share: operator, operands and result types; None if the node must not be merged."""
    if draws(node.op) or isinstance(node.op, Collective):  # other ranks wait for each collective
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
