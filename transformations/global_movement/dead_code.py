"""DeadCode: dead-code elimination (DCE)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from daceml_train.analysis.reachability import required
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.control import ControlFlow
from daceml_train.ops.kernel import Kernel
from daceml_train.passes.base import Pass, without_dead_code
from daceml_train.transformations.global_movement.region_dead_code import without_dead_regions


@dataclass(frozen=True)
class DeadCode(Pass):
    """Remove operators without a visible effect, unread results of kernels, and writes that change nothing.

        x -> [f] -> a, [g] -> b; only a is seen     =>     x -> [f] -> a
        kernel(x) -> a, b; only a is seen           =>     kernel(x) -> a
        write p <- p                                =>

    Unread results of branches and loops are removed, too, with the states and operands that only they need, and so are
    gradients that were not requested. The bytes never grow; they shrink by what dead operators read and wrote, as far
    as the traffic counted it.
    """

    level = "global_movement"

    def run(self, graph: Graph) -> Graph:
        other = graph.copy()
        other.writes = {target: name for target, name in graph.writes.items() if target != name}
        seen = set(other.results)
        kept: list[Node] = []
        for node in reversed(other.nodes):
            if seen.isdisjoint(node.outputs):
                continue
            if isinstance(node.op, Kernel):
                node = trimmed(node, node.op, seen)
            elif isinstance(node.op, ControlFlow):
                node = without_dead_regions(node, node.op, seen)
            seen.update(node.inputs)
            kept.append(node)
        other.nodes = kept[::-1]
        return without_dead_code(other)


def trimmed(node: Node, kernel: Kernel, seen: Collection[str]) -> Node:
    """The kernel without results outside `seen` and without the statements and arguments that only those need."""
    results = [i for i, name in enumerate(node.outputs) if name in seen]
    yields = tuple(kernel.yields[i] for i in results)
    statements, needed = required(kernel.statements, yields)
    updates = [(result, argument) for result, argument in kernel.updates if result in results]
    needed.update(kernel.arguments[argument] for _, argument in updates)
    arguments = [i for i, name in enumerate(kernel.arguments) if name in needed]
    if (len(yields), len(statements), len(arguments)) == tuple(
        map(len, (kernel.yields, kernel.statements, kernel.arguments))
    ):
        return node
    body = Kernel(
        tuple(kernel.arguments[i] for i in arguments),
        tuple(statements),
        yields,
        tuple((results.index(result), arguments.index(argument)) for result, argument in updates),
    )
    inputs, outputs = tuple(node.inputs[i] for i in arguments), tuple(node.outputs[i] for i in results)
    return dataclasses.replace(node, op=body, inputs=inputs, outputs=outputs)
