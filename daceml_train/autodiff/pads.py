"""Pads: cotangents of slices, each zero outside its slice, that together form one concatenation."""

from __future__ import annotations

from collections.abc import Sequence

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.movement import Concat, Pad
from daceml_train.ops.operator import Value
from daceml_train.tensor import Dim, same, simplify


class Pads:
    """The pads of a graph under construction. A sequence that is read step by step has one cotangent of its full size
    per step: adding them up would take time quadratic in its length.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.seen = len(graph.nodes)
        self.pads: dict[str, Node] = {}

    def joined(self, parts: Sequence[Value]) -> Sequence[Value]:
        """Terms of a sum, where padded terms that together fill one dimension are merged."""
        if len(parts) < 2:
            return parts
        for node in self.graph.nodes[self.seen :]:
            if isinstance(node.op, Pad):
                self.pads[node.outputs[0]] = node
        self.seen = len(self.graph.nodes)
        by_dim: dict[int, list[tuple[Value, Dim, Dim]]] = {}
        for part in parts:
            if (cut := self.cut(part)) is not None:
                by_dim.setdefault(cut[0], []).append((part, *cut[1:]))
        for dim, pieces in by_dim.items():
            ordered = in_order(pieces, parts[0].shape[dim])
            if ordered is not None:
                whole = [self.graph.value(self.pads[part.name].inputs[0]) for part in ordered]
                names = {part.name for part in ordered}
                return (*self.graph.emit(Concat(dim), *whole), *(p for p in parts if p.name not in names))
        return parts

    def cut(self, part: Value) -> tuple[int, Dim, Dim] | None:
        """The dimension along which a value is padded with zeros, and the range that is not padding."""
        node = self.pads.get(part.name)
        if node is None or not isinstance(node.op, Pad) or node.op.value != 0:
            return None
        padded = [d for d, (low, high) in enumerate(node.op.pads) if not (same(low, 0) and same(high, 0))]
        if len(padded) != 1:
            return None
        (dim,) = padded
        low, high = node.op.pads[dim]
        return dim, low, simplify(part.shape[dim] - high)


def in_order(pieces: Sequence[tuple[Value, Dim, Dim]], size: Dim) -> list[Value] | None:
    """The pieces (value, start, stop) from 0 to `size` without gap or overlap; None if there is no such sequence."""
    starts = {start: (value, stop) for value, start, stop in pieces}
    if len(starts) < len(pieces) or len(pieces) < 2:
        return None
    ordered: list[Value] = []
    reached: Dim = 0
    while not same(reached, size):
        if reached not in starts:
            return None
        value, reached = starts.pop(reached)
        ordered.append(value)
    return None if starts else ordered
