"""Loops: which axes of a domain are rows or lanes, their order, and the parallel loop.

Axes along which every array is dense are merged into one loop. The innermost lane loop is the one along which most
elements are contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from daceml_train.codegen.kernel.domain import Domain, Leaf, Split
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import Dim, DType, hint, product, same, simplify

TILE = 1024
"""Lanes per tile if tiles of lanes run in parallel."""
SQUARE, SQUARE_LANES = 32, 128
"""Side of the squares of rows and lanes that are traversed where an array is contiguous across the rows."""
NARROW, ENOUGH = 8, 16
"""A contiguous loop of fewer elements is no vector: the innermost one of so many is vectorized, if there is one."""
WIDE = 8192
"""The number of lanes from which their accumulators exceed the first-level cache."""


@dataclass(frozen=True)
class Layout:
    """The layout of an operand or result: sizes, strides in elements (0 along broadcast dimensions), element type."""

    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    dtype: DType


@dataclass(frozen=True)
class Axis:
    """A loop: its variable and its size, which is `<name>_size` in the generated code."""

    name: str
    size: Dim


class Loops:
    """The loops of one kernel.

    `mode` is `flat` (only full reductions, if any: rows and lanes are distributed), `rows` (blocks of rows) or `tiles`
    (blocks of lanes, each with all rows).
    """

    def __init__(self, domain: Domain, operands: Sequence[Layout], results: Sequence[Layout]) -> None:
        self.domain, self.operands, self.results = domain, operands, results
        self.leaves = domain.leaves
        self.reads = [leaf for leaf in self.leaves.values() if leaf.op is None]
        self.memory = [self._load_strides(leaf) for leaf in self.reads]
        """Strides by axis of each argument read, and below of each result."""
        self.stores = [self._result_strides(i) for i in range(len(results))]
        self._choose_axes()
        self._choose_mode()

    def _load_strides(self, leaf: Leaf) -> dict[int, Dim]:
        strides = self.operands[leaf.argument].strides
        found: dict[int, Dim] = {}
        for axis, dim, multiple in leaf.terms:  # several of one axis read a diagonal
            found[axis] = simplify(found.get(axis, 0) + strides[dim] * multiple)
        return found

    def _result_strides(self, position: int) -> dict[int, Dim]:
        result, strides = self.domain.results[position], {}
        for dim, stride in zip(result.dims, self.results[position].strides, strict=True):
            for axis in reversed(dim):
                strides[axis] = stride
                stride = simplify(stride * self.domain.sizes[axis])
        return strides

    def _elements(self, strides: dict[int, Dim]) -> float:
        return hint(product(self.domain.sizes[a] for a, s in strides.items() if not same(s, 0)))

    def _choose_axes(self) -> None:
        """Split, order and merge the axes; fills `row_axes`, `lane_axes` and `axis_of` (old axis -> loop, factor)."""
        arrays = sorted(self.stores + self.memory, key=self._elements, reverse=True)
        unit = {a: sum(self._elements(s) for s in arrays if same(s.get(a, 0), 1)) for a in self.domain.axes}

        def compare(a: int, b: int) -> int:
            for strides in arrays:
                x, y = strides.get(a, 0), strides.get(b, 0)
                if not same(x, y) and not same(x, 0) and not same(y, 0):
                    return -1 if hint(x) > hint(y) else 1
            return a - b

        indices = [dict(leaf.index) for leaf in self.leaves.values() if leaf.index]

        def joined(outer: int, inner: int) -> bool:
            size = self.domain.sizes[inner]
            return all(
                same(s.get(outer, 0), simplify(s.get(inner, 0) * size)) for s in self.memory + self.stores + indices
            )

        def merged(axes: Iterable[int]) -> list[list[int]]:
            groups: list[list[int]] = []
            for axis in sorted(axes, key=functools.cmp_to_key(compare)):
                if groups and joined(groups[-1][-1], axis):
                    groups[-1].append(axis)
                else:
                    groups.append([axis])
            return groups

        splits = self.domain.splits
        self.flat = not splits
        split = Split(frozenset(), self.domain.axes)
        if splits:
            updating = any(result.target is not None for result in self.domain.results)  # of lanes, not of rows
            vector = {s: not updating and self._fills_vector(merged(s.lanes)) for s in splits}
            split = max(splits, key=lambda s: (vector[s], self._worth(s, unit)))
        rows, lanes = merged(split.rows), merged(split.lanes)
        if self.flat and len(lanes) > 1:
            chosen = lanes.pop(self._vector_axis(lanes))
            rows, lanes = lanes, [chosen]
        self.split = split
        self.row_axes = [Axis(f"r{i}", self._size(g)) for i, g in enumerate(rows)]
        self.lane_axes = [Axis(f"l{i}", self._size(g)) for i, g in enumerate(lanes)]
        self.axis_of: dict[int, str] = {}
        self.innermost: dict[str, int] = {}
        for axis, group in zip(self.row_axes + self.lane_axes, rows + lanes, strict=True):
            self.innermost[axis.name] = group[-1]
            for old in group:
                self.axis_of[old] = axis.name
        self.row_set = {a.name for a in self.row_axes}
        self.lane_set = {a.name for a in self.lane_axes}
        self.needs = {name: frozenset(self.axis_of[a] for a in leaf.axes) for name, leaf in self.leaves.items()}

    def _worth(self, split: Split, unit: Mapping[int, float]) -> float:
        """How good a split is, in elements: those that are contiguous along its lanes, less those along its rows."""
        return sum(unit[a] for a in split.lanes) - sum(unit[a] for a in split.rows)

    def _fills_vector(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether the innermost of these loops has enough elements for vectors, so that such lanes are preferred."""
        return bool(groups) and hint(self._size(groups[-1])) >= NARROW

    def _vector_axis(self, groups: Sequence[Sequence[int]]) -> int:
        """The position of the loop that is vectorized, of loops from the outermost to the innermost."""
        sizes = [self._size(group) for group in groups]
        if hint(sizes[-1]) >= NARROW:
            return -1
        return max(range(len(groups)), key=lambda i: (min(hint(sizes[i]), ENOUGH), i))

    def _size(self, group: Sequence[int]) -> Dim:
        return product(self.domain.sizes[a] for a in group)

    def kind(self, leaf: Leaf) -> str:
        """`row`, `column` or `full` for reductions, `""` for others."""
        if not isinstance(leaf.op, Reduce):
            return ""
        if leaf.reduced == self.domain.axes:
            return "full"
        return "row" if leaf.reduced == self.split.lanes else "column"

    def has_rows(self, name: str) -> bool:
        """Whether a value differs from row to row."""
        return bool(self.needs[name] & self.row_set)

    def has_lanes(self, name: str) -> bool:
        """Whether a value differs from lane to lane."""
        return bool(self.needs[name] & self.lane_set)

    def scattered(self, leaf: Leaf) -> bool:
        """Whether the lanes of an argument are not contiguous."""
        if leaf.op is not None or not self.lane_axes:
            return False
        stride = self._load_strides(leaf).get(self.innermost[self.lane_axes[-1].name], 0)
        return not same(stride, 0) and not same(stride, 1)

    def across(self, name: str) -> bool:
        """Whether a value exists per element of the loops rather than once."""
        return self.has_rows(name) or (self.flat and self.has_lanes(name))

    def _follow(self, reductions: Sequence[Leaf]) -> bool:
        """Whether one of these reductions depends on another."""
        after: set[str] = set()
        for name, leaf in self.leaves.items():
            if any(i in after for i in leaf.inputs):
                if leaf in reductions:
                    return True
                after.add(name)
            elif leaf in reductions:
                after.add(name)
        return False

    def _choose_mode(self) -> None:
        """Set `mode`, and how transposed arrays are read."""
        kinds = {self.kind(leaf) for leaf in self.leaves.values()}
        rows = hint(product(a.size for a in self.row_axes))
        lanes = hint(product(a.size for a in self.lane_axes))
        columns = [leaf for leaf in self.leaves.values() if self.kind(leaf) == "column"]
        per_row = any(
            self.has_rows(n) and not self.has_lanes(n) and leaf.op is not None for n, leaf in self.leaves.items()
        )
        tiled = (
            bool(columns)
            and not kinds & {"row", "full"}
            and (lanes >= WIDE or (rows <= 64 and lanes >= 512))
            and all(self.has_lanes(leaf.inputs[0]) for leaf in columns)
            and not (per_row and self._follow(columns))  # a later phase would read from memory what each tile stores
            and all(frozenset(map(self.axis_of.__getitem__, r.axes)) >= self.lane_set for r in self.domain.results)
        )
        self.mode = "flat" if self.flat else "tiles" if tiled else "rows"
        across = self.innermost[self.row_axes[-1].name] if self.flat and self.row_axes else -1
        inner = self.innermost[self.lane_axes[-1].name] if self.lane_axes else -1
        self.squares = any(same(s.get(across, 0), 1) for s in self.memory + self.stores)
        """Whether an array is contiguous across the rows, so rows and lanes are traversed in squares."""
        self.turned = [
            leaf.name
            for leaf, s in zip(self.reads, self.memory, strict=True)
            if same(s.get(across, 0), 1) and not same(s.get(inner, 0), 0)
        ]
        """Arguments whose squares are first copied, one contiguous row at a time."""
