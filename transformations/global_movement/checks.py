"""Checks of data: operators that raise an error for some data, before which a step may change nothing.

A batch that is refused (an index out of range, a class that does not exist) then leaves parameters, the optimizer's
state and buffers as they were.
"""

from __future__ import annotations

from daceml_train.analysis.aliases import roots
from daceml_train.analysis.reachability import ancestors, required
from daceml_train.graph.graph import Graph, Node

SMALL = 1 << 16
"""Bytes up to which an array that a check depends on is copied at the end rather than updated before the check."""


def checks(graph: Graph) -> list[Node]:
    """The operators that may raise an error about data and on which the first output, the loss, depends, in order."""
    return [node for node in required(graph.nodes, graph.outputs[:1])[0] if node.op.may_raise]


def checked(graph: Graph) -> set[str]:
    """The values on which a check depends, its own included."""
    return ancestors(graph.nodes, [name for check in checks(graph) for name in check.outputs])


def committed(graph: Graph) -> Graph:
    """The graph in which arrays of the user's are updated after the last check, but for those that checks depend on."""
    if not (refusing := checks(graph)):
        return graph
    end, needed = graph.nodes.index(refusing[-1]), checked(graph)
    early, late, delayed = list[Node](), list[Node](), set[str]()
    for node in graph.nodes[:end]:
        updates = any(node.inputs[argument] in graph.writes for _, argument in node.op.updates)
        if needed.isdisjoint(node.outputs) and (updates or not delayed.isdisjoint(node.inputs)):
            late.append(node)
            delayed.update(node.outputs)
        else:
            early.append(node)
    base = roots(graph)
    overwritten = {base[node.inputs[argument]] for node in (*early, refusing[-1]) for _, argument in node.op.updates}
    if not late or any(base[name] in overwritten for node in late for name in node.inputs):
        return graph
    result = graph.copy()
    result.nodes = [*early, refusing[-1], *late, *graph.nodes[end + 1 :]]
    return result
