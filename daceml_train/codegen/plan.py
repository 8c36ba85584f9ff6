"""Plan: from a domain and memory layouts to loops, before any SDFG exists.

    phase by phase (column-reduction depth): columns(0), rows(0), columns(1), rows(1), ...
    rows(p):    parallel blocks { rows { scalars 0; lanes 0; scalars 1; lanes 1; ... } }
    columns(p): combine the blocks' partial results, then code on lanes and scalars that has no rows

A reduction over the lanes ends a lane map and begins the next stage of the row. A reduction over the rows accumulates
across them and begins the next phase. What a later stage needs is recomputed if that is cheap, else kept: in the
row of an output that is not yet written, or in one row of scratch per block.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import sympy

from daceml_train.codegen.domain import Domain, Leaf, Split
from daceml_train.codegen.expression import accumulator, cast, computed, elementwise, literal
from daceml_train.errors import Refused
from daceml_train.ops.elementwise import Cast, Elementwise, Full, Iota
from daceml_train.ops.random import Uniform
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import Dim, DType, product, same, simplify, symbol

KEEP_COST = 8
"""FLOPs per element up to which a value is recomputed in a later stage rather than kept."""
TILE = 1024
"""Lanes per tile where tiles of lanes are what runs in parallel."""
SQUARE, SQUARE_LANES = 32, 128
"""Rows and lanes that are walked together where an array is contiguous across the rows."""
WIDE = 8192
"""Lanes from which accumulators for all of them no longer stay in the first-level cache."""


@dataclass(frozen=True)
class Layout:
    """Where an operand or result lies: sizes, strides in elements (0 along broadcast dimensions), element type."""

    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    dtype: DType


@dataclass(frozen=True)
class Axis:
    """A loop: its variable and its size, which the generated code knows as `<name>_size`."""

    name: str
    size: Dim


@dataclass
class Array:
    """An array of the SDFG: a view of an argument, of a result, or scratch memory."""

    name: str
    dtype: DType
    axes: tuple[str, ...]
    """Loops that index it; `block` for one part per block."""
    strides: tuple[Dim, ...] = ()
    pointer: tuple[str, int] = ("scratch", 0)
    """`input`, `output` or `scratch`, and the position there."""
    offset: Dim = 0
    bytes: Dim = 0
    """Scratch arrays only."""


@dataclass
class Stage:
    """One lane map and the scalar code before it. Names of leaves, in evaluation order."""

    scalars: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    fulls: list[str] = field(default_factory=list)
    keeps: list[str] = field(default_factory=list)
    results: list[int] = field(default_factory=list)


@dataclass
class Rows:
    """The plan of `rows(p)`: stages, then what happens once per row after them."""

    stages: list[Stage]
    kept: dict[str, str]
    """Value -> array in whose row it is kept."""
    scalar_columns: list[str] = field(default_factory=list)
    scalar_results: list[int] = field(default_factory=list)
    scalar_stores: list[str] = field(default_factory=list)
    """Per-row values that a later phase reads."""


@dataclass
class Columns:
    """The plan of `columns(p)`: reductions to combine, then code on scalars, then code on lanes."""

    combined: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)


def once(items: list, item: object) -> None:
    """Append an item that is not yet in the list."""
    if item not in items:
        items.append(item)


def hint(size: Dim) -> float:
    """A number for a size, for decisions that may be wrong without harm: symbols count as 64."""
    return float(size) if isinstance(size, int) else float(size.subs(dict.fromkeys(size.free_symbols, 64)))


class Plan:
    """All decisions of one kernel. `structure` is its identity; sizes, strides and constants are arguments."""

    def __init__(self, domain: Domain, operands: Sequence[Layout], results: Sequence[Layout]) -> None:
        self.domain, self.operands, self.layouts = domain, operands, results
        self.leaves = domain.leaves
        self.order = {name: position for position, name in enumerate(self.leaves)}
        self.memory = [self._load_strides(leaf) for leaf in self.leaves.values() if leaf.op is None]
        self.stores = [self._result_strides(i) for i in range(len(results))]
        self.constants: dict[str, Dim] = {}
        self.reals: list[str] = []
        self._choose_axes()
        self._choose_mode()
        self._name_arrays()
        self.phase: dict[str, int] = {}
        for leaf in self.leaves.values():
            before = max((self.phase[i] for i in leaf.inputs), default=0)
            self.phase[leaf.name] = before + (self.kind(leaf) in ("column", "full"))
        self.phases = max(self.phase.values(), default=0)
        self._depths: dict[tuple[str, int], int] = {}
        self.saved: set[str] = set()
        """Values that a phase reads from memory, written by an earlier one."""
        self._plan_phases()
        self._name_scratch()
        self.text = {name: self._text(leaf) for name, leaf in self.leaves.items()}

    # ---- strides and axes -----------------------------------------------------------------------------------------
    def _load_strides(self, leaf: Leaf) -> dict[int, Dim]:
        strides = self.operands[leaf.argument].strides
        return {axis: simplify(strides[dim] * multiple) for axis, dim, multiple in leaf.terms}

    def _result_strides(self, position: int) -> dict[int, Dim]:
        result, strides = self.domain.results[position], {}
        for dim, stride in zip(result.dims, self.layouts[position].strides, strict=True):
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
        splits = self.domain.splits
        self.flat = not splits
        if splits:
            split = max(splits, key=lambda s: sum(unit[a] for a in s.lanes) - sum(unit[a] for a in s.rows))
        else:
            split = Split(frozenset(), self.domain.axes)

        def compare(a: int, b: int) -> int:
            for strides in arrays:
                x, y = strides.get(a, 0), strides.get(b, 0)
                if not same(x, y) and not same(x, 0) and not same(y, 0):
                    return -1 if hint(x) > hint(y) else 1
            return a - b

        kinds = [(leaf.index, leaf.index and leaf.op) for leaf in self.leaves.values() if leaf.index]
        indices = [dict(index) for index, _ in kinds]

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

        rows, lanes = merged(split.rows), merged(split.lanes)
        if self.flat and len(lanes) > 1:
            rows, lanes = lanes[:-1], lanes[-1:]
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

    def _size(self, group: Sequence[int]) -> Dim:
        return product(self.domain.sizes[a] for a in group)

    def kind(self, leaf: Leaf) -> str:
        """`row`, `column` or `full` for reductions, `""` for all else."""
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

    def across(self, name: str) -> bool:
        """Whether a value exists per element of the loops, not once for all of them."""
        return self.has_rows(name) or (self.flat and self.has_lanes(name))

    def _choose_mode(self) -> None:
        """`flat`: no reduction but full ones; `rows`: blocks of rows; `tiles`: blocks of lanes, each with all rows."""
        kinds = {self.kind(leaf) for leaf in self.leaves.values()}
        rows = hint(product(a.size for a in self.row_axes))
        lanes = hint(product(a.size for a in self.lane_axes))
        columns = [leaf for leaf in self.leaves.values() if self.kind(leaf) == "column"]
        tiled = (
            bool(columns) and not kinds & {"row", "full"}
            and (lanes >= WIDE or (rows <= 64 and lanes >= 512))
            and all(self.has_lanes(leaf.inputs[0]) for leaf in columns)
            and all(self.has_lanes(n) for n, leaf in self.leaves.items() if self.has_rows(n) and leaf.op is not None)
            and all(frozenset(map(self.axis_of.__getitem__, r.axes)) >= self.lane_set for r in self.domain.results)
        )  # fmt: skip
        self.mode = "flat" if self.flat else "tiles" if tiled else "rows"
        across = self.innermost[self.row_axes[-1].name] if self.flat and self.row_axes else -1
        inner = self.innermost[self.lane_axes[-1].name] if self.lane_axes else -1
        self.squares = any(same(s.get(across, 0), 1) for s in self.memory + self.stores)
        """Whether an array is contiguous across the rows: then rows and lanes are walked in squares."""
        reads = [leaf.name for leaf in self.leaves.values() if leaf.op is None]
        self.turned = [
            n for n, s in zip(reads, self.memory, strict=True) if same(s.get(across, 0), 1) and not same(s.get(inner, 0), 0)
        ]
        """Arguments of which each square is first copied, row by contiguous row."""

    # ---- arrays ---------------------------------------------------------------------------------------------------
    def _name_arrays(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.place: dict[str, str] = {}
        """Argument read -> its array."""
        self.result_array: list[str] = []
        loops = [a.name for a in self.row_axes + self.lane_axes]

        def array(name: str, strides: dict[int, Dim], dtype: DType, pointer: tuple[str, int], offset: Dim) -> Array:
            where = {n: strides[self.innermost[n]] for n in loops if not same(strides.get(self.innermost[n], 0), 0)}
            return Array(name, dtype, tuple(where), tuple(where.values()), pointer, offset)

        def shape(a: Array) -> tuple:
            return a.axes, a.strides, a.offset, a.pointer

        reads = [leaf for leaf in self.leaves.values() if leaf.op is None]
        for number, (leaf, strides) in enumerate(zip(reads, self.memory, strict=True)):
            layout = self.operands[leaf.argument]
            offset = simplify(sum((layout.strides[d] * m for d, m in leaf.offset), start=0))
            made = array(f"x{number}", strides, layout.dtype, ("input", leaf.argument), offset)
            twin = next((a.name for a in self.arrays.values() if shape(a) == shape(made)), None)
            self.place[leaf.name] = twin or made.name
            if twin is None:
                self.arrays[made.name] = made
        targets = {r.target for r in self.domain.results if r.target is not None}
        outputs = 0
        for number, (result, strides) in enumerate(zip(self.domain.results, self.stores, strict=True)):
            if result.target is None:
                made = array(f"y{number}", strides, self.layouts[number].dtype, ("output", outputs), 0)
                outputs += 1
            else:
                made = array(f"y{number}", strides, self.layouts[number].dtype, ("input", result.target), 0)
            twin = next((a.name for a in self.arrays.values() if a.pointer == made.pointer), None)
            if twin is not None:
                if shape(self.arrays[twin]) != shape(made):
                    raise Refused(f"result {number} is stored over argument {result.target} under another index")
                made = self.arrays[twin]
            self.arrays[made.name] = made
            self.result_array.append(made.name)
        for target in targets:
            if sum(a.pointer == ("input", target) for a in self.arrays.values()) > 1:
                raise Refused(f"argument {target} is written and read under several indices")

    def _name_scratch(self) -> None:
        """Scratch arrays: accumulators and partial results of columns, kept rows, values between phases."""
        lanes = tuple(a.name for a in self.lane_axes)
        whole = {a.name: a.size for a in self.row_axes + self.lane_axes} | {"block": symbol("blocks")}
        self.scratch: list[Array] = []

        def add(name: str, axes: Sequence[str], dtype: DType) -> None:
            strides: list[Dim] = []
            step: Dim = 1
            for axis in reversed(axes):
                strides.append(step)
                step = step * (TILE if self.mode == "tiles" and axis in lanes else whole[axis])
            pointer = ("scratch", len(self.scratch))
            made = Array(name, dtype, tuple(axes), tuple(reversed(strides)), pointer, 0, step * dtype.bytes)
            self.scratch.append(made)
            self.arrays[name] = made

        for name in self.turned:
            dtype = self.arrays[self.place[name]].dtype
            pointer = ("scratch", len(self.scratch))
            bytes_of = symbol("blocks") * SQUARE_LANES * (SQUARE + 1) * dtype.bytes
            axes = ("block", self.lane_axes[-1].name, self.row_axes[-1].name)
            made = Array(f"square_{name}", dtype, axes, (SQUARE_LANES * (SQUARE + 1), SQUARE + 1, 1), pointer, 0, bytes_of)
            self.scratch.append(made)
            self.arrays[made.name] = made
        tile = ("block", self.lane_axes[-1].name) if self.mode == "tiles" else ("block", *lanes)
        for name, leaf in self.leaves.items():
            kind = self.kind(leaf)
            if kind in ("column", "full"):
                dtype, total = self.accumulators(name)
                vector = kind == "column" and self.has_lanes(leaf.inputs[0])
                if vector and dtype is not total:
                    add(f"sum_{name}", tile, dtype)
                add(f"part_{name}", tile if vector else ("block",), total)
        for plan in self.rows:
            for name, array in (plan.kept.items() if plan else ()):
                if array.startswith("keep_"):
                    add(array, tile, computed(self.leaves[name].dtype))
        for name in sorted(self.saved, key=self.order.__getitem__):
            dtype = computed(self.leaves[name].dtype)
            if self.has_rows(name):
                add(f"row_{name}", tuple(a.name for a in self.row_axes), dtype)
            elif self.has_lanes(name):
                add(f"column_{name}", tile if self.mode == "tiles" else lanes, dtype)

    def accumulators(self, name: str) -> tuple[DType, DType]:
        """Element types in which a reduction is accumulated: within a segment, and beyond."""
        leaf = self.leaves[name]
        assert isinstance(leaf.op, Reduce)
        total = accumulator(leaf.dtype, leaf.op.kind)
        near = computed(leaf.dtype)
        return (near if near is DType.float32 else total), total

    # ---- phases ---------------------------------------------------------------------------------------------------
    def _plan_phases(self) -> None:
        self.rows: list[Rows | None] = [None] * (self.phases + 1)
        self.columns: list[Columns] = [Columns() for _ in range(self.phases + 1)]
        for p in reversed(range(self.phases + 1)):
            self.rows[p] = self._plan_rows(p)
            self.columns[p] = self._plan_columns(p)
        self._check_updates()

    def stored(self, name: str, p: int) -> bool:
        """Whether a value can be read from memory in `rows(p)`."""
        leaf = self.leaves[name]
        if leaf.op is None:
            return True
        if not self.across(name):
            return self.phase[name] > 0
        return not self.has_lanes(name) and self.phase[name] < p

    def depth(self, name: str, p: int) -> int:
        """Number of row reductions of phase p on the longest path to a value."""
        if self.stored(name, p):
            return 0
        if (name, p) not in self._depths:
            leaf = self.leaves[name]
            before = max((self.depth(i, p) for i in leaf.inputs), default=0)
            self._depths[name, p] = before + (self.kind(leaf) == "row")
        return self._depths[name, p]

    def cost(self, name: str, p: int, kept: dict[str, str]) -> int:
        """FLOPs per element to recompute a lane value from memory, kept values and per-row values."""
        cone: set[str] = set()
        todo, total = [name], 0
        while todo:
            n = todo.pop()
            if n in cone or self.stored(n, p) or not self.has_lanes(n) or (n in kept and n != name):
                continue
            cone.add(n)
            op = self.leaves[n].op
            total += op.row.flops if isinstance(op, Elementwise) else 42 if isinstance(op, Uniform) else 0
            todo += self.leaves[n].inputs
        return total

    def _plan_rows(self, p: int) -> Rows | None:
        ends = [n for n, leaf in self.leaves.items() if self.kind(leaf) in ("column", "full") and self.phase[n] == p + 1]
        lane_results: list[int] = []
        row_results: list[int] = []
        for number, result in enumerate(self.domain.results):
            axes = {self.axis_of[a] for a in result.axes}
            if axes and axes == self.row_set | self.lane_set and self._phase_of_result(result.leaf) == p:
                (lane_results if self.lane_set else row_results).append(number)
            elif axes and axes == self.row_set and self._phase_of_result(result.leaf) == p:
                row_results.append(number)
        row_stores = [
            n for n in self.saved if self.has_rows(n) and not self.has_lanes(n) and self.phase[n] == p
        ]
        source = {n: self.leaves[n].inputs[0] for n in ends}
        leaf_of = {i: self.domain.results[i].leaf for i in lane_results + row_results}
        sinks = [*source.values(), *leaf_of.values(), *row_stores]
        if not sinks:
            return None
        stages = [Stage() for _ in range(max(self.depth(v, p) for v in sinks) + 1)]
        kept: dict[str, str] = {}
        last: dict[str, int] = {}
        plan = Rows(stages, kept)

        def scalar(v: str) -> None:
            leaf = self.leaves[v]
            if isinstance(leaf.op, Full):
                return
            if self.stored(v, p):
                if leaf.op is not None:
                    self.saved.add(v)
                return
            if self.kind(leaf) == "row":
                once(stages[self.depth(leaf.inputs[0], p)].rows, v)
                return
            for i in leaf.inputs:
                scalar(i)
            once(stages[self.depth(v, p)].scalars, v)

        def want(v: str, k: int) -> None:
            leaf = self.leaves[v]
            if isinstance(leaf.op, Full):
                return
            if not self.has_lanes(v):
                scalar(v)
                once(stages[k].reads, v)
            elif self.stored(v, p):
                if leaf.op is not None:
                    self.saved.add(v)
                once(stages[k].loads, v)
            elif self.depth(v, p) < k and (v in kept or self.cost(v, p, kept) > KEEP_COST):
                last.setdefault(v, k)
                kept.setdefault(v, "")
                once(stages[k].loads, v)
            else:
                for i in leaf.inputs:
                    want(i, k)
                once(stages[k].lanes, v)

        for n in ends:
            if self.kind(self.leaves[n]) == "full":
                stages[self.depth(source[n], p)].fulls.append(n)
            elif self.has_lanes(source[n]):
                stages[self.depth(source[n], p)].columns.append(n)
            else:
                scalar(source[n])
                plan.scalar_columns.append(n)
        for i in lane_results:
            stages[self._result_stage(i, p, len(stages))].results.append(i)
        plan.scalar_results, plan.scalar_stores = row_results, sorted(row_stores, key=self.order.__getitem__)
        for v in [leaf_of[i] for i in row_results] + plan.scalar_stores:
            if not isinstance(self.leaves[v].op, Full):
                scalar(v)
        for k in reversed(range(len(stages))):  # later stages demand reductions and kept values of earlier ones
            stage = stages[k]
            stage.keeps = [v for v in kept if self.depth(v, p) == k]
            for v in [leaf_of[i] for i in stage.results] + stage.keeps:
                want(v, k)
            for v in stage.rows + stage.columns + stage.fulls:
                want(self.leaves[v].inputs[0], k)
        for stage in stages:
            stage.scalars.sort(key=self.order.__getitem__)
            stage.lanes.sort(key=self.order.__getitem__)
            stage.loads.sort(key=self.order.__getitem__)
            stage.reads.sort(key=self.order.__getitem__)
        self._place_kept(plan, p, lane_results, last)
        return plan

    def _phase_of_result(self, name: str) -> int:
        return self.phase[name]

    def _result_stage(self, number: int, p: int, stages: int) -> int:
        """The stage that stores a lane result: where it is computed; the last one if it overwrites an argument."""
        if self.domain.results[number].target is not None:
            return stages - 1
        return self.depth(self.domain.results[number].leaf, p)

    def _place_kept(self, plan: Rows, p: int, results: Sequence[int], last: dict[str, int]) -> None:
        """Keep each value in a result's row that is written no earlier than the value's last use, else in scratch."""
        free: list[int] = []
        for i in results:
            layout, result = self.layouts[i], self.domain.results[i]
            if result.target is None and layout.dtype is computed(layout.dtype):
                free.append(i)
        for v in sorted(plan.kept, key=self.order.__getitem__):
            same_value = next((i for i in free if self.domain.results[i].leaf == v), None)
            room = same_value
            if room is None:
                for i in free:
                    stage = self.depth(self.domain.results[i].leaf, p)
                    fits = stage >= last[v] and stage > self.depth(v, p) and self.layouts[i].dtype is self.leaves[v].dtype
                    if fits:
                        room = i
                        break
            if room is None:
                plan.kept[v] = f"keep_{v}"
                continue
            plan.kept[v] = self.result_array[room]
            if same_value is None:
                free.remove(room)
        for stage in plan.stages:  # a value kept in its own result is stored once
            own = {self.domain.results[i].leaf: self.result_array[i] for i in stage.results}
            stage.keeps = [v for v in stage.keeps if own.get(v) != plan.kept[v]]

    def _plan_columns(self, p: int) -> Columns:
        plan = Columns()
        sinks = [n for n in self.saved if not self.across(n) and self.phase[n] == p]
        for number, result in enumerate(self.domain.results):
            axes = {self.axis_of[a] for a in result.axes}
            whole = bool(axes) and (axes == self.row_set | self.lane_set or axes == self.row_set)
            if not whole and self.phase[result.leaf] == p:
                plan.results.append(number)
                sinks.append(result.leaf)
        wanted: set[str] = set()

        def want(v: str) -> None:
            leaf = self.leaves[v]
            if v in wanted or leaf.op is None:
                return
            if 0 < self.phase[v] < p:
                self.saved.add(v)
                return
            wanted.add(v)
            if self.kind(leaf) not in ("column", "full"):
                for i in leaf.inputs:
                    want(i)

        for v in sinks:
            want(v)
        for n, leaf in self.leaves.items():
            if n in wanted and not isinstance(leaf.op, Full):
                if self.kind(leaf) in ("column", "full"):
                    plan.combined.append(n)
                else:
                    (plan.lanes if self.has_lanes(n) else plan.scalars).append(n)
        plan.stores = sorted((n for n in self.saved if not self.across(n) and self.phase[n] == p), key=self.order.get)  # type: ignore[arg-type]
        return plan

    def _check_updates(self) -> None:
        """An argument that a result overwrites must not be read in a later phase."""
        for result in self.domain.results:
            if result.target is None:
                continue
            for p in range(self.phase[result.leaf] + 1, self.phases + 1):
                rows = self.rows[p]
                loads = {v for s in rows.stages for v in s.loads + s.reads} if rows else set()
                loads |= {i for s in (rows.stages if rows else ()) for v in s.scalars for i in self.leaves[v].inputs}
                loads |= {i for v in self.columns[p].lanes + self.columns[p].scalars for i in self.leaves[v].inputs}
                if any(self.leaves[v].op is None and self.leaves[v].argument == result.target for v in loads):
                    raise Refused(f"argument {result.target} is read again after its new value is stored")

    # ---- identity -------------------------------------------------------------------------------------------------
    def integers(self) -> dict[str, Dim]:
        """Every integer that the generated code takes, by symbol: sizes, strides, offsets, constants."""
        values: dict[str, Dim] = {f"{a.name}_size": a.size for a in self.row_axes + self.lane_axes}
        for array in self.arrays.values():
            if array.pointer[0] == "scratch":
                continue
            for axis, stride in zip(array.axes, array.strides, strict=True):
                if not same(stride, 1):
                    values[f"{array.name}_{axis}"] = stride
            if not same(array.offset, 0):
                values[f"{array.name}_offset"] = array.offset
        return values | self.constants

    def structure(self) -> str:
        """All that the source depends on, as text: no names of the user, no sizes."""
        lines = [self.mode, str(self.squares), *(a.name for a in self.row_axes + self.lane_axes), *self.integers(), f"reals {self.reals}"]
        for a in self.arrays.values():
            unit = [same(s, 1) for s in a.strides] if a.pointer[0] != "scratch" else []
            lines.append(f"{a.name} {a.dtype.short} {a.axes} {unit} {a.pointer}")
        for name, leaf in self.leaves.items():
            how = leaf.op.kind if isinstance(leaf.op, Reduce) else ""
            lines.append(f"{name} {leaf.dtype.short} {self.place.get(name)} {self.kind(leaf)} {how} {leaf.inputs} {self.text[name]}")
        lines += [f"{r.leaf} {a} {len(r.dims) > 0}" for r, a in zip(self.domain.results, self.result_array, strict=True)]
        lines += [str(self._constant_text), str(sorted(self.saved)), str(self.rows), str(self.columns)]
        lines += [f"{len(self.operands)} {sum(r.target is None for r in self.domain.results)}"]
        return "\n".join(lines)

    # ---- code of one value ----------------------------------------------------------------------------------------
    def parameter(self, value: Dim) -> str:
        """The symbol of an integer that the caller passes."""
        for name, known in self.constants.items():
            if name not in self.reals and same(known, value):
                return name
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def constant(self, leaf: Leaf) -> str:
        """A constant: small round numbers in the text, others as arguments so that the code is shared."""
        assert isinstance(leaf.op, Full)
        value, dtype = leaf.op.value, computed(leaf.dtype)
        if isinstance(value, sympy.Expr) and not value.is_number:
            numerator, denominator = sympy.fraction(sympy.together(value))
            whole = value.is_integer
            parts = [value] if whole else [numerator, denominator]
            if not all(part.is_integer for part in parts):
                raise Refused(f"constant {value} is no ratio of whole sizes")
            texts = [f"({dtype.c}){self.parameter(simplify(part))}" for part in parts]
            return texts[0] if whole else f"({texts[0]} / {texts[1]})"
        if isinstance(value, sympy.Expr):
            value = int(value) if value.is_integer else float(value)
        number = float(value)
        if dtype is DType.bool or number != number or number in (float("inf"), -float("inf")):
            return literal(value, dtype)
        if abs(number) <= 16 and number * 2 == int(number * 2):
            return literal(value, dtype)
        if not dtype.is_float:
            return f"({dtype.c}){self.parameter(int(value))}"
        pattern = struct.unpack("<q", struct.pack("<d", number))[0]
        for name in self.reals:
            if self.constants[name] == pattern:
                return f"({dtype.c}){name}"
        name = f"c{len(self.constants)}"
        self.constants[name] = pattern
        self.reals.append(name)
        return f"({dtype.c}){name}"

    def operand(self, name: str) -> str:
        """How other code names a value: a constant is written out."""
        leaf = self.leaves[name]
        return self._constant_text[name] if isinstance(leaf.op, Full) else name

    @functools.cached_property
    def _constant_text(self) -> dict[str, str]:
        return {n: self.constant(leaf) for n, leaf in self.leaves.items() if isinstance(leaf.op, Full)}

    def _text(self, leaf: Leaf) -> str:
        """The right-hand side that computes a value."""
        op = leaf.op
        if op is None or isinstance(op, Full | Reduce):
            return ""
        texts = [self.operand(i) for i in leaf.inputs]
        kinds = [self.leaves[i].dtype for i in leaf.inputs]
        match op:
            case Elementwise():
                lane = self._lane_test(leaf)
                if lane is not None:
                    return lane
                values = [o.value if isinstance(o := self.leaves[i].op, Full) else None for i in leaf.inputs]
                return elementwise(op, texts, kinds, [v if isinstance(v, int | float) else None for v in values])
            case Cast():
                return cast(op, texts[0], kinds[0])
            case Iota():
                dtype = computed(leaf.dtype)
                index = self.index_text(leaf)
                if op.start == 0 and op.step == 1:
                    return f"({dtype.c}){index}"
                start, step = literal(op.start, dtype), literal(op.step, dtype)
                return f"({dtype.c})({start} + {step} * ({dtype.c}){index})"
            case Uniform():
                stream = self.parameter(op.stream) if op.stream else "0"
                return f"vm::uniform_{leaf.dtype.c}(vm::random_key({texts[0]}, {stream}), {self.index_text(leaf)})"
        raise Refused(f"{op.label} has no C++ form")

    def _lane_test(self, leaf: Leaf) -> str | None:
        """`iota == value` with one value for all lanes, in 32 bits: 64-bit comparisons halve the speed of a loop."""
        assert isinstance(leaf.op, Elementwise)
        if leaf.op.kind not in ("eq", "ne") or not self.lane_axes:
            return None
        for lane, value in (leaf.inputs, leaf.inputs[::-1]):
            op, last = self.leaves[lane].op, self.lane_axes[-1].name
            plain = isinstance(op, Iota) and op.start == 0 and op.step == 1 and op.dtype is DType.int64
            if plain and self.index_text(self.leaves[lane]) == f"({last})" and not self.has_lanes(value):
                test = f"vm::is_lane({last}, {self.operand(value)})"
                return test if leaf.op.kind == "eq" else f"(!{test})"
        return None

    def index_text(self, leaf: Leaf) -> str:
        """The linear index of `iota` and `uniform` in terms of the loops."""
        coefficient = {self.axis_of[a]: c for a, c in leaf.index if self.innermost[self.axis_of[a]] == a}
        terms = []
        for name, c in coefficient.items():
            terms.append(name if same(c, 1) else f"{name} * {self.parameter(c)}")
        return f"({' + '.join(terms)})" if terms else "0"


def plan(domain: Domain, operands: Sequence[Layout], results: Sequence[Layout]) -> Plan:
    """The loops of a kernel. Raises `Refused` with a sentence."""
    return Plan(domain, operands, results)
