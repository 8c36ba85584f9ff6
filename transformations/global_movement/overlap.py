"""Overlap: communication between ranks while the backward pass computes."""

from __future__ import annotations

from dataclasses import dataclass

from daceml_train.graph.graph import Graph
from daceml_train.ops.collective import STARTED, Await, Collective, Start
from daceml_train.passes.base import Pass
from daceml_train.transformations.global_movement.liveness import liveness_of, reordered


@dataclass(frozen=True)
class Overlap(Pass):
    """Start collectives as soon as their operands exist; wait for them after all that does not need their results.

        x -> [all_reduce] -> y -> [g],  [h]     =>     x -> [start] -> s,  [h],  s -> [await] -> y -> [g]

    A graph with a single collective stays as it is. The bytes that are moved and sent do not change; gradients that are
    on their way to other ranks are live for longer.
    """

    level = "global_movement"

    def run(self, graph: Graph) -> Graph:
        if sum(isinstance(node.op, Collective) and node.op.name in STARTED for node in graph.nodes) < 2:
            return graph
        split = _split(graph)
        items = liveness_of(split)
        waits = [isinstance(node.op, Await) for node in items.nodes]
        for item, before in enumerate(items.before):
            waits[item] = waits[item] or any(waits[other] for other in before if other < item)
        order = sorted(range(len(items.nodes)), key=lambda item: (waits[item], item))
        return reordered(split, (items.nodes[item] for item in order))


def _split(graph: Graph) -> Graph:
    """The graph with a start and an await in place of each collective."""
    other = graph.empty()
    for node in graph.nodes:
        if isinstance(node.op, Collective) and node.op.name in STARTED:
            op = Start(node.op.ranks, node.op.position, node.op.name)
            (started,) = other.append(op, node.inputs, origin=node.origin)
            other.append(Await(node.op.position), (started.name,), node.outputs, node.origin)
        else:
            other.append(node.op, node.inputs, node.outputs, node.origin)
    return graph.finish(other, {})
