"""Phases: the order in which the values of a kernel are computed, where they are kept, and when they are stored.

    phase by phase (column-reduction depth): columns(0), rows(0), columns(1), rows(1), ...
    rows(p):    parallel blocks { rows { scalars 0; lanes 0; scalars 1; lanes 1; ... } }
    columns(p): combine the blocks' partial results, then code on lanes and scalars that has no rows

A reduction over the lanes ends a lane map and begins the next stage of the row. A reduction over the rows accumulates
across them and begins the next phase. A value that a later stage needs is recomputed if that is cheap, else kept: in
the row of an output that is not yet written, or in one row of scratch per block. Planning proceeds from the last phase
and stage to the first, so each knows the needs of later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from daceml_train.codegen.kernel.expression import HALVES, accumulator, computed
from daceml_train.codegen.kernel.loops import Loops
from daceml_train.errors import Refused
from daceml_train.ops.elementwise import Elementwise, Full
from daceml_train.ops.random import Uniform
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import DType

KEEP_COST = 8
"""FLOPs per element up to which a value is recomputed in a later stage rather than kept."""
RANDOM_COST = 42
"""FLOPs of one random number."""
SCATTERED_COST = 16
"""FLOPs that take as long as reading one element of an argument whose lanes are not contiguous."""


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
    """The plan of `rows(p)`: stages, then the code that runs once per row after them."""

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


def once(items: list[str], item: str) -> None:
    """Append an item that is not yet in the list."""
    if item not in items:
        items.append(item)


class Staging:
    """The phases of one kernel: `rows[p]` (None if there is nothing to do) and `columns[p]`."""

    def __init__(self, loops: Loops, result_array: Sequence[str]) -> None:
        self.loops, self.leaves, self.result_array = loops, loops.leaves, result_array
        self.results = loops.domain.results
        self.kind, self.has_rows = loops.kind, loops.has_rows
        self.has_lanes, self.across = loops.has_lanes, loops.across
        self.order = {name: position for position, name in enumerate(self.leaves)}
        self.phase: dict[str, int] = {}
        for leaf in self.leaves.values():
            before = max((self.phase[i] for i in leaf.inputs), default=0)
            self.phase[leaf.name] = before + (self.kind(leaf) in ("column", "full"))
        self.last = max(self.phase.values(), default=0)
        self._depths: dict[tuple[str, int], int] = {}
        self.saved: set[str] = set()
        """Values that a phase reads from memory, written by an earlier one."""
        self.rows: list[Rows | None] = [None] * (self.last + 1)
        self.columns: list[Columns] = [Columns() for _ in range(self.last + 1)]
        for p in reversed(range(self.last + 1)):
            self.rows[p] = _RowPlan(self, p).plan()
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
            if n in cone or not self.has_lanes(n) or (n in kept and n != name):
                continue
            cone.add(n)
            if self.stored(n, p):
                total += SCATTERED_COST * self.loops.scattered(self.leaves[n])
                continue
            op = self.leaves[n].op
            total += op.row.flops if isinstance(op, Elementwise) else RANDOM_COST if isinstance(op, Uniform) else 0
            todo += self.leaves[n].inputs
        return total

    def accumulators(self, name: str) -> tuple[DType, DType]:
        """Element types in which a reduction is accumulated: within a segment, and beyond.

        Float lanes are added in float, except if several axes are reduced: these are statistics of normalizations,
        whose errors every element shares and later sums multiply, and their kernels are memory-bound.
        """
        leaf = self.leaves[name]
        assert isinstance(leaf.op, Reduce)
        total, near = accumulator(leaf.dtype, leaf.op.kind), computed(leaf.dtype)
        several = self.kind(leaf) == "row" and len(self.loops.lane_axes) > 1
        return (near if near is DType.float32 and not several else total), total

    def extent(self, number: int) -> str:
        """The extent over which a result is stored: `lanes` (every element), `rows`, or `columns` (no rows)."""
        axes = {self.loops.axis_of[a] for a in self.results[number].axes}
        if not axes:
            return "columns"
        if self.loops.lane_set and axes == self.loops.row_set | self.loops.lane_set:
            return "lanes"
        return "rows" if axes == self.loops.row_set else "columns"

    def _plan_columns(self, p: int) -> Columns:
        plan = Columns()
        plan.stores = [n for n in self.leaves if n in self.saved and not self.across(n) and self.phase[n] == p]
        for number, result in enumerate(self.results):
            if self.extent(number) == "columns" and self.phase[result.leaf] == p:
                plan.results.append(number)
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

        for v in plan.stores + [self.results[i].leaf for i in plan.results]:
            want(v)
        for n, leaf in self.leaves.items():
            if n in wanted and not isinstance(leaf.op, Full):
                if self.kind(leaf) in ("column", "full"):
                    plan.combined.append(n)
                else:
                    (plan.lanes if self.has_lanes(n) else plan.scalars).append(n)
        return plan

    def _check_updates(self) -> None:
        """An argument that a result overwrites must not be read in a later phase."""
        for number, result in enumerate(self.results):
            if result.target is None:
                continue
            if self.extent(number) == "rows" and self.loops.lane_axes:
                raise Refused(f"other threads of a row may read argument {result.target} after its new value is stored")
            before_rows = self.extent(number) == "columns"  # the rows of the same phase come after it
            for p in range(self.phase[result.leaf] + (not before_rows), self.last + 1):
                rows = self.rows[p]
                loads = {v for s in rows.stages for v in s.loads + s.reads} if rows else set()
                loads |= {i for s in (rows.stages if rows else ()) for v in s.scalars for i in self.leaves[v].inputs}
                if p > self.phase[result.leaf]:
                    loads |= {i for v in self.columns[p].lanes + self.columns[p].scalars for i in self.leaves[v].inputs}
                elif not result.axes:  # it is stored before the lanes of the same phase are computed
                    loads |= self._before_lanes(p)
                if any(self.leaves[v].op is None and self.leaves[v].argument == result.target for v in loads):
                    raise Refused(f"argument {result.target} is read after its new value is stored")

    def _before_lanes(self, p: int) -> set[str]:
        """What the lanes of `columns(p)` read, also through values that they share, which a GPU's threads recompute."""
        todo = [
            *self.columns[p].lanes,
            *(self.results[i].leaf for i in self.columns[p].results if self.results[i].axes),
        ]
        found: set[str] = set()
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += () if self.kind(self.leaves[name]) else self.leaves[name].inputs
        return found


