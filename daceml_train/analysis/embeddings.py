"""Which arrays are gradients of embedding tables, of which most rows are zero."""

from __future__ import annotations

from collections.abc import Sequence

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.embedding import EmbeddingGrad
from daceml_train.ops.operator import Value


def row_gradients(graph: Graph, values: Sequence[Value]) -> dict[str, tuple[Node, ...]]:
    """The values that are gradients of tables: sums of gradients of embeddings, by name, with those gradients."""
    producers = graph.producers()

    def parts(name: str) -> tuple[Node, ...] | None:
        node = producers.get(name)
        if node is None:
            return None
        if isinstance(node.op, EmbeddingGrad):
            return (node,)
        if isinstance(node.op, Elementwise) and node.op.kind == "add":
            both = [parts(operand) for operand in node.inputs]
            return None if None in both else tuple(part for found in both if found for part in found)
        return None

    return {value.name: found for value in values if (found := parts(value.name))}
