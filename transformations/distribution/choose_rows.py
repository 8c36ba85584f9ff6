"""ChooseRows: the gradients of embedding tables as rows, where that sends less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from daceml_train.analysis.embeddings import row_gradients
from daceml_train.analysis.network import sent, sent_by
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.collective import AllReduce, SumRows
from daceml_train.ops.embedding import EmbeddingGrad
from daceml_train.ops.operator import Value
from daceml_train.passes.base import without_dead_code
from daceml_train.tensor import Dim, DType, Tensor, product
from daceml_train.transformations.distribution.messages import DistributionPass, Names, merged

MESSAGES = 30_000
"""What the two messages of gathered rows cost more than a part of a bucket, in bytes: 15 us each at 1 GB/s."""


@dataclass(frozen=True)
class ChooseRows(DistributionPass):
    """Send the rows of a table's gradient that a rank has rather than the whole of it (Kim et al., Parallax, 2019).

        rows, indices -> [embedding_grad] -> [all_reduce] -> g     =>     rows, indices -> [sum_rows] -> g

    `how` is "auto": for each table the one that sends fewer bytes, dense or gathered rows, where rows cost `overhead`
    bytes more; "dense" or "gather" for all tables. In rows, n of R D elements of s bytes cost (N - 1) n (D s + 8) bytes
    on N ranks, in a dense array 2 (N - 1) / N R D s.
    """

    how: Literal["auto", "dense", "gather"] = "auto"
    overhead: int = MESSAGES

    def gathers(self, length: int, row: int, rows: int, ranks: int) -> bool:
        """Whether rows of a table of `length` rows of `row` bytes are sent if any rank reads at most `rows` of them."""
        if self.how != "auto":
            return self.how == "gather"
        dense, gathered = 2 * (ranks - 1) / ranks * length * row, (ranks - 1) * rows * (row + 8)
        return gathered + self.overhead < dense

    def run(self, graph: Graph) -> Graph:
        chosen = self._chosen(graph)
        groups: dict[DType, list[Node]] = {}
        for node in chosen:
            groups.setdefault(graph.tensors[node.inputs[0]].dtype, []).append(node)
        parts = row_gradients(graph, [graph.value(node.inputs[0]) for node in chosen])

        def emit(other: Graph, nodes: Sequence[Node], names: Names) -> list[Value]:
            return _summed(other, nodes, [parts[node.inputs[0]] for node in nodes], names)

        return without_dead_code(merged(graph, list(groups.values()), emit)) if groups else graph

    def promised(self, graph: Graph) -> Dim:
        chosen = self._chosen(graph)
        total = sent(graph) - sent_by(graph, chosen)
        parts = row_gradients(graph, [graph.value(node.inputs[0]) for node in chosen])
        for node in chosen:
            assert isinstance(node.op, AllReduce)
            for part in parts[node.inputs[0]]:
                grad, index = (graph.tensors[name] for name in part.inputs)
                total = total + (node.op.ranks - 1) * (grad.bytes + 8 * index.size)
        return total

    def _chosen(self, graph: Graph) -> list[Node]:
        """The sums of gradients of tables that become sums of rows."""
        found = [node for node in graph.nodes if isinstance(node.op, AllReduce) and node.op.rows]
        parts = row_gradients(graph, [graph.value(node.inputs[0]) for node in found])
        return [
            node
            for node in found
            if isinstance(node.op, AllReduce)
            and node.inputs[0] in parts
            and self._sends_rows(graph.tensors[node.inputs[0]], node.op)
        ]

    def _sends_rows(self, gradient: Tensor, op: AllReduce) -> bool:
        length, row = int(gradient.shape[0]), int(product(gradient.shape[1:])) * gradient.dtype.bytes
        return self.gathers(length, row, op.rows, op.ranks)


def _summed(graph: Graph, nodes: Sequence[Node], parts: Sequence[Sequence[Node]], names: Names) -> list[Value]:
    """The sums of several tables' gradients, whose rows travel in one message."""
    ops = [part.op for of_table in parts for part in of_table if isinstance(part.op, EmbeddingGrad)]
    operands = [graph.value(names.get(name, name)) for of_table in parts for part in of_table for name in part.inputs]
    first = min((node.op for node in nodes if isinstance(node.op, AllReduce)), key=lambda op: op.position)
    rows, padding = tuple(int(op.rows) for op in ops), tuple(op.padding_idx for op in ops)
    whole = operands[0].apply(SumRows(first.ranks, first.position, rows, padding), *operands[1:])
    start, results = 0, []
    for of_table in parts:
        total: Value | None = None
        for part in of_table:
            assert isinstance(part.op, EmbeddingGrad)
            shape = part.op.infer(*(graph.tensors[names.get(name, name)] for name in part.inputs))[0].shape
            stop = start + int(product(shape))
            piece, start = whole.slice(0, start, stop).view(shape), stop
            total = piece if total is None else total + piece
        assert total is not None
        results.append(total)
    return results


__all__ = ["ChooseRows"]
