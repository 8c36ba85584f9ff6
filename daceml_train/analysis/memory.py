"""Memory: which bytes live while each operator of a graph runs, in the order in which the program will run them.

The same rules as lowering's: aliases live in their operand's memory, a view that memory does not allow is a copy,
constants take memory only where a library call or a result needs them there, an updated argument holds the new value,
a matrix product is added to a summand that nobody reads any more where that lies, what is handed to the user lives to
the end, and written inputs that no kernel updates are copied at the end. What a
library call allocates comes from the pool, everything else from the arena. Not counted: kernels' scratch arrays and
what library calls use for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from daceml_train.analysis.aliases import is_alias, view_strides
from daceml_train.analysis.chunks import chunk_rows, chunks_of, update_chains
from daceml_train.analysis.concat_aliases import concat_aliases
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.contraction import Matmul, MatmulAdd
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.ops.fused_attention import FusedAttention, FusedAttentionGrad
from daceml_train.ops.movement import Expand, Permute, Slice, View
from daceml_train.ops.operator import Operator
from daceml_train.ops.resample import Windows
from daceml_train.tensor import Dim, Tensor, same, same_shape

UNKNOWN = 32
"""What a size symbol counts as where no value is given for it."""


@dataclass(frozen=True)
class Held:
    """An array in memory: its bytes, where it lies, and the first and last position at which it must be there."""

    name: str
    bytes: int
    pooled: bool
    """In the pool that library calls and results for the user take memory from; else in the arena."""
    first: int
    last: int


@dataclass(frozen=True)
class Memory:
    """What lives when. Position i is the i-th node; the last position is behind all nodes, where results are copied."""

    arrays: tuple[Held, ...]
    arena: tuple[int, ...]
    """Bytes that live in the arena, per position."""
    pool: tuple[int, ...]
    """Bytes that live in the pool, per position."""
    inputs: Mapping[Role, int]
    """Bytes of the inputs, by role; they live throughout and are the user's."""

    @property
    def live(self) -> tuple[int, ...]:
        """Bytes in arena and pool, per position."""
        return tuple(a + b for a, b in zip(self.arena, self.pool, strict=True))

    @property
    def peak(self) -> int:
        """The most bytes that arena and pool hold at one time: no plan can take less for this order."""
        return max(self.live, default=0)

    @property
    def peak_position(self) -> int:
        """The first position at which the peak is reached."""
        return self.live.index(self.peak) if self.arena else 0

    def at(self, position: int) -> list[Held]:
        """The arrays that live at a position, the largest first."""
        return sorted((a for a in self.arrays if a.first <= position <= a.last), key=lambda a: (-a.bytes, a.name))


