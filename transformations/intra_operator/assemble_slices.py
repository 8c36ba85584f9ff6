"""AssembleSlices: the gradient of an array that was read in slices is assembled once, not once per slice."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.elementwise import Elementwise, Full
from daceml_train.ops.movement import Concat, Pad, Permute
from daceml_train.ops.movement import View as ViewOp
from daceml_train.ops.operator import Operator, Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, Shape, product, same, same_shape, simplify
from daceml_train.transformations.intra_operator.movement import at_most

Box: TypeAlias = tuple[tuple[Dim, Dim], ...]
"""Per dimension, the range (start, stop)."""


@dataclass(frozen=True)
class AssembleSlices(Rewrite):
    """Concatenate disjoint pieces instead of padding each with zeros and adding them up.

        g1 -> [pad] -> p1, ..., gn -> [pad] -> pn;  p1 + ... + pn -> y     =>     g1, ..., gn -> [concat] -> y

    Pieces may be cut along several dimensions and pass through views and permutations. Pieces with the same range are
    added up first, gaps are zeros, and other terms of the sum are added at the end in their order. The sum changes at
    most by its rounding and the sign of zeros.
    Bytes: each pad to y's size and each addition cost up to three times y; now every piece is read once and y is
    written once. For n pieces of size 1/n that is O(1) instead of O(n) times y.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not _is_sum(uses, node) or _continues(uses, node):
            return None
        names = terms(uses, node)
        found = [(name, piece_of(uses, name, reader)) for name, reader in names]
        pieces = [piece for _, piece in found if piece is not None]
        if len(pieces) < 2:
            return None
        shape = uses.graph.tensors[node.outputs[0]].shape
        others = [name for name, piece in found if piece is None]
        return {"pieces": pieces, "others": others, "shape": shape, "plan": arrange(pieces, shape)}

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        plan, pieces = match.bindings["plan"], match.bindings["pieces"]
        names = ", ".join(f"%{p.source}" for p in pieces[:4]) + (", ..." if len(pieces) > 4 else "")
        yield plan is not None, f"the places of the pieces {names} overlap without being equal"

    def traffic(self, match: Match) -> Dim:
        pieces, others, shape = (match.bindings[name] for name in ("pieces", "others", "shape"))
        width = match.uses.graph.tensors[match.root.outputs[0]].dtype.bytes
        whole = 3 * product(shape)
        before = sum((p.padding for p in pieces), start=0) + (len(pieces) + len(others) - 1) * whole
        return simplify((elements(match.bindings["plan"], shape) + len(others) * whole - before) * width)

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        result = build(match.bindings["plan"], match.bindings["shape"], builder, values)
        for name in match.bindings["others"]:
            result = result + values[name]
        return (result,)


# ---- the sum --------------------------------------------------------------------------------------------------------
def _is_sum(uses: Uses, node: Node) -> bool:
    """Whether `node` adds two different arrays of the result's shape."""
    tensors = uses.graph.tensors
    if not isinstance(node.op, Elementwise) or node.op.kind != "add":
        return False
    if node.inputs[0] == node.inputs[1]:
        return False
    return all(same_shape(tensors[i].shape, tensors[node.outputs[0]].shape) for i in node.inputs)


def _continues(uses: Uses, node: Node) -> bool:
    """Whether the sum is a term of another sum and has no other use."""
    readers = uses.readers[node.outputs[0]]
    return len(readers) == 1 and _is_sum(uses, readers[0]) and node.outputs[0] not in uses.visible


def terms(uses: Uses, root: Node) -> list[tuple[str, Node]]:
    """The terms of the tree of additions below `root`, in order, each with the addition that reads it."""
    result: list[tuple[str, Node]] = []
    stack = [(name, root) for name in reversed(root.inputs)]
    while stack:
        name, reader = stack.pop()
        node = uses.producers.get(name)
        if node is not None and _is_sum(uses, node) and uses.only_reader(name, reader):
            stack += [(inner, node) for inner in reversed(node.inputs)]
        else:
            result.append((name, reader))
    return result


