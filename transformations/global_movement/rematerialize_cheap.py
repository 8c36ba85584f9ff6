"""RematerializeCheap: rematerialization that takes little time lowers a step's peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from daceml_train.analysis.device_model import CPU_BALANCE, DeviceModel
from daceml_train.analysis.memory import memory
from daceml_train.analysis.reachability import ancestors
from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Pass
from daceml_train.transformations.fusion.siblings import FuseSiblings
from daceml_train.transformations.global_movement.dead_code import DeadCode
from daceml_train.transformations.global_movement.live_ranges import LiveRanges
from daceml_train.transformations.global_movement.remat_costs import FOLLOWING, finished, remat_costs_of
from daceml_train.transformations.global_movement.rematerialized_graph import rebuilt

SPARE = 0.25
"""The share of a GPU's memory that a step may take before arrays are rematerialized: until then, only time counts."""
NEAR = 8
"""The largest distance between an operator that rematerializes an array and a kernel that may absorb it."""


@dataclass(frozen=True)
class RematerializeCheap(Pass):
    """Rematerialize arrays for their late readers as long as that takes almost no time.

        x -> [f] -> a -> [g] -> y, ..., a, dy -> [h] -> da
            =>     x -> [f] -> a -> [g] -> y, ..., x -> [f] -> a', a', dy -> [h] -> da

    Of the arrays that are live at the peak, those with the lowest cost per byte go first: activations and
    normalizations, whose operands are kept anyway. `time` bounds the total cost as a share of the step's estimated
    time: bytes moved, and operations at `intensity` per byte (None: what the device does while it moves a byte). An
    array that a nearby kernel reads is rematerialized within that kernel. Arrays below `min_bytes` are kept. Where the
    peak is at most `spare` bytes (None: a quarter of a GPU's memory; nothing on a CPU), the graph is unchanged.
    Numbers do not change. `Rematerialize`, in contrast, meets a given budget of bytes and may rematerialize any array.

    The peak is measured after the passes that follow in the pipeline; a step whose peak would not shrink is unchanged.
    """

    level = "global_movement"
    time: float = 0.1
    min_bytes: int = 1 << 20
    intensity: float | None = None
    spare: int | None = None

    def on(self, model: DeviceModel) -> Pass:
        intensity = model.balance if self.intensity is None else self.intensity
        spare = round(SPARE * model.memory) if self.spare is None else self.spare
        return replace(self, intensity=intensity, spare=spare)

    def run(self, graph: Graph) -> Graph:
        return self.run_before(graph, FOLLOWING)

    def run_before(self, graph: Graph, rest: Sequence[Pass]) -> Graph:
        if self.time <= 0 or graph.kept or not graph.outputs:
            return graph  # a forward graph whose backward pass is another graph has nothing to rematerialize
        sizes = [graph.tensors[name].bytes for node in graph.nodes for name in node.outputs]
        known = [size for size in sizes if isinstance(size, int)]
        spare = self.spare or 0
        if len(known) == len(sizes) and (max(known, default=0) < self.min_bytes or sum(known) <= spare):
            return graph
        runs = remat_costs_of(graph, self.intensity or CPU_BALANCE, rest)
        if runs.peak <= spare:
            return graph
        spans = LiveRanges(runs)
        spans.lower(self.time * sum(runs.costs), self.min_bytes)
        if not spans.again:
            return graph
        result = DeadCode().run(rebuilt(runs.graph, runs.items, spans.choice))
        again = {name for node in result.nodes for name in node.outputs}.difference(graph.tensors)
        result = FuseSiblings(window=NEAR).joined(result, again, ancestors(result.nodes, result.outputs[:1]))
        return result if memory(finished(result, rest)).peak < runs.peak else graph
