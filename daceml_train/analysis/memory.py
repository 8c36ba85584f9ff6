"""Memory: the bytes that are live while each operator of a graph runs, in execution order.

The rules are those of lowering. Aliases use their operand's memory; a view without valid strides is a copy. Constants
take memory only where a library call or a result needs them; a concatenation with operands in place computes them where
they lie. An updated argument stores the new value. A matmul with a summand accumulates in place if the summand has no
later reader. Results for the user live to the end, and written inputs that no kernel updates are copied at the end.
Allocations of library calls come from the pool, all others from the arena. Kernels' scratch arrays and the workspaces
of library calls are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from daceml_train.analysis.aliases import is_alias, memories, roots, view_strides
from daceml_train.analysis.chunks import chunk_rows, chunks_of, update_chains
from daceml_train.analysis.concat_aliases import concat_aliases
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.contraction import Matmul, MatmulAdd
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.ops.fused_attention import FusedAttention, FusedAttentionGrad
from daceml_train.ops.movement import Concat, Expand, Permute, Slice, View
from daceml_train.ops.operator import Operator
from daceml_train.ops.read import Read
from daceml_train.ops.resample import Windows
from daceml_train.tensor import Dim, Tensor, same, same_shape

UNKNOWN = 32
"""The value of a size symbol for which none is given."""


@dataclass(frozen=True)
class Held:
    """An array in memory: its bytes, its kind of memory, and the first and last position of its live range."""

    name: str
    bytes: int
    pooled: bool
    """Whether it is in the pool of library calls and results for the user; else it is in the arena."""
    first: int
    last: int


@dataclass(frozen=True)
class Memory:
    """Live bytes over time. Position i is the i-th node; the last position is after all nodes: results are copied."""

    arrays: tuple[Held, ...]
    arena: tuple[int, ...]
    """Live bytes in the arena, per position."""
    pool: tuple[int, ...]
    """Live bytes in the pool, per position."""
    inputs: Mapping[Role, int]
    """Bytes of the inputs, by role; they live throughout and belong to the user."""

    @property
    def live(self) -> tuple[int, ...]:
        """Bytes in arena and pool, per position."""
        return tuple(a + b for a, b in zip(self.arena, self.pool, strict=True))

    @property
    def peak(self) -> int:
        """The peak of live bytes in arena and pool: a lower bound of any plan for this order."""
        return max(self.live, default=0)

    @property
    def peak_position(self) -> int:
        """The first position at the peak."""
        return self.live.index(self.peak) if self.arena else 0

    def at(self, position: int) -> list[Held]:
        """The arrays that are live at a position, largest first."""
        return sorted((a for a in self.arrays if a.first <= position <= a.last), key=lambda a: (-a.bytes, a.name))


def memory(graph: Graph, sizes: Mapping[str, int] | None = None, results: int | None = None) -> Memory:
    """The bytes that are live while `graph` runs, in time near-linear in its size.

    `sizes` maps symbols to values; missing ones count as 32, which suffices to compare two orders. The first `results`
    outputs (all, if None) are the user's, so no two of them share memory.
    """
    blocks = Blocks(graph, len(graph.outputs) if results is None else results)
    size = {name: number(blocks.tensors[name].bytes, sizes) for name in blocks.made}
    for chain in update_chains(graph).values():
        (name,) = graph.nodes[chain.gradient].outputs
        size[name] = size[name] // number(graph.tensors[name].shape[0]) * chunk_rows(graph, chain)
    end = len(graph.nodes)
    held = [
        Held(name, size[name], name in blocks.pooled, first, blocks.last.get(name, first))
        for name, first in blocks.made.items()
        if size[name]
    ]
    curves = []
    for pooled in (False, True):
        change = [0] * (end + 2)
        for array in held:
            if array.pooled is pooled:
                change[array.first] += array.bytes
                change[array.last + 1] -= array.bytes
        total, curve = 0, []
        for step in change[: end + 1]:
            total += step
            curve.append(total)
        curves.append(tuple(curve))
    inputs: dict[Role, int] = {}
    for entry in graph.inputs.values():
        inputs[entry.role] = inputs.get(entry.role, 0) + number(entry.tensor.bytes, sizes)
    return Memory(tuple(held), curves[0], curves[1], inputs)


def number(size: Dim, sizes: Mapping[str, int] | None = None) -> int:
    """A size with numbers substituted for its symbols."""
    if isinstance(size, int):
        return size
    values = {s: sympy.Integer((sizes or {}).get(s.name, UNKNOWN)) for s in size.free_symbols}
    return int(size.xreplace(values))


def allocates(op: Operator) -> bool:
    """Whether a library call allocates its results.

    Matmuls and hand-written kernels write into given memory instead.
    """
    written = isinstance(op, FusedAttention | FusedAttentionGrad) or (isinstance(op, Windows) and op.last)
    return op.vendor and not written and not isinstance(op, Matmul | MatmulAdd) and chunks_of(op) == 1


@dataclass(frozen=True)
class _Placed:
    """The location of an array: the block of memory, and the strides with which it is read."""

    block: str
    strides: tuple[Dim, ...]


class Blocks:
    """The blocks of memory of a graph, named after the first array in each, and their live ranges."""

    def __init__(self, graph: Graph, results: int, add_in_place: bool = True) -> None:
        self.graph, self.tensors, self.end = graph, dict(graph.tensors), len(graph.nodes)
        self.constants = {n.outputs[0] for n in graph.nodes if isinstance(n.op, Full | Iota)}
        self.places: dict[str, _Placed] = {}
        self.made: dict[str, int] = {}
        """Block -> the position that writes it first; inputs are absent."""
        self.last: dict[str, int] = {}
        """Block -> the last position that touches it, where that differs from the first."""
        self.pooled: set[str] = set()
        self.base = roots(graph)
        self.visible = {self.base.get(name, name) for name in graph.outputs}
        self.takes = summands(graph, self.base)
        """Results of matmuls -> the summands into which they may accumulate in place, if those have no later reader."""
        self.overwrites = overwrites(graph, self.base, self.takes) if add_in_place else {}
        self.pieces = concat_aliases(graph)
        for name, entry in graph.inputs.items():
            self.places[name] = _Placed(name, entry.tensor.strides)
        for position, node in enumerate(graph.nodes):
            self._node(position, node)
        self._results(results)

    def block(self, name: str) -> str:
        """The block in which an array lies."""
        return self.places[name].block

    def _new(self, name: str, position: int, strides: tuple[Dim, ...], pooled: bool) -> None:
        self.places[name] = _Placed(name, strides)
        self.made[name] = position
        if pooled:
            self.pooled.add(name)

    def _touch(self, name: str, position: int) -> _Placed:
        """The location of an array that is read from memory; a constant is materialized."""
        if name not in self.places:
            self._new(name, position, self.tensors[name].strides, name in self.visible)
        place = self.places[name]
        self.last[place.block] = position
        return place

    def _node(self, position: int, node: Node) -> None:
        op = node.op
        if node.outputs[0] in self.constants:
            return
        if is_alias(op):
            self._alias(position, node)
            return
        written = isinstance(op, Concat) and (op.placed or node.outputs[0] in self.pieces)  # by kernels and copies
        inline = written or not op.vendor
        for name in node.inputs:
            if not (inline and name in self.constants and name not in self.places):
                self._touch(name, position)
        updates = dict(op.updates)
        for index, name in enumerate(node.outputs):
            if index in updates:
                self.places[name] = self.places[node.inputs[updates[index]]]
            elif name in self.overwrites:
                block = self.block(self.overwrites[name])
                self.places[name] = _Placed(block, self.tensors[name].strides)
            elif name in self.pieces:
                self._piece(position, name)
            elif name in self.made:  # a concatenation whose operands were written in place before
                self.places[name] = _Placed(name, self.tensors[name].strides)
            else:
                pooled = allocates(op) or name in self.visible
                self._new(name, position, self.tensors[name].strides, pooled)

    def _piece(self, position: int, name: str) -> None:
        """The concatenation that contains an array: it is the block, from its first operand on."""
        piece = self.pieces[name]
        if piece.whole not in self.made:
            self.made[piece.whole] = position
            if piece.whole in self.visible:
                self.pooled.add(piece.whole)
        self.places[name] = _Placed(piece.whole, piece.strides)
        self.last[piece.whole] = position

    def _alias(self, position: int, node: Node) -> None:
        (source,), (name,) = node.inputs, node.outputs
        before, shape = self.tensors[source], self.tensors[name].shape
        constant = source not in self.places
        place = self._touch(source, position) if constant else self.places[source]
        if constant:  # touched when it is read, not now
            self.last.pop(place.block, None)
        strides = moved_strides(node.op, before, place.strides, shape)
        if strides is not None:
            self.places[name] = _Placed(place.block, strides)
            return
        self._touch(source, position)
        self._new(name, position, Tensor(shape).strides, self.base[name] in self.visible)

    def _results(self, results: int) -> None:
        graph, end = self.graph, self.end
        used: set[str] = set()
        for position, name in enumerate(graph.outputs):
            block = self._touch(name, end).block
            if block not in self.pooled or (position < results and block in used):
                copy = f"{name} (output {position})"
                self.tensors[copy] = graph.tensors[name]
                self._new(copy, end, graph.tensors[name].strides, True)
                block = copy
            used.add(block)
        for target, name in graph.writes.items():
            place = self._touch(name, end)
            if place == self.places[target]:
                continue
            root = self.base.get(name, name)
            if root in graph.writes and (graph.writes[root] != name or place.block == target):
                copy = f"{name} (write)"
                self.tensors[copy] = graph.tensors[name]
                self._new(copy, end, graph.tensors[name].strides, False)


def summands(graph: Graph, base: Mapping[str, str]) -> dict[str, str]:
    """Results of matmuls with a summand -> that summand, where accumulation in place is possible.

    The summand is a whole array of the result's layout that a node produced and that is no result of the graph. `base`
    maps arrays to the roots of their aliases.
    """
    producers, memory = graph.producers(), memories(graph)
    visible = {base[name] for name in graph.results} | concat_aliases(graph).keys()
    found: dict[str, str] = {}
    for node in graph.nodes:
        if not isinstance(node.op, MatmulAdd):
            continue
        (name,), summand = node.outputs, node.inputs[0]
        root = base[summand]
        producer = producers.get(root)
        if producer is None or isinstance(producer.op, Full | Iota) or root in visible or name in visible:
            continue
        if memory[root] in graph.inputs:
            continue
        here, there = graph.tensors[name], graph.tensors[root]
        alike = same_shape(graph.tensors[summand].shape, here.shape) and same(here.size, there.size)
        if not alike or here.dtype is not there.dtype or here.order or there.order:
            continue
        if any(base[other] == root for other in node.inputs[1:]):
            continue
        if _only_views(producers, summand, root):
            found[name] = summand
    return found


def _only_views(producers: Mapping[str, Node], name: str, root: str) -> bool:
    while name != root:
        node = producers[name]
        if not isinstance(node.op, View):
            return False
        name = node.inputs[0]
    return True


def overwrites(graph: Graph, base: Mapping[str, str], takes: Mapping[str, str]) -> dict[str, str]:
    """Those of `takes` whose summand has no reader after the matmul, in graph order."""
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.inputs:
            last[base[name]] = position
    positions = {node.outputs[0]: position for position, node in enumerate(graph.nodes)}
    return {result: name for result, name in takes.items() if last[base[name]] == positions[result]}


def moved_strides(
    op: Operator, before: Tensor, strides: tuple[Dim, ...], shape: tuple[Dim, ...]
) -> tuple[Dim, ...] | None:
    """The strides of an alias's result in its operand's memory, or None if none exist."""
    match op:
        case Permute(dims=dims):
            return tuple(strides[d] for d in dims)
        case Expand():
            lead = len(shape) - before.rank
            kept = [s if same(a, b) else 0 for s, a, b in zip(strides, before.shape, shape[lead:], strict=True)]
            return (*([0] * lead), *kept)
        case Slice(dim=dim, step=step):
            return tuple(s * step if d == dim else s for d, s in enumerate(strides))
        case Read():
            return op.strides(strides)[0]
    return view_strides(before.shape, strides, shape)
