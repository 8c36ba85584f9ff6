"""RematerializeCheap: a little of a step's time lowers its peak of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.analysis.memory import memory
from daceml_train.analysis.reachability import ancestors
from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Pass
from daceml_train.transformations.fusion.siblings import FuseSiblings
from daceml_train.transformations.global_movement.dead_code import DeadCode
from daceml_train.transformations.global_movement.live_ranges import LiveRanges
from daceml_train.transformations.global_movement.remat_costs import FOLLOWING, finished, remat_costs_of
from daceml_train.transformations.global_movement.rematerialized_graph import rebuilt

NEAR = 8
"""How far from what makes an array again a kernel may stand that reads the same array, so that one does both."""


@dataclass(frozen=True)
class RematerializeCheap(Pass):
    """Make arrays again for their late readers as long as that takes next to no time.

        x -> [f] -> a -> [g] -> y, ..., a, dy -> [h] -> da
            =>     x -> [f] -> a -> [g] -> y, ..., x -> [f] -> a', a', dy -> [h] -> da

    Of the arrays that lie in memory at the peak, the one that costs the least per byte goes first: activations and
    normalizations, whose operands are kept anyway. `time` is the share of the step's estimated time that all of them
    may take: bytes moved, and operations at `intensity` per byte. What a kernel close by reads anyway is made again
    within that kernel. Arrays below `min_bytes` are kept. Numbers do not change, see `Rematerialize`, which chooses for
    a given budget of bytes and may make anything again.

    The peak is that after the passes that follow in the pipeline; a step whose peak would not shrink stays as it is.
    """

    level = "global_movement"
    time: float = 0.1
    min_bytes: int = 1 << 20
    intensity: float = 16.0

    def run(self, graph: Graph) -> Graph:
        return self.run_before(graph, FOLLOWING)

    def run_before(self, graph: Graph, rest: Sequence[Pass]) -> Graph:
        if self.time <= 0 or graph.kept or not graph.outputs:
            return graph  # a forward graph whose backward pass is another graph has nothing to make again
        sizes = (graph.tensors[name].bytes for node in graph.nodes for name in node.outputs)
        if all(isinstance(size, int) and size < self.min_bytes for size in sizes):
            return graph
        runs = remat_costs_of(graph, self.intensity, rest)
        spans = LiveRanges(runs)
        spans.lower(self.time * sum(runs.costs), self.min_bytes)
        if not spans.again:
            return graph
        made = DeadCode().run(rebuilt(runs.graph, runs.items, spans.choice))
        again = {name for node in made.nodes for name in node.outputs}.difference(graph.tensors)
        made = FuseSiblings(window=NEAR).joined(made, again, ancestors(made.nodes, made.outputs[:1]))
        return made if memory(finished(made, rest)).peak < runs.peak else graph
