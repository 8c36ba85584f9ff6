"""Decompose: composites in terms of leaves, among which the later passes choose groups and find common work."""

from __future__ import annotations

from dataclasses import dataclass

from daceml_train.graph.graph import Graph
from daceml_train.graph.leaves import leaves
from daceml_train.passes.base import Pass, without_dead_code


@dataclass(frozen=True)
class Decompose(Pass):
    """Replace every composite operator by what it lowers to, down to leaves; leaves carry the composite's origin.

        x -> [softmax] -> y     =>     x -> [max] [sub] [exp] [sum] [div] -> y

    The bytes stay: those of a composite are those of its leaves in one kernel, which is what fusion makes of them.
    """

    level = "intra_operator"
    keep: tuple[str, ...] = ()
    """Names of composites that stay as they are."""

    def run(self, graph: Graph) -> Graph:
        return without_dead_code(leaves(graph, self.keep).graph)
