"""Computing a cheap value again instead of reading it."""

from __future__ import annotations

from dataclasses import dataclass

from daceml_train.graph.graph import Graph
from daceml_train.ops.random import Uniform
from daceml_train.passes.base import Pass
from daceml_train.transformations.fusion.grouping import CONSTANT, POINTWISE, Group, Grouping, Item
from daceml_train.transformations.fusion.siblings import magnitude


@dataclass(frozen=True)
class DuplicateCheapProducers(Pass):
    """Compute a value in each kernel that needs it, where that reads nothing the kernel does not read anyway.

        x -> [f] -> t,  (x, t) -> [g] -> y      =>      x -> [f; g] -> y

    Random numbers and their masks depend on a seed alone, so they are made again rather than stored. `flops` is the
    most operations per element that a value may cost.
    """

    level = "fusion"
    flops: int = 64
    limit: int = 96

    def run(self, graph: Graph) -> Graph:
        grouping = Grouping(graph)
        for group in grouping.groups():
            while group.fusible and (name := self.candidate(grouping, group)) is not None:
                grouping.copy_into(group, name)
        return grouping.build()

    def candidate(self, grouping: Grouping, group: Group) -> str | None:
        """An array that `group` reads and should compute."""
        if len(group.items) >= self.limit:
            return None
        reads = grouping.reads(group)
        bases = {grouping.source(name)[0] for name in reads}
        for name in reads:
            base, _ = grouping.source(name)
            maker = grouping.producer.get(base)
            if maker is None or maker.group is None or maker.group is group:
                continue
            if self.cheap(grouping, maker, bases) and grouping.refusal_of_copy(group, name) is None:
                return name
        return None

    def cheap(self, grouping: Grouping, maker: Item, bases: set[str]) -> bool:
        """Whether `maker` costs little and reads only what is free, tiny, or in `bases`."""
        if not isinstance(maker.op, (*POINTWISE, Uniform)):
            return False
        (tensor,) = maker.op.infer(*(grouping.tensors[i] for i in maker.inputs))
        size = magnitude(tensor.size)
        if size < 2 or magnitude(maker.op.flops(*(grouping.tensors[i] for i in maker.inputs))) > self.flops * size:
            return False
        return all(
            grouping.source(name)[0] in bases
            or self.free(grouping, name)
            or magnitude(grouping.tensors[grouping.source(name)[0]].bytes) * 8 <= magnitude(tensor.bytes)
            for name in maker.inputs
        )

    def free(self, grouping: Grouping, name: str) -> bool:
        """Whether an array is computed from constants and 0-d values alone."""
        base, _ = grouping.source(name)
        maker = grouping.producer.get(base)
        if maker is None:
            return grouping.tensors[base].rank == 0
        if isinstance(maker.op, CONSTANT):
            return True
        return isinstance(maker.op, (*POINTWISE, Uniform)) and all(self.free(grouping, i) for i in maker.inputs)