# ---- the pieces -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SlicedPiece:
    """A term that is zero outside a box, where it is `source` seen through `movement`."""

    source: str
    movement: tuple[Operator, ...]
    box: Box
    padding: Dim
    """The number of elements that the pads of the term read and write."""


def piece_of(uses: Uses, name: str, reader: Node) -> SlicedPiece | None:
    """The term `name` of a sum as a piece; None if it is not padded or has another reader."""
    chain: list[Node] = []
    while (node := uses.producers.get(name)) is not None and uses.only_reader(name, reader):
        zeros = isinstance(node.op, Pad) and node.op.value == 0
        if not zeros and not isinstance(node.op, Permute | ViewOp):
            break
        chain.append(node)
        name, reader = node.inputs[0], node
    while chain and not isinstance(chain[-1].op, Pad):
        name = chain.pop().outputs[0]
    return _upwards(uses, name, chain[::-1])


def _upwards(uses: Uses, source: str, chain: Sequence[Node]) -> SlicedPiece | None:
    """Follow the operators from `source` to the term; a view that cuts through padding starts a new piece."""
    tensors = uses.graph.tensors
    movement: list[Operator] = []
    box: Box = tuple((0, size) for size in tensors[source].shape)
    padding: Dim = 0
    for node in chain:
        before, after = tensors[node.inputs[0]], tensors[node.outputs[0]]
        match node.op:
            case Pad(pads=pads):
                ranges = zip(box, pads, strict=True)
                box = tuple((simplify(start + low), simplify(stop + low)) for (start, stop), (low, _) in ranges)
                padding = padding + before.size + after.size
            case Permute(dims=dims):
                box = tuple(box[d] for d in dims)
                movement.append(node.op)
            case _:
                seen = _view_of_box(box, before.shape, after.shape)
                if seen is None:
                    source, movement, padding = node.outputs[0], [], 0
                    box = tuple((0, size) for size in after.shape)
                else:
                    box = seen
                    movement.append(ViewOp(tuple(simplify(stop - start) for start, stop in box)))
    return SlicedPiece(source, tuple(movement), box, padding) if not same(padding, 0) else None


def _view_of_box(box: Box, before: Shape, after: Shape) -> Box | None:
    """The box under a view that preserves its cut dimensions, else None."""
    seen = [(0, size) for size in after]
    for d, (start, stop) in enumerate(box):
        if same(start, 0) and same(stop, before[d]):
            continue
        outer = product(before[:d])
        kept = [e for e, size in enumerate(after) if same(size, before[d]) and same(product(after[:e]), outer)]
        if not kept:
            return None
        seen[kept[0]] = (start, stop)
    return tuple(seen)


# ---- the plan -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sum:
    """Pieces with the same range."""

    pieces: tuple[SlicedPiece, ...]


@dataclass(frozen=True)
class Padded:
    """A plan with zeros around it along one dimension."""

    dim: int
    place: tuple[Dim, Dim]
    inner: Plan


@dataclass(frozen=True)
class Row:
    """Plans one after the other along one dimension, with their ranges."""

    dim: int
    places: tuple[tuple[Dim, Dim], ...]
    inner: tuple[Plan, ...]


Plan: TypeAlias = Sum | Padded | Row