def memory(graph: Graph, sizes: Mapping[str, int] | None = None, results: int | None = None) -> Memory:
    """The bytes that live while `graph` runs, in time near-linear in its size.

    `sizes` gives symbols values; those it lacks count as 32, which serves to compare two orders. The first `results`
    outputs (all, if None) are the user's, so that no two of them share memory.
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
    """A size with numbers for its symbols."""
    if isinstance(size, int):
        return size
    values = {s: sympy.Integer((sizes or {}).get(s.name, UNKNOWN)) for s in size.free_symbols}
    return int(size.xreplace(values))


def allocates(op: Operator) -> bool:
    """Whether a library call makes its own results' memory.

    Matrix products write where they are told to, and so do kernels written by hand.
    """
    written = isinstance(op, FusedAttention | FusedAttentionGrad) or (isinstance(op, Windows) and op.last)
    return op.vendor and not written and not isinstance(op, Matmul | MatmulAdd) and chunks_of(op) == 1


@dataclass(frozen=True)
class _Placed:
    """Where an array lies: the block of memory, and the strides with which it is read there."""

    block: str
    strides: tuple[Dim, ...]


class Blocks:
    """The pieces of memory of a graph, named by the array that was there first, and when they are needed."""

    def __init__(self, graph: Graph, results: int, add_in_place: bool = True) -> None:
        self.graph, self.tensors, self.end = graph, dict(graph.tensors), len(graph.nodes)
        self.constants = {n.outputs[0] for n in graph.nodes if isinstance(n.op, Full | Iota)}
        self.places: dict[str, _Placed] = {}
        self.made: dict[str, int] = {}
        """Block -> the position that writes it first; inputs are absent."""
        self.last: dict[str, int] = {}
        """Block -> the last position that touches it, where that is another."""
        self.pooled: set[str] = set()
        self.base = bases(graph)
        self.visible = {self.base.get(name, name) for name in graph.outputs}
        self.takes = summands(graph, self.base)
        """Results of products -> the summands to which they may be added where those lie, if nothing reads them."""
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
        """The place of an array that something reads from memory; a constant is materialized."""
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
        inline = not op.vendor
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
            elif name in self.made:  # a concatenation with pieces, which were here before it
                self.places[name] = _Placed(name, self.tensors[name].strides)
            else:
                pooled = allocates(op) or name in self.visible
                self._new(name, position, self.tensors[name].strides, pooled)

    def _piece(self, position: int, name: str) -> None:
        """What is written into a concatenation: that is the block, from its first piece on."""
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
        if constant:  # touched when it is read, not here
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
            block = self._touch(name, end).block
            if block == target:
                continue
            root = self.base.get(name, name)
            if root in graph.writes and graph.writes[root] != name:
                copy = f"{name} (write)"
                self.tensors[copy] = graph.tensors[name]
                self._new(copy, end, graph.tensors[name].strides, False)


def summands(graph: Graph, base: Mapping[str, str]) -> dict[str, str]:
    """Results of matrix products with a summand -> that summand, where memory allows to add to it in place.

    The summand is a whole array of the result's layout that a node made and that is no result of the graph. `base`
    maps aliases to the arrays behind them.
    """
    makers = graph.producers()
    visible = {base.get(name, name) for name in graph.results} | concat_aliases(graph).keys()
    found: dict[str, str] = {}
    for node in graph.nodes:
        if not isinstance(node.op, MatmulAdd):
            continue
        (name,), summand = node.outputs, node.inputs[0]
        root = base.get(summand, summand)
        maker = makers.get(root)
        if maker is None or isinstance(maker.op, Full | Iota) or root in visible or name in visible:
            continue
        if _memory(makers, base, root) in graph.inputs:
            continue
        here, there = graph.tensors[name], graph.tensors[root]
        alike = same_shape(graph.tensors[summand].shape, here.shape) and same(here.size, there.size)
        if not alike or here.dtype is not there.dtype or here.order or there.order:
            continue
        if any(base.get(other, other) == root for other in node.inputs[1:]):
            continue
        if _only_views(makers, summand, root):
            found[name] = summand
    return found


def _memory(makers: Mapping[str, Node], base: Mapping[str, str], name: str) -> str:
    """The array that was first where `name` lies, when operators store results over their operands."""
    while (maker := makers.get(name)) is not None:
        argument = dict(maker.op.updates).get(maker.outputs.index(name))
        if argument is None:
            break
        operand = maker.inputs[argument]
        name = base.get(operand, operand)
    return name


def _only_views(makers: Mapping[str, Node], name: str, root: str) -> bool:
    while name != root:
        node = makers[name]
        if not isinstance(node.op, View):
            return False
        name = node.inputs[0]
    return True


def overwrites(graph: Graph, base: Mapping[str, str], takes: Mapping[str, str]) -> dict[str, str]:
    """Those of `takes` whose summand nobody reads behind the product, in the order of the graph."""
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.inputs:
            last[base.get(name, name)] = position
    positions = {node.outputs[0]: position for position, node in enumerate(graph.nodes)}
    return {made: name for made, name in takes.items() if last[base.get(name, name)] == positions[made]}


def bases(graph: Graph) -> dict[str, str]:
    """Alias -> the array behind it."""
    base: dict[str, str] = {}
    for node in graph.nodes:
        if is_alias(node.op):
            base[node.outputs[0]] = base.get(node.inputs[0], node.inputs[0])
    return base


def moved_strides(
    op: Operator, before: Tensor, strides: tuple[Dim, ...], shape: tuple[Dim, ...]
) -> tuple[Dim, ...] | None:
    """The strides of an alias's result in its operand's memory, or None where memory does not allow that."""
    match op:
        case Permute(dims=dims):
            return tuple(strides[d] for d in dims)
        case Expand():
            lead = len(shape) - before.rank
            kept = [s if same(a, b) else 0 for s, a, b in zip(strides, before.shape, shape[lead:], strict=True)]
            return (*([0] * lead), *kept)
        case Slice(dim=dim, step=step):
            return tuple(s * step if d == dim else s for d, s in enumerate(strides))
    return view_strides(before.shape, strides, shape)
