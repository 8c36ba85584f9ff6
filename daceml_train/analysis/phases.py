"""Phases: which operators of a training graph belong to the forward pass, the backward pass, and the update."""

from __future__ import annotations

from daceml_train.analysis.reachability import descendants, required
from daceml_train.graph.graph import Graph, Role

PHASES = ("forward", "backward", "update")


def phases(graph: Graph, results: int | None = None) -> list[str]:
    """`forward`, `backward` or `update` per node; all are forward in a graph without gradients.

    `results` is the number of leading outputs that the forward pass produces, if that is not evident from the graph.
    """
    roles = {name: entry.role for name, entry in graph.inputs.items()}
    cotangents = {name for name, role in roles.items() if role is Role.cotangent}
    updated = {target for target in graph.writes if roles[target] in (Role.parameter, Role.state)}
    if not cotangents and not updated and results is None:
        return ["forward"] * len(graph.nodes)
    if cotangents:
        late = descendants(graph.nodes, cotangents)
        early = [late.isdisjoint(node.outputs) for node in graph.nodes]
    else:
        wanted = {
            *graph.outputs[: results or 1],
            *(value for target, value in graph.writes.items() if target not in updated),
        }
        first = {id(node) for node in required(graph.nodes, wanted)[0]}
        early = [id(node) in first for node in graph.nodes]
    written = {graph.writes[target] for target in updated} - set(graph.outputs[: results or 1])
    return [
        "forward" if first else "backward" if written.isdisjoint(node.outputs) else "update"
        for node, first in zip(graph.nodes, early, strict=True)
    ]


def known_phases(graph: Graph) -> list[str] | None:
    """`phases`, also for one of the two graphs of a differentiable call; None if the phases are unknown."""
    roles = {entry.role for entry in graph.inputs.values()}
    if Role.saved in roles:  # saved by the forward graph: this whole graph is the backward pass
        return ["backward"] * len(graph.nodes)
    if graph.kept:
        return ["forward"] * len(graph.nodes)
    if Role.cotangent in roles or any(graph.inputs[t].role is Role.parameter for t in graph.writes):
        return phases(graph)
    return None
