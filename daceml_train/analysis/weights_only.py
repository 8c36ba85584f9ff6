"""Weights-only subgraph: the part of a graph that depends on parameters and buffers alone, as a graph of its own.

Folded weights, packed weights and position embeddings are the same in every call until a parameter changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from daceml_train.analysis.aliases import is_alias, roots
from daceml_train.analysis.reachability import required
from daceml_train.analysis.sizes import symbols_of
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.control import ControlFlow
from daceml_train.ops.fallback import Aten
from daceml_train.ops.random import Uniform
from daceml_train.ops.requirement import Require

HELD = (Role.parameter, Role.buffer, Role.saved)
"""Roles of inputs that do not change between calls; an inference graph's saved arrays are the prepared ones."""
NOT_MOVED = (Aten, ControlFlow, Uniform, Require)
"""Operators that are never moved: they may draw random numbers, raise errors, or contain programs of their own."""
GROWTH = 4
"""An array that is larger than its operands by more than this is not moved either: recomputing it is cheaper."""


@dataclass(frozen=True)
class Split:
    """A graph in two: `prologue` computes the arrays `prepared`, which `main` takes after its inputs.

    Each takes the graph's inputs that it reads or whose sizes it needs, in the graph's order.
    """

    prologue: Graph
    main: Graph
    prepared: tuple[str, ...]


def split(graph: Graph) -> Split | None:
    """Move the nodes that depend on parameters and buffers alone to a prologue; None if there are none.

    Not moved are views, which are free; constants; nodes that depend on sizes of inputs, on inputs that the graph
    writes, or on operators of `NOT_MOVED`; and results of the graph, which belong to the user.
    """
    moved = _moved(graph)
    producers = graph.producers()
    read = [name for node in graph.nodes if node.outputs[0] not in moved for name in _read(node, producers, moved)]
    seen = dict.fromkeys(name for name in (*read, *graph.results) if name in moved and not is_alias(producers[name].op))
    if not seen:
        return None
    prologue = _part(graph, f"{graph.name}_parameters", seen)
    main = _part(graph, graph.name, graph.results, tuple(seen))
    main.outputs, main.writes, main.kept = list(graph.outputs), dict(graph.writes), graph.kept
    prologue.outputs = list(seen)
    return Split(prologue, main, tuple(seen))


def again(before: Split | None, graph: Graph) -> Split | None:
    """Split `graph`, the optimized main part of `before`, and append the moved nodes to the first prologue."""
    after = split(graph)
    if before is None or after is None:
        return after or (None if before is None else Split(before.prologue, graph, before.prepared))
    prologue = before.prologue.copy()
    names: dict[str, str] = {}
    for name, entry in after.prologue.inputs.items():
        if entry.role is not Role.saved and name not in prologue.inputs:
            prologue.input(name, entry.tensor, entry.role, entry.path)
    for node in after.prologue.nodes:
        results = prologue.append(node.op, tuple(names.get(n, n) for n in node.inputs), origin=node.origin)
        names.update(zip(node.outputs, (value.name for value in results), strict=True))
    still = [name for name in after.main.inputs if name in before.prepared]
    wanted = {name: names.get(name, name) for name in (*still, *after.prepared)}
    prologue.outputs = list(wanted.values())
    return Split(prologue, after.main, tuple(wanted))


def held(graph: Graph) -> frozenset[str]:
    """Arrays that do not change from call to call: parameters, buffers, and prepared arrays."""
    fixed = (n for n, entry in graph.inputs.items() if entry.role in HELD and n not in graph.writes)
    return frozenset((*fixed, *_moved(graph)))


def _moved(graph: Graph) -> set[str]:
    """Arrays computed from parameters and buffers alone."""
    fixed = {n for n, entry in graph.inputs.items() if entry.role in HELD and n not in graph.writes}
    constant: set[str] = set()
    moved: set[str] = set()
    given, source = set(graph.results), roots(graph)
    for node in graph.nodes:
        types = (node.op, *(graph.tensors[name] for name in node.outputs))
        still = all(name in fixed or name in constant or name in moved for name in node.inputs)
        if not still or isinstance(node.op, NOT_MOVED) or any(True for _ in symbols_of(types)):
            continue
        if all(name in constant for name in node.inputs):
            constant.update(node.outputs)
        elif given.isdisjoint(node.outputs) and (is_alias(node.op) or _compact(graph, node, source)):
            moved.update(node.outputs)
    return moved


def _compact(graph: Graph, node: Node, source: Mapping[str, str]) -> bool:
    """Whether results are not much larger than the memory from which they are computed."""
    result = sum(int(graph.tensors[name].bytes) for name in node.outputs)
    read = sum(int(graph.tensors[name].bytes) for name in {source[name] for name in node.inputs})
    return result <= GROWTH * read


def _read(node: Node, producers: dict[str, Node], moved: set[str]) -> list[str]:
    """The arrays whose memory a node reads, through views."""
    found = []
    for name in node.inputs:
        while name in moved and is_alias(producers[name].op):
            name = producers[name].inputs[0]
        found.append(name)
    return found


def _part(graph: Graph, title: str, wanted: Iterable[str], given: tuple[str, ...] = ()) -> Graph:
    """The nodes that compute `wanted` from inputs of the graph and from the arrays `given`."""
    computed = [node for node in graph.nodes if not set(given).issuperset(node.outputs)]
    nodes, needed = required(computed, (*wanted, *(graph.writes if given else ())))
    results = [name for node in nodes for name in node.outputs if name not in given]
    symbols = {s for node in nodes for s in symbols_of((node.op, *(graph.tensors[name] for name in node.outputs)))}
    part = Graph(title)
    for name, entry in graph.inputs.items():
        if name in needed or not symbols.isdisjoint(entry.tensor.symbols):
            part.input(name, entry.tensor, entry.role, entry.path)
    for name in given:
        part.input(name, graph.tensors[name], Role.saved)
    part.nodes = nodes
    part.tensors.update({name: graph.tensors[name] for name in results})
    return part
