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
from daceml_train.ops.movement import Slice, View
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, same, same_shape, simplify


@dataclass(frozen=True)
class SliceFirst(Rewrite):
    """Slice an elementwise operator's operands rather than its result, so it can fuse with the readers of the slices.

        x -> [f] -> t -> [slice] -> y      =>      x -> [slice] -> s -> [f] -> y

    The gates of a recurrent cell, computed as one matmul, are then summed, activated and combined in one kernel. A view
    between f and the slice moves after f, if it only adds or removes dimensions of size 1.
    All slices of t move together. Bytes: elements of t that no slice shows are neither computed nor stored; an operand
    that is broadcast along the sliced dimension is read once per slice.
    """

    level = "fusion"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Slice):
            return None
        t = node.inputs[0]
        if (view := uses.producers.get(t)) is not None and isinstance(view.op, View):
            t = view.inputs[0]
        f = uses.producers.get(t)
        if f is None or not isinstance(f.op, Elementwise | Cast):
            return None
        views, cuts, whole = _readers(uses, t)
        first = next(iter(cuts.values()), None)
        return {"f": f, "views": views, "cuts": cuts, "whole": whole} if first and first.node is node else None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        (t,) = match.bindings["f"].outputs
        shown = [t, *(view.outputs[0] for view in match.bindings["views"])]
        yield match.uses.visible.isdisjoint(shown), f"{t} is a result of the graph"
        others = match.bindings["whole"]
        yield not others, f"{t} is also read by {others[0].op.label if others else ''} as a whole"
        yield self.disjoint(match), f"the slices of {t} overlap, so elements would be computed twice"

    def disjoint(self, match: Match) -> bool:
        """Whether the slices of an array provably do not overlap: along one dimension, one after the other."""
        slices = list(dict.fromkeys(cut.op for cut in match.bindings["cuts"].values()))
        if len({s.dim for s in slices}) != 1:
            return len(slices) == 1
        ranges = [(s.start, s.stop) for s in slices]
        if not all(isinstance(bound, int) for pair in ranges for bound in pair):
            return len(ranges) == 1
        ordered = sorted(ranges)
        return all(first[1] <= second[0] for first, second in itertools.pairwise(ordered))

    def traffic(self, match: Match) -> Dim:
        """The difference in bytes, counted on the operator and its slices alone."""
        slices = [cut.node for cut in match.bindings["cuts"].values()]
        apart = excerpt(match.uses, [match.bindings["f"], *match.bindings["views"], *slices])
        (alone,) = (m for m in self.matches(apart) if m.root.outputs == match.root.outputs)
        return simplify(traffic(self.sweep(apart, {id(alone.root): alone})).bytes - traffic(apart).bytes)

    def sweep(self, graph: Graph, chosen: Mapping[int, Match]) -> Graph:
        slices = ((m, cut.node) for m in chosen.values() for cut in m.bindings["cuts"].values())
        return super().sweep(graph, {id(node): replace(m, root=node) for m, node in slices})

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        f, cut = match.bindings["f"], match.bindings["cuts"][match.root.outputs[0]].op
        whole = match.uses.graph.tensors[f.outputs[0]].shape
        operands = []
        for name in f.inputs:
            operand = values[name]
            dim = cut.dim - len(whole) + operand.tensor.rank
            if dim >= 0 and (same(whole[cut.dim], 1) or not same(operand.shape[dim], 1)):
                operand = operand.slice(dim, cut.start, cut.stop, cut.step)
            operands.append(operand)
        (y,) = builder.emit(f.op, *operands)
        shape = match.uses.graph.tensors[match.root.outputs[0]].shape
        yield y if same_shape(y.shape, shape) else y.view(shape)

    def run(self, graph: Graph) -> Graph:
        """Move slices until they precede all elementwise operators; one sweep per operator of a chain."""
        while (moved := super().run(graph)) is not graph:
            graph = moved
        return graph


@dataclass(frozen=True)
class Cut:
    """A slice of an array, or of a view of it, and what it cuts from the array itself."""

    node: Node
    op: Slice


def _readers(uses: Uses, t: str) -> tuple[list[Node], dict[str, Cut], list[Node]]:
    """The readers of an array: views that only change dimensions of size 1, slices by their results, and all others."""
    views: list[Node] = []
    cuts: dict[str, Cut] = {}
    others: list[Node] = []
    for reader in dict.fromkeys(uses.readers[t]):
        if isinstance(reader.op, View) and (dims := _dims(uses, t, reader.outputs[0])) is not None:
            views.append(reader)
            for node in dict.fromkeys(uses.readers[reader.outputs[0]]):
                if isinstance(node.op, Slice) and node.op.dim in dims:
                    cuts[node.outputs[0]] = Cut(node, replace(node.op, dim=dims[node.op.dim]))
                else:
                    others.append(node)
        elif isinstance(reader.op, Slice):
            cuts[reader.outputs[0]] = Cut(reader, reader.op)
        else:
            others.append(reader)
    return views, cuts, others


def _dims(uses: Uses, x: str, view: str) -> dict[int, int] | None:
    """Dimension of a view -> that of `x`, for those larger than 1; None if the view changes others than those of 1."""
    before, after = uses.graph.tensors[x], uses.graph.tensors[view]
    own, shown = ([d for d, size in enumerate(t.shape) if not same(size, 1)] for t in (before, after))
    sizes = tuple(before.shape[d] for d in own), tuple(after.shape[d] for d in shown)
    if before.order is not None or after.order is not None or not same_shape(*sizes):
        return None
    return dict(zip(shown, own, strict=True))


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
