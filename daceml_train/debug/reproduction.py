"""Reduce a failing graph, and write it as a stand-alone script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.reachability import required
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.graph.text import show
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.ops.operator import Array

TRIES = 120
"""The maximum number of graphs that are tried in a reduction."""

Fails = Callable[[Graph, Mapping[str, Array]], bool]


def smallest(graph: Graph, arrays: Mapping[str, Array], fails: Fails) -> tuple[Graph, dict[str, Array]]:
    """A small part of `graph`, and its inputs, on which `fails` still holds; `graph` itself if no part does."""
    values = {**interpret(graph, arrays).values, **arrays}
    left = TRIES

    def holds(nodes: list[Node], results: list[str]) -> Graph | None:
        nonlocal left
        left -= 1
        part = excerpt(graph, nodes, results)
        try:
            return part if nodes and fails(part, {name: values[name] for name in part.inputs}) else None
        except Exception:  # the pass or operator does not accept the part
            return None

    best = None
    nodes, results = list(graph.nodes), list(dict.fromkeys(graph.results))
    for name in results:  # one result
        kept = required(nodes, [name])[0]
        if left > 0 and (best := holds(kept, [name])) is not None:
            nodes, results = kept, [name]
            break
    step = max(len(nodes) // 2, 1)
    while left > 0:  # without nodes in front, then without nodes at the end
        changed = False
        if step < len(nodes) and (part := holds(nodes[step:], results)) is not None:
            best, nodes, changed = part, nodes[step:], True
        for node in nodes[:-step][-1:] if step < len(nodes) and len(results) == 1 else ():
            kept = required(nodes, [node.outputs[0]])[0]
            if (part := holds(kept, [node.outputs[0]])) is not None:
                best, nodes, results, changed = part, kept, [node.outputs[0]], True
        if not changed:
            if step == 1:
                break
            step //= 2
    if best is None:
        return graph, dict(arrays)
    return best, {name: np.asarray(values[name]) for name in best.inputs}


def excerpt(graph: Graph, nodes: list[Node], results: list[str]) -> Graph:
    """`nodes` alone: arrays from elsewhere become inputs, constants are included."""
    producers = graph.producers()
    part = Graph(graph.name)
    own = {name for node in nodes for name in node.outputs}
    for name in dict.fromkeys(i for node in nodes for i in node.inputs if i not in own):
        producer = producers.get(name)
        if producer is not None and isinstance(producer.op, Full | Iota):
            part.append(producer.op, (), producer.outputs)
        elif name not in part.tensors:
            entry = graph.inputs.get(name)
            part.input(name, graph.tensors[name], Role.input if entry is None else entry.role)
    for node in nodes:
        part.append(node.op, node.inputs, node.outputs, node.origin)
    part.outputs = [name for name in results if name in own]
    return part


def write(path: Path, title: str, graph: Graph, arrays: Mapping[str, Array], imports: str, check: str) -> Path:
    """A script that builds `graph` and its inputs and runs `check`, which prints and exits with 1 on a deviation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = path.with_suffix(".npz")
    stored: dict[str, Any] = {f"input{i}": value for i, value in enumerate(arrays.values())}
    np.savez(numbers, **stored)
    names = ", ".join(repr(name) for name in arrays)
    path.write_text(
        f'''"""{title} (written by daceml_train.debug.bisect)"""

import sys
from pathlib import Path

import numpy as np

import daceml_train as dt
from daceml_train.analysis.interpret import interpret
from daceml_train.graph.text import parse
{imports}
graph = parse(r"""{show(graph)}""")
stored = np.load(Path(__file__).with_suffix(".npz"))
inputs = {{name: stored[f"input{{i}}"] for i, name in enumerate([{names}])}}

{check}''',
        encoding="utf-8",
    )
    return path
