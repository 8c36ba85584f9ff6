"""Bodies of control flow as graphs, so functions of graphs also apply inside branches and loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from daceml_train.graph.graph import Graph
from daceml_train.ops.control import ControlFlow
from daceml_train.ops.fallback import Body
from daceml_train.ops.kernel import Statement
from daceml_train.tensor import Tensor


def graph_of(body: Body, operands: Sequence[Tensor], name: str = "body") -> Graph:
    """The graph of a body on operands of these types: its arguments become inputs, its yields outputs."""
    graph = Graph(name)
    for argument, tensor in zip(body.arguments, operands, strict=True):
        graph.input(argument, tensor)
    for statement in body.statements:
        graph.append(statement.op, statement.inputs, statement.outputs)
    graph.outputs = [name for name in body.yields if name is not None]
    return graph


def body_of(graph: Graph) -> Body:
    """The body of a graph without writes."""
    statements = tuple(Statement(node.op, node.inputs, node.outputs) for node in graph.nodes)
    return Body(tuple(graph.inputs), statements, tuple(graph.outputs))


def bodies(op: ControlFlow, operands: Sequence[Tensor]) -> list[Graph]:
    """The bodies of an operator on operands of these types, as graphs."""
    pairs = zip(op.bodies, op.arguments(operands), strict=True)
    return [graph_of(body, given, f"{op.label}_{position}") for position, (body, given) in enumerate(pairs)]


def within(graph: Graph, change: Callable[[Graph], Graph]) -> Graph:
    """`graph` with every body changed; itself where nothing changes."""
    nodes, applied = list(graph.nodes), 0
    for position, node in enumerate(nodes):
        if not isinstance(node.op, ControlFlow):
            continue
        before = bodies(node.op, [graph.tensors[i] for i in node.inputs])
        after = [change(body) for body in before]
        if all(a is b for a, b in zip(after, before, strict=True)):
            continue
        applied += sum(a.applied for a in after)
        nodes[position] = dataclasses.replace(node, op=node.op.with_bodies(*map(body_of, after)))
    if all(a is b for a, b in zip(nodes, graph.nodes, strict=True)):
        return graph
    other = graph.copy()
    other.nodes, other.applied = nodes, graph.applied + applied
    return other
