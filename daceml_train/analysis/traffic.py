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
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import sympy

from daceml_train.analysis.aliases import copying_views, is_alias
from daceml_train.analysis.chunks import chunk_rows, update_chains
from daceml_train.analysis.parts import Part, shown
from daceml_train.analysis.sizes import bind
from daceml_train.graph.bodies import bodies
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.leaves import Leaves, leaves
from daceml_train.ops.collective import Await
from daceml_train.ops.control import Cond, ControlFlow, Scan
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.ops.embedding import AddRows, Embedding, EmbeddingBag
from daceml_train.ops.indexing import Scatter
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.levels import ROWS, Levels, at_rows
from daceml_train.ops.movement import Concat
from daceml_train.ops.operator import Origin
from daceml_train.tensor import Dim, Tensor, same, simplify

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


_State = tuple[Tensor, Part, Tensor, bool]
"""What others may depend on of an array: its type, its part, the type of the part's array, and whether that is free."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A node as it was in the last graph that had it."""

    node: Node
    view: bool
    """Whether its result is a view that strides cannot express."""
    copied: bool
    """Whether that is copied."""
    free: bool
    operands: tuple[_State, ...]
    results: tuple[_State, ...]

    def does(self, node: Node) -> bool:
        """Whether a node does the same."""
        a, b = self.node, node
        return a is b or (a.op, a.inputs, a.outputs, a.origin) == (b.op, b.inputs, b.outputs, b.origin)


@dataclass(frozen=True)
class Known:
    """What is known of graphs with the same sizes, such as those between passes, so that the next one takes less time.

    A node's entry is taken again if the node, its operands' places and types, and what is read of it are the same.
    """

    nodes: dict[str, _Seen] = field(default_factory=dict)
    """By first result."""
    entries: dict[str, tuple[_Seen, tuple[Any, ...], Entry]] = field(default_factory=dict)
    """The node that an entry is of, and what else it depends on."""
    states: dict[str, _State] = field(default_factory=dict)
    """Array -> its state in the last graph that had it; the same object if it did not change."""

    def copy(self) -> Known:
        """The same, apart from what is found later."""
        return Known(dict(self.nodes), dict(self.entries), dict(self.states))

    def put(self, name: str, state: _State) -> _State:
        """Note the state of an array; returns the object that stands for it."""
        before = self.states.get(name)
        if before is not None and (before is state or before == state):
            return before
        self.states[name] = state
        return state


def traffic(graph: Graph, sizes: Mapping[str, int] | None = None, known: Known | None = None) -> Traffic:
    """The bytes and operations of `graph`: ints if `sizes` has values for its symbols, else expressions over them.

    `known` is what earlier calls found in graphs with the same sizes, and is updated.
    """
    composite = any(node.op.is_composite for node in graph.nodes)
    lowered = leaves(graph) if composite or sizes else Leaves(graph)
    leafy = lowered.graph
    types, copied = leafy.tensors, copying_views(leafy)
    if sizes:
        types = {name: bind(tensor, sizes) for name, tensor in types.items()}
        leafy.nodes = [dataclasses.replace(node, op=bind(node.op, sizes)) for node in leafy.nodes]
    count = _Count(leafy, types, sizes, Known() if known is None else known, copied)
    entries = [count.entry(node) for node in leafy.nodes]
    if composite:
        groups: list[list[Entry]] = [[] for _ in graph.nodes]
        for owner, entry in zip(lowered.owners, entries, strict=True):
            groups[owner].append(entry)
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
        types: Mapping[str, Tensor],
        sizes: Mapping[str, int] | None,
        known: Known,
        copied: frozenset[str],
    ) -> None:
        self.types, self.sizes, self.known, self.copied = types, sizes, known, set(copied)
        self.parts: dict[str, Part] = {}
        self.free: set[str] = set()
        for name in graph.inputs:
            part = self.parts[name] = Part(name, types[name].shape)
            known.put(name, (types[name], part, types[name], False))
        for node in graph.nodes:
            self._place(node)
        self.needed, self.stored = self._live(graph)
        self.cached = set(_cached(graph))
        updating = [node for node in graph.nodes if node.op.updates and id(node) in self.needed]
        self.updated = {(n.inputs[argument], n.outputs[result]) for n in updating for result, argument in n.op.updates}

    def _place(self, node: Node) -> None:
        """Find out where the results of a node are."""
        known, first = self.known, node.outputs[0]
        seen, view = known.nodes.get(first), first in self.copied
        operands = tuple([known.states[name] for name in node.inputs])
        if seen is not None and seen.view == view and seen.does(node) and all(map(is_, operands, seen.operands)):
            for name, state in zip(node.outputs, seen.results, strict=True):
                self.parts[name] = state[1]
                known.states[name] = state
            if seen.free:
                self.free.add(first)
            if view and not seen.copied:
                self.copied.discard(first)
            return
        if view and self.parts[node.inputs[0]].root in self.free:
            self.copied.discard(first)  # constants are computed where they are read
        alias, free = self.is_alias(node), isinstance(node.op, Full | Iota)
        if free:
            self.free.add(first)
        found: list[_State] = []
        for name in node.outputs:
            if alias:
                source = node.inputs[0]
                part = shown(node.op, self.parts[source], self.types[source], self.types[name])
            else:
                part = Part(name, self.types[name].shape)
            self.parts[name] = part
            found.append(known.put(name, (self.types[name], part, self.types[part.root], part.root in self.free)))
        known.nodes[first] = _Seen(node, view, first in self.copied, free, operands, tuple(found))

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
        seen = self.known.nodes[node.outputs[0]]
        flags: tuple[Any, ...] = (id(node) in self.needed, *(name in self.stored for name in node.outputs))
        if self.cached:
            flags += (self.cached.intersection((*node.outputs, *(self.parts[name].root for name in node.inputs))),)
        before = self.known.entries.get(node.outputs[0])
        if before is not None and before[0] is seen and before[1] == flags:
            return before[2]
        entry = self._entry(node)
        self.known.entries[node.outputs[0]] = seen, flags, entry
        return entry

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
        if isinstance(op, Scatter) and op.in_place:
            size = _smaller(operands[0].bytes, operands[2].bytes)
            reads |= {self.parts[node.inputs[0]].root: size if op.accumulate else 0}
            writes[node.outputs[0]] = size
        for name in self.cached.intersection((*reads, *writes)):
            reads.pop(name, None)
            writes.pop(name, None)
        return Entry(op.label, node.origin, reads, writes, op.flops(*operands), op.reorders(*operands))

    def _touched(self, kernel: Kernel, inputs: Sequence[str], operands: Sequence[Tensor]) -> dict[str, Part]:
        """The elements of the operands that a body reads."""
        types = kernel.types(*operands)
        parts = {argument: self.parts[name] for argument, name in zip(kernel.arguments, inputs, strict=True)}
        touched: dict[str, Part] = {}
        for statement in kernel.statements:
            covered = [parts.get(name) for name in statement.inputs]
            if is_alias(statement.op):
                (source,), (name,) = statement.inputs, statement.outputs
                if covered[0]:
                    parts[name] = shown(statement.op, covered[0], types[source], types[name])
            else:
                touched.update((name, part) for name, part in zip(statement.inputs, covered, strict=True) if part)
        touched.update((name, parts[name]) for name in kernel.yields if name in parts)
        return touched

    def _reads(self, touched: dict[str, Part], vendor: bool) -> dict[str, Dim]:
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
