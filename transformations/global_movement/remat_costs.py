"""Costs of rematerialization: the operators of a step in execution order, and the cost of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from daceml_train.analysis.chunks import chunk_rows, update_chains
from daceml_train.analysis.memory import Blocks, memory, number
from daceml_train.analysis.reachability import ancestors
from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph
from daceml_train.ops.control import draws
from daceml_train.ops.kernel import Kernel
from daceml_train.passes.base import Pass
from daceml_train.transformations.global_movement.chunk_updates import ChunkUpdates
from daceml_train.transformations.global_movement.concatenate_in_place import ConcatenateInPlace
from daceml_train.transformations.global_movement.dead_code import DeadCode
from daceml_train.transformations.global_movement.liveness import Liveness, liveness_of, reordered
from daceml_train.transformations.global_movement.reuse_operands import ReuseOperands, candidates
from daceml_train.transformations.global_movement.scalar_updates import with_scalar_updates
from daceml_train.transformations.global_movement.schedule import Schedule
from daceml_train.transformations.global_movement.update_in_place import UpdateInPlace

FOLLOWING: tuple[Pass, ...] = (
    DeadCode(),
    UpdateInPlace(),
    Schedule(),
    ConcatenateInPlace(),
    ReuseOperands(),
    ChunkUpdates(),
)
"""The passes assumed to follow when a pass runs outside a pipeline."""


@dataclass(frozen=True)
class RematCosts:
    """A step in the order that the following passes will give it; item i runs i-th."""

    graph: Graph
    """The operators in that order, without updates in place."""
    items: Liveness
    """In-place results take no memory; gradients that updates consume in chunks take that of one chunk."""
    costs: tuple[float, ...]
    """Per item: its bytes, plus its operations divided by `intensity`."""
    pure: tuple[bool, ...]
    """Per item: whether it belongs to the forward pass and is deterministic."""
    light: tuple[bool, ...]
    """Per item: whether it is pure and memory-bound."""
    peak: int
    """Peak bytes of arena and pool, after the following passes."""

    @property
    def makers(self) -> dict[int, int]:
        """Block -> the item that produces it."""
        found: dict[int, int] = {}
        for item, touched in enumerate(self.items.touches):
            for block in touched:
                found.setdefault(block, item)
        return found


def remat_costs_of(graph: Graph, intensity: float, rest: Sequence[Pass] = FOLLOWING) -> RematCosts:
    """The items of a graph that passes `rest` will transform; an operation costs 1/`intensity` of a byte."""
    plain = graph.copy()
    plain.nodes = [
        replace(n, op=replace(n.op, updates=())) if isinstance(n.op, Kernel) and n.op.updates else n
        for n in graph.nodes
    ]
    if any(isinstance(p, UpdateInPlace) for p in rest):
        plain = with_scalar_updates(plain)  # else a counter would wait for the gradient of its kernel
    order, storage = _divided(rest)
    scheduled = _run(order, plain)
    final = _run(storage, scheduled)
    position = {node.outputs[0]: p for p, node in enumerate(scheduled.nodes)}
    live = [node for node in plain.nodes if node.outputs[0] in position]  # without dead code
    ordered = reordered(plain, sorted(live, key=lambda n: position[n.outputs[0]]))
    items = liveness_of(ordered, _overwritable(ordered, rest))
    written = set(ordered.writes.values())
    parts = _parts(final)
    sizes = [0 if name in written else parts.get(name, items.bytes[b]) for b, name in enumerate(items.names)]
    entries = {node.outputs[0]: e for node, e in zip(ordered.nodes, traffic(ordered).entries, strict=True)}
    forward = ancestors(ordered.nodes, ordered.outputs[:1])
    costs, pure, light = [], [], []
    for node in items.nodes:
        entry = entries[node.outputs[0]]
        moved, computed = number(entry.bytes), number(entry.flops) / intensity
        costs.append(moved + computed)
        pure.append(node.outputs[0] in forward and not draws(node.op))
        light.append(pure[-1] and moved >= computed)
    sized = replace(items, bytes=tuple(sizes))
    return RematCosts(ordered, sized, tuple(costs), tuple(pure), tuple(light), memory(final).peak)


def finished(graph: Graph, rest: Sequence[Pass] = FOLLOWING) -> Graph:
    """The graph after the passes `rest`."""
    order, storage = _divided(rest)
    return _run(storage, _run(order, graph))


def _divided(rest: Sequence[Pass]) -> tuple[Sequence[Pass], Sequence[Pass]]:
    """The passes up to the last one that orders operators, and those that assign memory to arrays."""
    last = max((i for i, p in enumerate(rest) if isinstance(p, UpdateInPlace | Schedule)), default=-1)
    return rest[: last + 1], rest[last + 1 :]


def _run(passes: Sequence[Pass], graph: Graph) -> Graph:
    for transformation in passes:
        graph = transformation.run(graph)
    return graph


def _overwritable(graph: Graph, rest: Sequence[Pass]) -> dict[str, list[str]]:
    """Result of a kernel -> the operands over which it may be stored."""
    least = [p.min_bytes for p in rest if isinstance(p, ReuseOperands)]
    if not least:
        return {}
    blocks = Blocks(graph, len(graph.outputs), add_in_place=False)
    return {
        graph.nodes[position].outputs[result]: [graph.nodes[position].inputs[a] for a in arguments]
        for position, found in candidates(graph, blocks, min(least)).items()
        for result, arguments in found.items()
    }


def _parts(graph: Graph) -> dict[str, int]:
    """Gradient that is computed in chunks -> bytes of a chunk."""
    sizes: dict[str, int] = {}
    for chain in update_chains(graph).values():
        tensor = graph.tensors[graph.nodes[chain.gradient].outputs[0]]
        for position in (chain.gradient, chain.rows):
            if position is not None:
                name = graph.nodes[position].outputs[0]
                sizes[name] = chunk_rows(graph, chain) * number(tensor.shape[1]) * tensor.dtype.bytes
    return sizes
