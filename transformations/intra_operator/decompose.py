"""Decompose: composite operators become leaves, which later passes group into kernels and deduplicate."""

from __future__ import annotations

from dataclasses import dataclass

from daceml_train.graph.graph import Graph
from daceml_train.graph.leaves import leaves
from daceml_train.passes.base import Pass, without_dead_code


@dataclass(frozen=True)
class Decompose(Pass):
    """Replace every composite operator by what it lowers to, down to leaves; leaves carry the composite's origin.

        x -> [softmax] -> y     =>     x -> [max] [sub] [exp] [sum] [div] -> y

    The bytes do not change: a composite counts as its leaves in one kernel, and fusion builds that kernel.
    """

    level = "intra_operator"
    keep: tuple[str, ...] = ()
    """Names of composites that are not decomposed."""

    def run(self, graph: Graph) -> Graph:
        return without_dead_code(leaves(graph, self.keep).graph)