def arrange(pieces: Sequence[SlicedPiece], shape: Shape, done: frozenset[int] = frozenset()) -> Plan | None:
    """How to assemble the pieces, one dimension after the other; None where ranges overlap in part.

    `done` are the dimensions along which all the pieces already share their range.
    """
    groups: dict[int, dict[tuple[Dim, Dim], list[SlicedPiece]]] = {}
    for d in range(len(shape)):
        if d not in done:
            groups[d] = {}
            for piece in pieces:
                groups[d].setdefault(piece.box[d], []).append(piece)
    for d in sorted(groups, key=lambda d: len(groups[d]) > 1):  # ranges that all have in common come first
        places = _in_order(list(groups[d]))
        if places is None:
            continue
        inner = [arrange(groups[d][place], shape, done | {d}) for place in places]
        plans = [plan for plan in inner if plan is not None]
        if len(plans) < len(inner):
            return None
        if len(places) > 1:
            return Row(d, tuple(places), tuple(plans))
        return plans[0] if same(places[0][1] - places[0][0], shape[d]) else Padded(d, places[0], plans[0])
    return None if groups else Sum(tuple(pieces))


def _in_order(places: list[tuple[Dim, Dim]]) -> list[tuple[Dim, Dim]] | None:
    """Disjoint ranges in ascending order; None if two overlap or disjointness cannot be proved."""
    if len(places) > 1:
        places = sorted(places, key=lambda place: float(_sample(place[0])))
        if not all(at_most(a[1], b[0]) for a, b in itertools.pairwise(places)):
            return None
    return places


def _sample(size: Dim) -> Dim:
    """The size with a number for each symbol: an order that `at_most` then proves for all of them."""
    return size if isinstance(size, int) else size.subs({s: 1009 + len(s.name) for s in size.free_symbols})


def gaps(row: Row, size: Dim) -> list[tuple[int, Dim]]:
    """Where zeros stand in a row: (position of the plan after them, how many)."""
    starts = [*(start for start, _ in row.places), size]
    stops = [0, *(stop for _, stop in row.places)]
    widths = [simplify(start - stop) for start, stop in zip(starts, stops, strict=True)]
    return [(position, width) for position, width in enumerate(widths) if not same(width, 0)]


def elements(plan: Plan, shape: Shape) -> Dim:
    """The number of elements that a plan reads and writes; `shape` is the shape of its result."""
    match plan:
        case Sum(pieces=pieces):
            return 3 * (len(pieces) - 1) * product(shape)
        case Padded(dim=dim, place=place, inner=inner):
            within = _resized(shape, dim, place)
            return elements(inner, within) + product(within) + product(shape)
        case Row(dim=dim, places=places, inner=inners):
            parts = [_resized(shape, dim, place) for place in places]
            moved = sum((elements(p, s) + product(s) for p, s in zip(inners, parts, strict=True)), start=product(shape))
            return moved + sum((2 * product(_resized(shape, dim, (0, n))) for _, n in gaps(plan, shape[dim])), start=0)


def build(plan: Plan, shape: Shape, builder: Graph, values: Mapping[str, Value]) -> Value:
    """Emit a plan; `shape` is the shape of its result."""
    match plan:
        case Sum(pieces=pieces):
            total: Value | None = None
            for piece in pieces:
                value = values[piece.source]
                for op in piece.movement:
                    value = value.apply(op)
                total = value if total is None else total + value
            assert total is not None
            return total
        case Padded(dim=dim, place=place, inner=inner):
            value = build(inner, _resized(shape, dim, place), builder, values)
            around = (place[0], simplify(shape[dim] - place[1]))
            return value.apply(Pad(tuple(around if d == dim else (0, 0) for d in range(len(shape)))))
        case Row(dim=dim, places=places, inner=inners):
            parts = [build(p, _resized(shape, dim, r), builder, values) for p, r in zip(inners, places, strict=True)]
            for position, width in reversed(gaps(plan, shape[dim])):
                zeros = Full(0.0, _resized(shape, dim, (0, width)), parts[0].dtype)
                parts[position:position] = builder.emit(zeros)
            (value,) = builder.emit(Concat(dim), *parts)
            return value


def _resized(shape: Shape, dim: int, place: tuple[Dim, Dim]) -> Shape:
    return tuple(simplify(place[1] - place[0]) if d == dim else size for d, size in enumerate(shape))
