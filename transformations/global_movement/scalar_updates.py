"""Scalar updates: new values of rank 0, such as step counters, are computed by one kernel instead of one per parameter.

    s, p, g -> [s + 1; p - f(s + 1) g]      =>      s, ... -> [s + 1, ...];   s + 1, p, g -> [p - f(s + 1) g]

A kernel over many elements could not store them over the old values, which its other threads still read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from daceml_train.analysis.reachability import required
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.elementwise import Cast, Elementwise, Full
from daceml_train.ops.kernel import Kernel, Statement, canonical

MOST = 96
"""Values per kernel: it has two pointers for each, of which CUDA allows some 500, and a compiler reads its body."""


@dataclass(frozen=True)
class _Update:
    """A written value of rank 0, and the statements of its kernel that compute it."""

    name: str
    local: str
    position: int
    """The position of its node."""
    statements: tuple[Statement, ...]
    arguments: dict[str, str]
    """The arrays that the statements read, by their names in the body."""
    earliest: int
    """The position of the last node that produces one of them."""
    latest: int
    """The position of the first node that reads the value."""


def with_scalar_updates(graph: Graph) -> Graph:
    """The graph in which kernels compute no values of rank 0 that are written, except those from larger arrays."""
    updates = _updates(graph)
    groups = [group for group in _groups(updates) if len(group) > 1 or _has_other_results(graph, group[0])]
    moved = {update.name: update for group in groups for update in group}
    if not moved:
        return graph
    kernels: dict[int, list[Node]] = {}
    for group in groups:
        kernels.setdefault(min(update.latest for update in group), []).append(_merged(graph, group))
    other = graph.copy()
    other.nodes = []
    for position, node in enumerate(graph.nodes):
        other.nodes += kernels.get(position, [])
        here = [moved[name] for name in node.outputs if name in moved and moved[name].position == position]
        other.nodes += [left] if (left := _without(node, here)) is not None else []
    other.nodes += kernels.get(len(graph.nodes), [])
    return other


def as_kernel(node: Node) -> Kernel | None:
    """The node as a kernel, if it is one or a single elementwise operator."""
    if isinstance(node.op, Kernel):
        return node.op
    if isinstance(node.op, Elementwise | Cast):
        return canonical(node.inputs, [Statement(node.op, node.inputs, node.outputs)], node.outputs)[0]
    return None


def _updates(graph: Graph) -> list[_Update]:
    results = {name: index for index, node in enumerate(graph.nodes) for name in node.outputs}
    first: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        for name in node.inputs:
            first.setdefault(name, index)
    found = []
    written = {value for target, value in graph.writes.items() if graph.tensors[target].rank == 0}
    for position, node in enumerate(graph.nodes):
        kernel = as_kernel(node)
        if kernel is None or kernel.updates or written.isdisjoint(node.outputs):
            continue
        types = kernel.types(*(graph.tensors[name] for name in node.inputs))
        arrays = dict(zip(kernel.arguments, node.inputs, strict=True))
        for local, name in zip(kernel.yields, node.outputs, strict=True):
            if name not in written or kernel.yields.count(local) > 1 or local in arrays:
                continue
            statements, needed = required(kernel.statements, (local,))
            pointwise = all(isinstance(s.op, Elementwise | Cast | Full) for s in statements)
            if not pointwise or any(types[o].rank for s in statements for o in (*s.inputs, *s.outputs)):
                continue
            arguments = {argument: array for argument, array in arrays.items() if argument in needed}
            earliest = max((results.get(array, -1) for array in arguments.values()), default=-1)
            latest = min(first.get(name, len(graph.nodes)), len(graph.nodes) if len(node.outputs) == 1 else position)
            found.append(_Update(name, local, position, tuple(statements), arguments, earliest, latest))
    names = {update.name for update in found}
    return [update for update in found if names.isdisjoint(update.arguments.values())]


def _has_other_results(graph: Graph, update: _Update) -> bool:
    return len(graph.nodes[update.position].outputs) > 1


def _groups(updates: Sequence[_Update]) -> list[list[_Update]]:
    """Updates that one kernel can compute: after all that they read, before all that reads them."""
    groups: list[list[_Update]] = []
    for update in sorted(updates, key=lambda u: u.latest):
        last = groups[-1] if groups else []
        if last and len(last) < MOST and update.earliest < min(u.latest for u in last):
            last.append(update)
        else:
            groups.append([update])
    return groups


def _merged(graph: Graph, group: Sequence[_Update]) -> Node:
    """One kernel for all values of a group; equal statements on equal operands are computed once."""
    arguments: dict[str, None] = {}
    statements: list[Statement] = []
    known: dict[tuple[object, tuple[str, ...]], tuple[str, ...]] = {}
    yields = []
    for update in group:
        names = {local: f"array {array}" for local, array in update.arguments.items()}
        arguments |= dict.fromkeys(update.arguments.values())
        for statement in update.statements:
            inputs = tuple(names[i] for i in statement.inputs)
            key = (statement.op, inputs)
            if key not in known:
                known[key] = tuple(f"{len(statements)} {o}" for o in statement.outputs)
                statements.append(Statement(statement.op, inputs, known[key]))
            names |= dict(zip(statement.outputs, known[key], strict=True))
        yields.append(names[update.local])
    kernel = canonical([f"array {name}" for name in arguments], statements, yields)[0]
    node = graph.nodes[group[0].position]
    return Node(kernel, tuple(arguments), tuple(update.name for update in group), node.origin)


def _without(node: Node, updates: Sequence[_Update]) -> Node | None:
    """The node, with these values as arguments where it still needs them; None if it computes nothing else."""
    kernel = as_kernel(node)
    if not updates or kernel is None:
        return node
    taken = {update.local: update.name for update in updates}
    results = [(y, o) for y, o in zip(kernel.yields, node.outputs, strict=True) if y not in taken]
    if not results:
        return None
    rest = [s for s in kernel.statements if taken.keys().isdisjoint(s.outputs)]
    statements, needed = required(rest, [y for y, _ in results])
    arrays = dict(zip(kernel.arguments, node.inputs, strict=True)) | taken
    arrays = {name: array for name, array in arrays.items() if name in needed}
    body = canonical([*arrays], list(statements), [y for y, _ in results])[0]
    return replace(node, op=body, inputs=tuple(arrays.values()), outputs=tuple(o for _, o in results))
