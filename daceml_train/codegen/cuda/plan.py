"""Plan of a CUDA kernel: the decisions of a CPU kernel, plus register allocation and launch configuration."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import sympy

from daceml_train.codegen.cuda.geometry import Geometry, candidates
from daceml_train.codegen.kernel.arrays import Array, Arrays
from daceml_train.codegen.kernel.domain import Domain, Split
from daceml_train.codegen.kernel.expression import computed
from daceml_train.codegen.kernel.loops import Layout, Loops
from daceml_train.codegen.kernel.plan import Plan
from daceml_train.codegen.kernel.staging import Staging, once
from daceml_train.codegen.kernel.values import Values
from daceml_train.errors import Refused
from daceml_train.ops.elementwise import Full
from daceml_train.tensor import Dim, DType, hint, product, simplify, symbol

FEW_ROWS, MANY_LANES = 64, 1 << 17
"""Thresholds for distributing lanes only: few rows, or enough lanes to fill a device."""


@dataclass(frozen=True)
class Half:
    """The arrays that one of two launches reads and writes, by name."""

    reads: Set[str]
    writes: Set[str]

    @property
    def arrays(self) -> Set[str]:
        """All of them."""
        return self.reads | self.writes


class CudaLoops(Loops):
    """Loops of a CUDA kernel: the criteria for tiles of lanes as the parallel loop differ from the CPU's.

    Neighboring threads have neighboring elements, however few the innermost loop has.
    """

    def _fills_vector(self, groups: Sequence[Sequence[int]]) -> bool:
        return True

    def _worth(self, split: Split, unit: Mapping[int, float]) -> float:
        """A reduction over rows costs two more launches and another pass over what it reduces."""
        if any(result.target is not None for result in self.domain.results):  # updates are of lanes, not of rows
            return super()._worth(split, unit)
        again = [leaf for leaf in self.leaves.values() if leaf.reduced & split.rows]
        sizes = [product(self.domain.sizes[a] for a in self.leaves[leaf.inputs[0]].axes) for leaf in again]
        return super()._worth(split, unit) - sum(map(hint, sizes))

    def _vector_axis(self, groups: Sequence[Sequence[int]]) -> int:
        return -1

    def _choose_mode(self) -> None:
        super()._choose_mode()
        if self.mode == "flat":
            return
        kinds = {self.kind(leaf) for leaf in self.leaves.values()}
        lanes, rows = (product(a.size for a in axes) for axes in (self.lane_axes, self.row_axes))
        columns = [leaf for leaf in self.leaves.values() if self.kind(leaf) == "column"]
        tiled = (
            bool(columns)
            and not kinds & {"row", "full"}
            and isinstance(lanes, int)
            and (lanes >= MANY_LANES or (isinstance(rows, int) and rows <= FEW_ROWS and lanes >= 512))
            and all(self.has_lanes(leaf.inputs[0]) for leaf in columns)
            and all(self.has_lanes(n) for n, leaf in self.leaves.items() if self.has_rows(n) and leaf.op is not None)
            and all(frozenset(map(self.axis_of.__getitem__, r.axes)) >= self.lane_set for r in self.domain.results)
        )
        self.mode = "tiles" if tiled else "rows"


class CudaPlan(Plan):
    """Loops, arrays, phases, texts and geometry of a kernel. Raises `Refused` with a sentence.

    Without a `geometry`, the sizes determine it; `choices` are the candidates for autotuning.
    """

    def __init__(
        self, domain: Domain, operands: Sequence[Layout], results: Sequence[Layout], geometry: Geometry | None = None
    ) -> None:
        self.loops = CudaLoops(domain, operands, results)
        self.arrays = Arrays(self.loops)
        self.phases = Staging(self.loops, self.arrays.results)
        self.choices = candidates(self.loops, self.phases)
        self.geometry = geometry or self.choices[0]
        self.fragments: dict[str, Array] = {}
        """Values that threads keep in registers per lane: accumulators, kept values, arguments that are read twice."""
        self.squares: dict[str, Array] = {}
        """Arrays of a block in shared memory: arguments that are transposed square by square."""
        self._keep()
        self._check_order()
        self.values = Values(self.loops)

    def _keep(self) -> None:
        """Scratch arrays, fragments and squares."""
        loops, phases, resident = self.loops, self.phases, self.geometry.resident
        lanes, tiles = tuple(a.name for a in loops.lane_axes), loops.mode == "tiles"
        for rows in phases.rows if resident else ():
            for v in rows.kept if rows else ():
                assert rows is not None
                rows.kept[v] = f"keep_{v}"
                once(rows.stages[phases.depth(v, phases.rows.index(rows))].keeps, v)
        for name in loops.turned:
            dtype = self.arrays.named[self.arrays.place[name]].dtype
            self.squares[f"square_{name}"] = Array(
                f"square_{name}", dtype, (loops.lane_axes[-1].name, loops.row_axes[-1].name)
            )
        for name, leaf in loops.leaves.items():
            if loops.kind(leaf) in ("column", "full"):
                near, total = phases.accumulators(name)
                if loops.kind(leaf) == "column" and loops.has_lanes(leaf.inputs[0]):
                    if resident:
                        self._fragment(f"sum_{name}", near)
                    elif near is not total:
                        self._scratch(f"sum_{name}", ("block", *lanes), near)
                    if tiles:
                        self._fragment(f"part_{name}", total, ("block",))
                    else:
                        self._scratch(f"part_{name}", ("part", *lanes), total)
                else:
                    self._scratch(f"part_{name}", ("block",), total)
        for rows in phases.rows:
            for v, array in rows.kept.items() if rows else ():
                if array.startswith("keep_"):
                    held = computed(loops.leaves[v].dtype)
                    if resident:
                        self._fragment(array, held)
                    else:
                        self._scratch(array, ("block", *lanes), held)
            seen = [v for stage in (rows.stages if rows else ()) for v in stage.loads]
            for v in dict.fromkeys(seen):
                if resident and seen.count(v) > 1 and loops.leaves[v].op is None and v not in loops.turned:
                    self._fragment(f"held_{v}", self.arrays.named[self.arrays.place[v]].dtype)
        for name in sorted(phases.saved, key=phases.order.__getitem__):
            dtype = computed(loops.leaves[name].dtype)
            if loops.has_rows(name):
                self._scratch(f"row_{name}", tuple(a.name for a in loops.row_axes), dtype)
            elif loops.has_lanes(name) and tiles:
                self._fragment(f"column_{name}", dtype)
            elif loops.has_lanes(name):
                self._scratch(f"column_{name}", lanes, dtype)
        for p, columns in enumerate(phases.columns):
            for v in columns.scalars + columns.combined if p and not tiles else ():
                part = self.arrays.named.get(f"part_{v}")
                if not self.first(v) and (part is None or part.axes == ("block",)):
                    self._scratch(f"between_{v}", (), computed(loops.leaves[v].dtype))

        for rows in phases.rows:
            for stage in rows.stages if rows else ():
                stage.scalars = [v for v in stage.scalars if not self.first(v)]

    def first(self, name: str) -> bool:
        """Whether a value depends on no element and no reduction, so every thread computes it first."""
        leaf, loops = self.loops.leaves[name], self.loops
        plain = leaf.op is not None and not isinstance(leaf.op, Full) and not self.phases.phase[name]
        return plain and not loops.has_rows(name) and not loops.has_lanes(name)

    def _fragment(self, name: str, dtype: DType, outer: tuple[str, ...] = ()) -> None:
        result = Array(name, dtype, outer + tuple(a.name for a in self.loops.lane_axes))
        self.fragments.setdefault(name, result)

    def _scratch(self, name: str, axes: Sequence[str], dtype: DType) -> None:
        sizes = {a.name: a.size for a in self.loops.row_axes + self.loops.lane_axes}
        sizes |= {"block": self.grid, "part": self.parts}
        strides: list[Dim] = []
        step: Dim = 1
        for axis in reversed(axes):
            strides.append(step)
            step = step * sizes[axis]
        pointer = ("scratch", len(self.arrays.scratch))
        result = Array(name, dtype, tuple(axes), tuple(reversed(strides)), pointer, 0, simplify(step * dtype.bytes))
        self.arrays.scratch.append(result)
        self.arrays.named[name] = result

    @property
    def narrow(self) -> bool:
        """Whether 32-bit integers can index all lanes."""
        lanes = product(a.size for a in self.loops.lane_axes)
        return isinstance(lanes, int) and lanes < 1 << 31

    @property
    def tiles(self) -> Dim:
        """Parts into which the lanes are cut, if they are distributed over blocks."""
        if self.loops.mode != "tiles" and not self.geometry.tiled:
            return 1
        return groups(product(a.size for a in self.loops.lane_axes), self.geometry.capacity)

    @property
    def parts(self) -> Dim:
        """Parts into which the rows are cut: the blocks with the same lanes, at least one."""
        tiles, blocks = self.tiles, symbol("blocks")
        return blocks if tiles == 1 else sympy.Max(1, sympy.floor(blocks / sympy.Max(1, tiles)))

    @property
    def grid(self) -> Dim:
        """Blocks of a launch over rows: all parts of all tiles."""
        return symbol("blocks") if self.tiles == 1 else simplify(self.tiles * self.parts)

    def position(self, array: Array) -> int:
        """The position of an array among a kernel's pointers: operands, other results, scratch arrays."""
        kind, position = array.pointer
        inputs, outputs = len(self.loops.operands), sum(r.target is None for r in self.loops.domain.results)
        return position + {"input": 0, "output": inputs, "scratch": inputs + outputs}[kind]

    def positions(self, names: Iterable[str]) -> tuple[int, ...]:
        """The positions of arrays among a kernel's pointers, in ascending order."""
        return tuple(sorted({self.position(self.arrays.named[name]) for name in names}))

    @property
    def launches(self) -> int:
        """The number of launches on the device: of rows, of scalars and of columns in each phase."""
        loops, phases = self.loops, self.phases
        if loops.mode == "tiles":
            return 1
        count = sum(rows is not None for rows in phases.rows)
        for columns in phases.columns:
            full = [n for n in columns.combined if len(self.arrays.named[f"part_{n}"].axes) == 1]
            lone = [i for i in columns.results if not loops.domain.results[i].axes]
            scalars = [v for v in columns.scalars if not self.first(v)]
            count += bool(lone or full or scalars)
            count += len(lone) < len(columns.results) or any(loops.has_lanes(v) for v in columns.stores)
        return max(1, count)

    @property
    def halves(self) -> tuple[Half, Half] | None:
        """What each of two launches reads and writes, where the second one combines sums over the rows and goes on from
        them, and the first one completes all other results. None for other kernels.
        """
        loops, phases, named = self.loops, self.phases, self.arrays.named
        found = [columns for columns in phases.columns if columns.results or columns.stores]
        if self.launches != 2 or loops.mode != "rows" or len(found) != 1 or not phases.rows[0]:
            return None
        (columns,), every = found, range(len(loops.domain.results))
        vectors = {n for n in columns.combined if len(named[f"part_{n}"].axes) > 1}
        later = [i for i in columns.results if loops.domain.results[i].axes]
        if not vectors or len(vectors) < len(columns.combined) or len(later) < len(columns.results):
            return None
        first = self._needed([*vectors, *(loops.domain.results[i].leaf for i in every if i not in later)], frozenset())
        last = self._needed([*columns.lanes, *(loops.domain.results[i].leaf for i in later)], vectors)
        scratch = [name for name, array in named.items() if array.pointer[0] == "scratch"]
        return (
            Half(first, {*scratch, *(self.arrays.results[i] for i in every if i not in later)}),
            Half(last | {f"part_{n}" for n in vectors}, {self.arrays.results[i] for i in later}),
        )

    def _needed(self, names: Iterable[str], known: Collection[str]) -> set[str]:
        """The arguments' arrays on which values depend, but for those on which only `known` ones do."""
        seen, left = set(known), list(names)
        found: set[str] = set()
        while left:
            if (name := left.pop()) in seen:
                continue
            seen.add(name)
            leaf = self.loops.leaves[name]
            left += leaf.inputs
            if leaf.op is None:
                found.add(self.arrays.place[name])
        return found

    def _check_order(self) -> None:
        """An argument that a phase's columns overwrite must not be read in the rows of that phase."""
        loops, phases = self.loops, self.phases
        for p, columns in enumerate(phases.columns):
            targets = {loops.domain.results[i].target for i in columns.results} - {None}
            rows = phases.rows[p]
            if not targets or rows is None or p == 0:  # results without a previous phase are stored after the rows
                continue
            read = {v for s in rows.stages for v in s.loads + s.reads}
            read |= {i for s in rows.stages for v in s.scalars for i in loops.leaves[v].inputs}
            for v in read:
                if loops.leaves[v].op is None and loops.leaves[v].argument in targets:
                    raise Refused(f"argument {loops.leaves[v].argument} is read after its new value is stored")

    def structure(self) -> str:
        """All properties that the source depends on, as text, without names; sizes only as the geometry needs."""
        held = sorted([*self.fragments, *self.squares])
        return f"{super().structure()}\n{replace(self.geometry, each=0)} {held} {self.narrow}"


def groups(size: Dim, group: int) -> Dim:
    """How many groups hold `size` elements."""
    return -(-size // group) if isinstance(size, int) else sympy.ceiling(size / group)