class _RowPlan:
    """Plans `rows(p)`: the values that each stage computes, reads, keeps and stores."""

    def __init__(self, phases: Staging, p: int) -> None:
        self.phases, self.p, self.leaves = phases, p, phases.leaves
        self.last: dict[str, int] = {}
        """Kept value -> the last stage that reads it."""

    def depth(self, name: str) -> int:
        """The stage in which a value first becomes available."""
        return self.phases.depth(name, self.p)

    def plan(self) -> Rows | None:
        """The plan, or None if there is nothing to do."""
        phases, p = self.phases, self.p
        ends = [n for n, leaf in self.leaves.items() if phases.kind(leaf) in ("column", "full")]
        ends = [n for n in ends if phases.phase[n] == p + 1]
        here = [i for i, r in enumerate(phases.results) if phases.phase[r.leaf] == p]
        lane_results = [i for i in here if phases.extent(i) == "lanes"]
        row_results = [i for i in here if phases.extent(i) == "rows"]
        row_stores = [n for n in self.leaves if n in phases.saved and phases.has_rows(n) and phases.phase[n] == p]
        sinks = [self.leaves[n].inputs[0] for n in ends] + row_stores
        sinks += [phases.results[i].leaf for i in lane_results + row_results]
        if not sinks:
            return None
        self.stages = [Stage() for _ in range(max(map(self.depth, sinks)) + 1)]
        self.rows = Rows(self.stages, {}, scalar_results=row_results, scalar_stores=row_stores)
        self.demand(ends, lane_results)
        for k in reversed(range(len(self.stages))):  # later stages demand reductions and kept values of earlier ones
            stage = self.stages[k]
            stage.keeps = [v for v in self.rows.kept if self.depth(v) == k]
            for v in [phases.results[i].leaf for i in stage.results] + stage.keeps:
                self.want(v, k)
            for v in stage.rows + stage.columns + stage.fulls:
                self.want(self.leaves[v].inputs[0], k)
        for stage in self.stages:
            for names in (stage.scalars, stage.lanes, stage.loads, stage.reads):
                names.sort(key=phases.order.__getitem__)
        self.place_kept(lane_results)
        return self.rows

    def demand(self, ends: Sequence[str], lane_results: Sequence[int]) -> None:
        """Assign reductions that end the phase and stored results to their stages."""
        for n in ends:
            source = self.leaves[n].inputs[0]
            if self.phases.kind(self.leaves[n]) == "full":
                self.stages[self.depth(source)].fulls.append(n)
            elif self.phases.has_lanes(source):
                self.stages[self.depth(source)].columns.append(n)
            else:
                self.scalar(source)
                self.rows.scalar_columns.append(n)
        for i in lane_results:  # in the stage that computes it, but last if it overwrites an argument
            result = self.phases.results[i]
            stage = len(self.stages) - 1 if result.target is not None else self.depth(result.leaf)
            self.stages[stage].results.append(i)
        for v in [self.phases.results[i].leaf for i in self.rows.scalar_results] + self.rows.scalar_stores:
            self.scalar(v)

    def scalar(self, v: str) -> None:
        """Request a value that all lanes share."""
        leaf = self.leaves[v]
        if isinstance(leaf.op, Full) or leaf.op is None:
            return
        if self.phases.stored(v, self.p):
            self.phases.saved.add(v)
        elif self.phases.kind(leaf) == "row":
            once(self.stages[self.depth(leaf.inputs[0])].rows, v)
        elif v not in self.stages[self.depth(v)].scalars:
            for i in leaf.inputs:
                self.scalar(i)
            self.stages[self.depth(v)].scalars.append(v)

    def want(self, v: str, k: int) -> None:
        """Request a value in the lane map of stage k."""
        leaf, stage, p = self.leaves[v], self.stages[k], self.p
        if isinstance(leaf.op, Full) or v in stage.lanes:
            return
        if not self.phases.has_lanes(v):
            self.scalar(v)
            once(stage.reads, v)
        elif self.phases.stored(v, p):
            if leaf.op is not None:
                self.phases.saved.add(v)
            once(stage.loads, v)
        elif self.depth(v) < k and (v in self.rows.kept or self.phases.cost(v, p, self.rows.kept) > KEEP_COST):
            self.last.setdefault(v, k)
            self.rows.kept.setdefault(v, "")
            once(stage.loads, v)
        else:
            for i in leaf.inputs:
                self.want(i, k)
            stage.lanes.append(v)

    def place_kept(self, lane_results: Sequence[int]) -> None:
        """Keep each value in a result's row that is written no earlier than the value's last use, else in scratch."""
        results, layouts, kept = self.phases.results, self.phases.loops.results, self.rows.kept
        free = [i for i in lane_results if results[i].target is None and layouts[i].dtype not in HALVES]
        for v in sorted(kept, key=self.phases.order.__getitem__):
            own = [i for i in free if results[i].leaf == v]
            later = [
                i
                for i in free
                if self.last[v] <= self.depth(results[i].leaf) > self.depth(v)
                and layouts[i].dtype is self.leaves[v].dtype
            ]
            room = next(iter(own + later), None)
            kept[v] = f"keep_{v}" if room is None else self.phases.result_array[room]
            if room is not None and not own:
                free.remove(room)
        for stage in self.stages:  # a value kept in its own result is stored once
            stored = {results[i].leaf: self.phases.result_array[i] for i in stage.results}
            stage.keeps = [v for v in stage.keeps if stored.get(v) != kept[v]]
