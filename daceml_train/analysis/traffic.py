"""Traffic: the bytes that a graph moves and the operations it performs, per operator, as numbers or over symbols.

The model: every operator that is not fused is one kernel or one library call, which reads each distinct operand once
and writes its results. A composite counts as the leaves it lowers to. Aliases (view, permute, expand, slice) move
nothing, but for views that strides cannot express, which are copies; a reader of an alias reads only the elements that
the alias shows, each once, so a broadcast array counts with its real size. Constants (full, iota) are computed in the
kernels that read them and are stored only for a library call or a result. Dead operators do not run, and unread
results of a kernel are not written. A write p <- q copies, unless the kernel that produces q updates p in place. A
library's reorders within a call count (`Operator.reorders`). A gradient in small chunks stays in the cache, where its
update reads it. A branch counts as the more expensive of its bodies, a loop as its body times its steps, or once if
the number of steps depends on data, and levels as if each kind's rows were one level; a body's bytes include its
operands and results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from daceml_train.analysis.aliases import copying_views, is_alias
from daceml_train.analysis.chunks import chunk_rows, update_chains
from daceml_train.analysis.sizes import bind
from daceml_train.graph.bodies import bodies
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.leaves import leaves
from daceml_train.ops.collective import Await
from daceml_train.ops.control import Cond, ControlFlow, Scan
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.ops.embedding import AddRows, Embedding, EmbeddingBag
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.levels import ROWS, Levels, at_rows
from daceml_train.ops.movement import Concat, Expand, Permute, Slice, View
from daceml_train.ops.operator import Operator, Origin
from daceml_train.ops.read import Read
from daceml_train.tensor import Dim, Shape, Tensor, product, same, simplify

CACHED = 1 << 23
"""Bytes that stay in the cache for the next operator."""


@dataclass(frozen=True)
class Entry:
    """The traffic of one node: bytes per array that it reads and per array that it writes, and FLOPs.

    They include a composite's inner arrays. `label` is the operator's, or `write` for a copy at the end. `reorders` are
    additional bytes that a library call moves between the graph's layouts and its own.
    """

    label: str
    origin: Origin
    reads: dict[str, Dim]
    writes: dict[str, Dim]
    flops: Dim = 0
    reorders: Dim = 0
    inner: Dim = 0
    """Bytes that the bodies of control flow move, including their operands and results."""

    @functools.cached_property
    def bytes(self) -> Dim:
        """Bytes read and written."""
        return total((*self.reads.values(), *self.writes.values(), self.reorders, self.inner))


@dataclass(frozen=True)
class Traffic:
    """The traffic of a graph: one entry per node, in order, and one per written input that is copied."""

    entries: list[Entry]
    copies: dict[str, Entry]

    @functools.cached_property
    def bytes(self) -> Dim:
        """Bytes of the whole graph."""
        return total(entry.bytes for entry in self.all)

    @functools.cached_property
    def flops(self) -> Dim:
        """Floating-point operations of the whole graph."""
        return total(entry.flops for entry in self.all)

    @property
    def all(self) -> list[Entry]:
        """The entries of nodes and copies."""
        return [*self.entries, *self.copies.values()]

    def by_label(self) -> dict[str, Dim]:
        """Bytes per kind of operator, in order of occurrence."""
        return _grouped((entry.label, entry.bytes) for entry in self.all)

    def by_module(self, depth: int | None = None) -> dict[str, Dim]:
        """Bytes per module path of the user, truncated to its first `depth` components."""
        return _grouped((".".join(entry.origin.module.split(".")[:depth]), entry.bytes) for entry in self.all)


def total(sizes: Iterable[Dim]) -> Dim:
    """The sum of sizes."""
    numbers, expressions = 0, []
    for size in sizes:
        if isinstance(size, int):
            numbers += size
        else:
            expressions.append(size)
    return simplify(sympy.Add(*expressions) + numbers) if expressions else numbers


def _grouped(pairs: Iterable[tuple[str, Dim]]) -> dict[str, Dim]:
    groups: dict[str, list[Dim]] = {}
    for key, size in pairs:
        groups.setdefault(key, []).append(size)
    return {key: total(sizes) for key, sizes in groups.items()}


Known = dict[str, tuple[tuple[Any, ...], Entry]]
"""First result of a node -> what its entry depends on, and its entry."""


def traffic(graph: Graph, sizes: Mapping[str, int] | None = None, known: Known | None = None) -> Traffic:
    """The bytes and operations of `graph`: ints if `sizes` has values for its symbols, else expressions over them.

    Entries in `known` are those of nodes in other graphs with the same sizes, such as the one before a pass. They are
    taken where a node and all that its entry depends on are the same, and replaced elsewhere.
    """
    lowered = leaves(graph)
    leafy = lowered.graph
    types, copied = dict(leafy.tensors), copying_views(leafy)
    if sizes is not None:
        types = {name: bind(tensor, sizes) for name, tensor in types.items()}
        leafy.nodes = [dataclasses.replace(node, op=bind(node.op, sizes)) for node in leafy.nodes]
    count = _Count(leafy, types, sizes, {} if known is None else known, copied)
    groups: list[list[Entry]] = [[] for _ in graph.nodes]
    for owner, node in zip(lowered.owners, leafy.nodes, strict=True):
        groups[owner].append(count.entry(node))
    entries = [_of_node(node, group) for node, group in zip(graph.nodes, groups, strict=True)]
    copies = {
        target: Entry("write", Origin(), {name: types[name].bytes}, {target: types[target].bytes})
        for target, name in leafy.writes.items()
        if name != target and (target, name) not in count.updated
    }
    return Traffic(entries, copies)


def _of_node(node: Node, group: Sequence[Entry]) -> Entry:
    """The entry of a node, given those of the leaves that it lowers to."""
    if len(group) == 1 and not node.op.is_composite:
        return group[0]
    return Entry(
        node.op.label,
        node.origin,
        _grouped(pair for entry in group for pair in entry.reads.items()),
        _grouped(pair for entry in group for pair in entry.writes.items()),
        total(entry.flops for entry in group),
        total(entry.reorders for entry in group),
        total(entry.inner for entry in group),
    )


def _inner(op: ControlFlow, operands: Sequence[Tensor], sizes: Mapping[str, int] | None) -> tuple[Dim, Dim]:
    """Bytes and operations of the bodies of control flow."""
    if isinstance(op, Levels):
        return _levels(op, operands, sizes)
    counted = [traffic(body, sizes) for body in bodies(op, operands)]
    moved, done = [t.bytes for t in counted], [t.flops for t in counted]
    match op:
        case Cond():
            return functools.reduce(_larger, moved), functools.reduce(_larger, done)
        case Scan(trips=trips):
            return simplify(total(moved) * trips), simplify(total(done) * trips)
    return total(moved), total(done)


def _levels(op: Levels, operands: Sequence[Tensor], sizes: Mapping[str, int] | None) -> tuple[Dim, Dim]:
    """Bytes and operations of all rows of each kind in one level."""
    moved: list[Dim] = []
    done: list[Dim] = []
    for body, count in zip(bodies(op, operands), op.counts, strict=True):
        known = None if sizes is None else {**sizes, ROWS.name: bind(count, sizes)}
        counted = traffic(body, known)
        moved.append(at_rows(counted.bytes, count))
        done.append(at_rows(counted.flops, count))
    return total(moved), total(done)


def _larger(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return simplify(sympy.Max(a, b))


@dataclass(frozen=True)
class _Part:
    """The elements of array `root` that a name covers: `factor * product(extents)` distinct ones.

    `extents` follows the dimensions of the name; it is 1 where the name repeats elements by broadcasting.
    """

    root: str
    extents: Shape
    factor: Dim = 1

    @property
    def size(self) -> Dim:
        return simplify(self.factor * product(self.extents))


def _shown(op: Operator, part: _Part, before: Tensor, after: Tensor) -> _Part:
    """The elements that the result of an alias covers, given those that its operand covers."""
    match op:
        case Permute(dims=dims):
            return dataclasses.replace(part, extents=tuple(part.extents[d] for d in dims))
        case Expand():
            return dataclasses.replace(part, extents=(1,) * (after.rank - before.rank) + part.extents)
        case Slice(dim=dim):
            if same(part.extents[dim], 1) and not same(before.shape[dim], 1):
                return part  # repeated elements: fewer repetitions
            extents = tuple(after.shape[d] if d == dim else e for d, e in enumerate(part.extents))
            return dataclasses.replace(part, extents=extents)
        case Read():  # windows overlap: the elements of the operand count, not their repetitions
            size = op.distinct(part.extents)
            return _Part(part.root, (1,) * after.rank, simplify(part.factor * size))
        case View():
            if part.extents == before.shape or same(after.size, 0):
                return dataclasses.replace(part, extents=after.shape)
            return _Part(part.root, after.shape, part.factor * sympy.sympify(product(part.extents)) / after.size)
    raise AssertionError(f"{op.label} is no alias")


def _cached(graph: Graph) -> Iterator[str]:
    """Arrays that are computed in chunks of at most `CACHED` bytes."""
    for chain in update_chains(graph).values():
        for position in (chain.gradient, chain.rows):
            if position is not None:
                (name,) = graph.nodes[position].outputs
                tensor = graph.tensors[name]
                small = chunk_rows(graph, chain) * tensor.shape[1] * tensor.dtype.bytes
                if isinstance(small, int) and small <= CACHED:
                    yield name


class _Count:
    """Entries of the leaves of one graph."""

    def __init__(
        self,
        graph: Graph,
        types: dict[str, Tensor],
        sizes: Mapping[str, int] | None,
        known: Known,
        copied: frozenset[str],
    ) -> None:
        self.types, self.sizes, self.known, self.copied = types, sizes, known, set(copied)
        self.parts: dict[str, _Part] = {}
        self.free: set[str] = set()
        for name in graph.inputs:
            self.parts[name] = _Part(name, types[name].shape)
        for node in graph.nodes:
            for name in node.outputs:
                if name in self.copied and self.parts[node.inputs[0]].root in self.free:
                    self.copied.discard(name)  # constants are computed where they are read
                if self.is_alias(node):
                    source = node.inputs[0]
                    self.parts[name] = _shown(node.op, self.parts[source], types[source], types[name])
                else:
                    self.parts[name] = _Part(name, types[name].shape)
            if isinstance(node.op, Full | Iota):
                self.free.add(node.outputs[0])
        self.needed, self.stored = self._live(graph)
        self.cached = set(_cached(graph))
        updating = [node for node in graph.nodes if node.op.updates and id(node) in self.needed]
        self.updated = {(n.inputs[argument], n.outputs[result]) for n in updating for result, argument in n.op.updates}

    def is_alias(self, node: Node) -> bool:
        """Whether the result of a node is its operand's memory."""
        return is_alias(node.op) and node.outputs[0] not in self.copied

    def _live(self, graph: Graph) -> tuple[set[int], set[str]]:
        """Nodes that run, and arrays that are stored because they are read from memory."""
        nodes: set[int] = set()
        needed = set(graph.results)
        stored = {self.parts[name].root for name in graph.results}
        for node in reversed(graph.nodes):
            if needed.isdisjoint(node.outputs):
                continue
            nodes.add(id(node))
            needed.update(node.inputs)
            if not self.is_alias(node):
                direct = self.free if isinstance(node.op, Concat) and node.op.placed else ()  # written, not copied
                roots = {self.parts[name].root for name in node.inputs if name not in direct}
                stored |= roots if node.op.vendor else roots - self.free
        return nodes, stored

    def entry(self, node: Node) -> Entry:
        """The traffic of one leaf."""
        depends = self._depends(node)
        before = self.known.get(node.outputs[0])
        if before is not None and before[0] == depends:
            return before[1]
        entry = self._entry(node)
        self.known[node.outputs[0]] = depends, entry
        return entry

    def _depends(self, node: Node) -> tuple[Any, ...]:
        """All that the entry of a node depends on; arrays are compared by name, type, and where they are."""
        parts = [self.parts[name] for name in node.inputs]
        reads = [
            (self.types[name], p, self.types[p.root], p.root in self.free)
            for name, p in zip(node.inputs, parts, strict=True)
        ]
        writes = [(self.types[name], name in self.stored) for name in node.outputs]
        cached = self.cached.intersection((*node.outputs, *(p.root for p in parts)))
        copied = not self.copied.isdisjoint(node.outputs)
        return id(node) in self.needed, node.op, node.inputs, node.outputs, node.origin, reads, writes, cached, copied

    def _entry(self, node: Node) -> Entry:
        op, operands = node.op, [self.types[i] for i in node.inputs]
        if (
            id(node) not in self.needed or self.is_alias(node) or isinstance(op, Await)
        ):  # the start counts what is moved
            return Entry(op.label, node.origin, {}, {})
        if isinstance(op, ControlFlow):
            moved, done = _inner(op, operands, self.sizes)
            return Entry(op.label, node.origin, {}, {}, done, inner=moved)
        written = [name for name in node.outputs if op.vendor or name in self.stored]
        if isinstance(op, Full | Iota) and not written:
            return Entry(op.label, node.origin, {}, {})
        if isinstance(op, Kernel):
            touched = self._touched(op, node.inputs, operands)
        else:
            touched = {name: self.parts[name] for name in node.inputs}
        if isinstance(op, Concat) and op.placed:
            copied = [name for k, name in enumerate(node.inputs) if k not in op.placed]
            touched = {name: self.parts[name] for name in copied if name not in self.free}
        reads = self._reads(touched, op.vendor)
        writes = {name: self.types[name].bytes for name in written}
        if isinstance(op, Concat) and op.placed:
            writes = {node.outputs[0]: total(self.types[name].bytes for name in copied)} if copied else {}
        if isinstance(op, Embedding | EmbeddingBag | AddRows):  # touches the rows that the indices name
            table, indices = self.parts[node.inputs[0]].root, self.types[node.inputs[1]]
            row = operands[0].shape[1] * operands[0].dtype.bytes
            touched_bytes = _smaller(reads[table], simplify(indices.size * row))
            if not isinstance(op, AddRows):
                reads[table] = touched_bytes
            elif op.in_place:
                reads[table], writes[node.outputs[0]] = touched_bytes, touched_bytes
        for name in self.cached.intersection((*reads, *writes)):
            reads.pop(name, None)
            writes.pop(name, None)
        return Entry(op.label, node.origin, reads, writes, op.flops(*operands), op.reorders(*operands))

    def _touched(self, kernel: Kernel, inputs: Sequence[str], operands: Sequence[Tensor]) -> dict[str, _Part]:
        """The elements of the operands that a body reads."""
        types = kernel.types(*operands)
        parts = {argument: self.parts[name] for argument, name in zip(kernel.arguments, inputs, strict=True)}
        touched: dict[str, _Part] = {}
        for statement in kernel.statements:
            shown = [parts.get(name) for name in statement.inputs]
            if is_alias(statement.op):
                (source,), (name,) = statement.inputs, statement.outputs
                if shown[0]:
                    parts[name] = _shown(statement.op, shown[0], types[source], types[name])
            else:
                touched.update((name, part) for name, part in zip(statement.inputs, shown, strict=True) if part)
        touched.update((name, parts[name]) for name in kernel.yields if name in parts)
        return touched

    def _reads(self, touched: dict[str, _Part], vendor: bool) -> dict[str, Dim]:
        """Distinct bytes per array in memory."""
        by_root: dict[str, list[Dim]] = {}
        for part in touched.values():
            if vendor or part.root not in self.free:
                by_root.setdefault(part.root, []).append(part.size)
        reads: dict[str, Dim] = {}
        for root, sizes in by_root.items():
            whole = self.types[root].size
            size = whole if any(same(s, whole) for s in sizes) else _smaller(total(sizes), whole)
            reads[root] = simplify(size * self.types[root].dtype.bytes)
        return reads


def _smaller(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return simplify(sympy.Min(a, b))
