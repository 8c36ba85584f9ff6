"""Moving slices in front of the elementwise operators whose results they cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.elementwise import Cast, Elementwise
from daceml_train.ops.movement import Slice
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, View
from daceml_train.tensor import Dim, same


@dataclass(frozen=True)
class SliceFirst(Rewrite):
    """Cut an elementwise operator's operands rather than its result, so that it joins the kernels that read the parts.

        x -> [f] -> t -> [slice] -> y      =>      x -> [slice] -> s -> [f] -> y

    The gates of a recurrent cell, computed as one product, are then summed, activated and combined in one kernel.
    """

    level = "fusion"

    def find(self, view: View, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Slice):
            return None
        f = view.producers.get(node.inputs[0])
        return {"f": f} if f is not None and isinstance(f.op, Elementwise | Cast) else None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        (t,) = match.parts["f"].outputs
        yield t not in match.view.visible, f"{t} is a result of the graph"
        others = [r for r in match.view.readers[t] if not isinstance(r.op, Slice)]
        yield not others, f"{t} is also read by {others[0].op.label if others else ''} as a whole"
        yield self.disjoint(match), f"the slices of {t} overlap, so that elements would be computed twice"

    def disjoint(self, match: Match) -> bool:
        """Whether the slices of one array are known not to overlap: along one dimension, one behind the other."""
        (t,) = match.parts["f"].outputs
        slices = list(dict.fromkeys(r.op for r in match.view.readers[t]))
        if len({s.dim for s in slices if isinstance(s, Slice)}) != 1:
            return len(slices) == 1
        ranges = [(s.start, s.stop) for s in slices if isinstance(s, Slice)]
        if not all(isinstance(bound, int) for pair in ranges for bound in pair):
            return len(ranges) == 1
        ordered = sorted(ranges)
        return all(first[1] <= second[0] for first, second in itertools.pairwise(ordered))

    def traffic(self, match: Match) -> Dim:
        """What the slices do not cover is no longer computed; counted where each slice stands alone."""
        return 0

    def emit(self, match: Match, builder: Graph, now: Mapping[str, Value]) -> Iterable[Value]:
        f, cut = match.parts["f"], match.root.op
        assert isinstance(cut, Slice)
        rank = match.view.graph.tensors[f.outputs[0]].rank
        operands = []
        for name in f.inputs:
            operand = now[name]
            dim = cut.dim - rank + operand.tensor.rank
            if dim >= 0 and not same(operand.shape[dim], 1):
                operand = operand.slice(dim, cut.start, cut.stop, cut.step)
            operands.append(operand)
        yield from builder.emit(f.op, *operands)

    def run(self, graph: Graph) -> Graph:
        """Move slices until they stand in front of everything elementwise; one sweep per operator of a chain."""
        while (moved := super().run(graph)) is not graph:
            graph = moved
        return graph
