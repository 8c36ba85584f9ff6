"""SliceFirst: slices move before the elementwise operators whose results they cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daceml_train.analysis.aliases import is_alias
from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.elementwise import Cast, Elementwise, Full, Iota
from daceml_train.ops.movement import Slice
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, same, simplify


@dataclass(frozen=True)
class SliceFirst(Rewrite):
    """Slice an elementwise operator's operands rather than its result, so it can fuse with the readers of the slices.

        x -> [f] -> t -> [slice] -> y      =>      x -> [slice] -> s -> [f] -> y

    The gates of a recurrent cell, computed as one matmul, are then summed, activated and combined in one kernel.
    All slices of t move together. Bytes: elements of t that no slice shows are neither computed nor stored; an operand
    that is broadcast along the sliced dimension is read once per slice.
    """

    level = "fusion"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Slice):
            return None
        f = uses.producers.get(node.inputs[0])
        if f is None or not isinstance(f.op, Elementwise | Cast):
            return None
        slices = [r for r in uses.readers[node.inputs[0]] if isinstance(r.op, Slice)]
        return {"f": f, "slices": slices} if slices[0] is node else None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        (t,) = match.bindings["f"].outputs
        yield t not in match.uses.visible, f"{t} is a result of the graph"
        others = [r for r in match.uses.readers[t] if not isinstance(r.op, Slice)]
        yield not others, f"{t} is also read by {others[0].op.label if others else ''} as a whole"
        yield self.disjoint(match), f"the slices of {t} overlap, so elements would be computed twice"

    def disjoint(self, match: Match) -> bool:
        """Whether the slices of an array provably do not overlap: along one dimension, one after the other."""
        (t,) = match.bindings["f"].outputs
        slices = list(dict.fromkeys(r.op for r in match.uses.readers[t]))
        if len({s.dim for s in slices if isinstance(s, Slice)}) != 1:
            return len(slices) == 1
        ranges = [(s.start, s.stop) for s in slices if isinstance(s, Slice)]
        if not all(isinstance(bound, int) for pair in ranges for bound in pair):
            return len(ranges) == 1
        ordered = sorted(ranges)
        return all(first[1] <= second[0] for first, second in itertools.pairwise(ordered))

    def traffic(self, match: Match) -> Dim:
        """The difference in bytes, counted on the operator and its slices alone."""
        apart = excerpt(match.uses, [match.bindings["f"], *match.bindings["slices"]])
        (alone,) = (m for m in self.matches(apart) if m.root.outputs == match.root.outputs)
        return simplify(traffic(self.sweep(apart, {id(alone.root): alone})).bytes - traffic(apart).bytes)

    def sweep(self, graph: Graph, chosen: Mapping[int, Match]) -> Graph:
        made: dict[tuple[str, Slice], Value] = {}  # slices that are equal are computed once, else they would double
        shared = [replace(m, bindings={**m.bindings, "made": made}) for m in chosen.values()]
        slices = ((m, node) for m in shared for node in m.bindings["slices"])
        return super().sweep(graph, {id(node): replace(m, root=node) for m, node in slices})

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        f, cut = match.bindings["f"], match.root.op
        assert isinstance(cut, Slice)
        whole, made = match.uses.graph.tensors[f.outputs[0]].shape, match.bindings["made"]
        operands = []
        for name in f.inputs:
            operand = values[name]
            dim = cut.dim - len(whole) + operand.tensor.rank
            if dim >= 0 and (same(whole[cut.dim], 1) or not same(operand.shape[dim], 1)):
                own = replace(cut, dim=dim)
                if (name, own) not in made:
                    made[name, own] = operand.apply(own)
                operand = made[name, own]
            operands.append(operand)
        if (f.outputs[0], cut) not in made:
            (made[f.outputs[0], cut],) = builder.emit(f.op, *operands)
        yield made[f.outputs[0], cut]

    def run(self, graph: Graph) -> Graph:
        """Move slices until they precede all elementwise operators; one sweep per operator of a chain."""
        while (moved := super().run(graph)) is not graph:
            graph = moved
        return graph


def excerpt(uses: Uses, nodes: Sequence[Node]) -> Graph:
    """`nodes` alone, with the aliases and constants that they read; values with other readers are results."""
    graph, own = Graph(), {id(n) for n in nodes}

    def need(name: str) -> None:
        producer = uses.producers.get(name)
        if name in graph.tensors or (producer is not None and id(producer) in own):
            return
        if producer is None or not (is_alias(producer.op) or isinstance(producer.op, Full | Iota)):
            graph.input(name, uses.graph.tensors[name])
            return
        for operand in producer.inputs:
            need(operand)
        graph.append(producer.op, producer.inputs, producer.outputs)

    for node in nodes:
        for name in node.inputs:
            need(name)
        graph.append(node.op, node.inputs, node.outputs)
        graph.outputs += [
            n for n in node.outputs if n in uses.visible or any(id(r) not in own for r in uses.readers[n])
        ]
    return graph
