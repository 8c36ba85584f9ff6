"""Measured time of each operator of a session's graph, from the launches of its compiled program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daceml_train.exploration.session.program import Inputs, Program
from daceml_train.exploration.session.session import Session
from daceml_train.exploration.views.tree import Tree
from daceml_train.graph.leaves import leaves
from daceml_train.passes.base import without_dead_code
from daceml_train.runtime.timing import Timing

RUNS = 10


def seconds_of(session: Session, runs: int = RUNS) -> dict[int, float]:
    """Position of a node in the graph -> the median seconds of its launches; compiles the graph as it is."""
    lowered = leaves(session.graph)
    owner = {node.outputs[0]: place for node, place in zip(lowered.graph.nodes, lowered.owners, strict=True)}
    graph = without_dead_code(lowered.graph)
    program = Program.of(graph, session.options)
    tensors = Inputs.of(session.subject).fresh()
    program.run(tensors)
    timing = Timing()
    program.executable.time(timing)
    try:
        for _ in range(runs):
            program.run(tensors)
    finally:
        program.executable.time(None)
    found: dict[int, float] = {}
    for place, seconds in zip(program.executable.program.nodes, timing.median(), strict=False):
        if place >= 0:  # the copies at the end belong to no operator
            node = owner[graph.nodes[place].outputs[0]]
            found[node] = found.get(node, 0.0) + seconds
    return found


def timeline_of(tree: Tree, seconds: Mapping[int, float] | None) -> list[dict[str, Any]]:
    """The measured operators in the order in which they run, each with its begin; empty where nothing was measured."""
    rows: list[dict[str, Any]] = []
    begin = 0.0
    for place in sorted(seconds or ()):
        item, took = tree.of_node.get(place), (seconds or {})[place]
        if item is not None and took > 0:
            known = {"key": item.key, "label": item.label, "module": item.module, "phase": item.phase}
            rows.append({**known, "bytes": item.bytes, "begin": begin, "seconds": took})
            begin += took
    return rows
