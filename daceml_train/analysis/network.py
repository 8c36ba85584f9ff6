"""Network bytes: what each of the processes that train together sends in a graph."""

from __future__ import annotations

from collections.abc import Iterable

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.collective import Collective
from daceml_train.tensor import Dim, simplify


def sent_by(graph: Graph, nodes: Iterable[Node]) -> Dim:
    """Bytes that each rank sends in these nodes of a graph."""
    total: Dim = 0
    for node in nodes:
        if isinstance(node.op, Collective):
            total = total + node.op.network_bytes(*(graph.tensors[name] for name in node.inputs))
    return simplify(total)


def sent(graph: Graph) -> Dim:
    """Bytes that each rank sends in a graph."""
    return sent_by(graph, graph.nodes)


def messages(graph: Graph) -> int:
    """The collectives of a graph in which something is sent."""
    return sum(isinstance(node.op, Collective) and sent_by(graph, (node,)) != 0 for node in graph.nodes)
