"""Fusion along the arrays between operators: a producer and its consumer become one kernel.

Three passes share the sweep and differ in what they join, so the effect of each is visible in a pipeline.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Pass
from daceml_train.transformations.fusion.grouping import Group, Grouping
from daceml_train.transformations.fusion.matches import FusionMatch
from daceml_train.transformations.fusion.repetition import FLOPS, repeated


@dataclass(frozen=True)
class Fusion(Pass):
    """Base of the passes that join a producer with a consumer; `limit` bounds the operators of a kernel."""

    level = "fusion"
    limit: int = 96

    @abstractmethod
    def joins(self, producer: Group, consumer: Group) -> bool:
        """Whether this pass handles such a pair."""

    def pays(self, grouping: Grouping, producer: Group, consumer: Group) -> bool:
        """Whether a pair that can be joined should be."""
        return True

    def matches(self, graph: Graph) -> list[FusionMatch]:
        """Every pair that this pass handles, refused ones included."""
        grouping = Grouping(graph)
        return [
            FusionMatch(self, grouping, producer, consumer, self.limit)
            for consumer in grouping.groups()
            for producer in grouping.predecessors(consumer)
            if producer.fusible and consumer.fusible and self.joins(producer, consumer)
        ]

    def run(self, graph: Graph) -> Graph:
        grouping = Grouping(graph)
        for group in grouping.groups():
            if group.fusible:
                self.absorb(grouping, group)
        return grouping.build()

    def absorb(self, grouping: Grouping, consumer: Group) -> None:
        """Join `consumer` with its producers, and theirs, as far as that is legal."""
        refused: set[int] = set()
        while True:
            producers = sorted(grouping.predecessors(consumer), key=lambda g: -g.position)
            for producer in producers:
                if id(producer) in refused or not producer.fusible or not self.joins(producer, consumer):
                    continue
                if self.pays(grouping, producer, consumer) and not grouping.refusal(producer, consumer, self.limit):
                    consumer = grouping.join(producer, consumer)
                    refused.clear()
                    break
                refused.add(id(producer))
            else:
                return


@dataclass(frozen=True)
class _FuseUnrepeated(Fusion):
    """Base of the passes that join producers whose values a kernel may have to compute more often than once."""

    repeated: int = FLOPS

    def pays(self, grouping: Grouping, producer: Group, consumer: Group) -> bool:
        return not repeated(grouping, producer, consumer, self.repeated)


@dataclass(frozen=True)
class FuseElementwise(_FuseUnrepeated):
    """Compute a chain of elementwise operators in one kernel; intermediate values never reach memory.

    x -> [f] -> t -> [g] -> y      =>      x -> [f; g] -> y

    Not if t has fewer dimensions than y, so that the kernel would recompute f for 8 elements of y or more, and f costs
    more than `repeated` operations per element: such as the sines of positions, for all heads. Where loops over the
    dimensions of t compute f once, it does not count.
    """

    def joins(self, producer: Group, consumer: Group) -> bool:
        return not producer.reduces and not consumer.reduces


@dataclass(frozen=True)
class FuseIntoReduction(_FuseUnrepeated):
    """Compute a reduction's operand in the kernel of the reduction.

    x -> [f] -> t -> [sum] -> y      =>      x -> [f; sum] -> y

    `repeated` is that of `fuse_elementwise`.
    """

    def joins(self, producer: Group, consumer: Group) -> bool:
        return not producer.reduces and consumer.reduces


@dataclass(frozen=True)
class FuseEpilogue(Fusion):
    """Compute what follows a reduction, elementwise or further reductions, in the reduction's kernel.

    x -> [sum] -> s -> [g] -> y      =>      x -> [sum; g] -> y
    """

    def joins(self, producer: Group, consumer: Group) -> bool:
        return producer.reduces
