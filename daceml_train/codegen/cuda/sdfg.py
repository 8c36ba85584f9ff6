"""From a plan to the SDFG of its CUDA kernels: the states of a CPU kernel, with maps over blocks and threads.

    scalars<p>, columns<p>   combine partial results of the blocks, then code on scalars and lanes that has no rows
    rows<p>                  blocks of threads, each with rows and lanes of its own

Each is a launch: a phase reads results of all blocks that the previous launch has stored. Within a launch, threads
share no arrays in memory: a thread reads at most its own stores. Values without rows, lanes and reductions (`between_v`
of phase 0) are recomputed by every thread instead of being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dace
from dace import subsets
from dace.memlet import Memlet

from daceml_train.codegen.cpu.emitter import TYPES, Code, call, indices, scalar, sym, whole
from daceml_train.codegen.cpu.sdfg import FLUSH
from daceml_train.codegen.cuda.geometry import COMBINING, SIDE
from daceml_train.codegen.cuda.launches import Launches
from daceml_train.codegen.cuda.schedule import COLUMNS, LANES, TEAM, TURN, functor
from daceml_train.codegen.kernel.staging import Columns, Rows


class CudaBuilder(Launches):
    """Builds the SDFG of one plan."""

    def kernels(self) -> None:
        """One state per launch, in order."""
        self.arrays = self.arrays | self.plan.fragments | self.plan.squares
        for symbol in ("tiles", "parts"):
            if symbol not in self.top.symbols:
                self.top.add_symbol(symbol, dace.int64)
        if self.tiled:
            self.tiles()
            return
        for p in range(self.phases.last + 1):
            if p:
                self.combine_kernels(p)
            rows = self.phases.rows[p]
            if rows is not None:
                self.rows_kernel(p, rows)
            if not p:
                self.combine_kernels(p)

    # ---- rows -----------------------------------------------------------------------------------------------------
    def rows_kernel(self, p: int, rows: Rows) -> None:
        """The launch of `rows(p)`."""
        flat = self.loops.mode == "flat"
        count = sym("blocks") if flat else sym("tiles") * sym("parts")
        block = self.kernel(f"rows{p}", count, self.geometry.threads, {})
        if not flat:
            self.row_blocks(block, block, p, rows)
        elif self.loops.squares:
            self.square_blocks(block, p, rows)
        else:
            self.flat_blocks(block, p, rows)
        self.launch(block)

    def flat_blocks(self, block: Any, p: int, rows: Rows) -> None:
        """Every thread processes fragments of any row."""
        self.begin(block, block, rows)
        inner = block
        if self.loops.lane_axes:
            lane = f"{self.loops.lane_axes[-1].name}_size"
            units, unit = f"vm_groups({lane}, vm_width())", "unit"
            sizes = [f"{a.name}_size" for a in self.loops.row_axes]
            first, step = f"(block * {self.geometry.threads} + vm_thread())", f"blocks * {self.geometry.threads}"
            inner = self.loop(block, "unit", first, " * ".join([*sizes, units]), step)
            where = indices(self.loops.row_axes, f"int_floor(unit, {units})")
            if self.loops.row_axes:
                unit = f"vm_modulo(unit, {units})"
            self.set(inner, {"lane_begin": f"({unit}) * vm_width()", "lane_end": lane} | where)
        self.stages(block, inner, p, rows)
        self.end(block, block, rows)

    def square_blocks(self, block: Any, p: int, rows: Rows) -> None:
        """Every block processes squares of rows and lanes: arguments contiguous across rows are transposed first."""
        self.begin(block, block, rows)
        *outer, last = self.loops.row_axes
        lane = self.loops.lane_axes[-1].name
        wide, high = f"vm_groups({lane}_size, {SIDE})", f"vm_groups({last.name}_size, {SIDE})"
        sizes = [f"{a.name}_size" for a in outer]
        body = self.loop(block, "unit", "block", " * ".join([*sizes, high, wide]), "blocks")
        self.set(body, {"lane_group": f"{SIDE} * vm_modulo(unit, {wide})", "row_unit": f"int_floor(unit, {wide})"})
        self.set(body, {"row_group": f"{SIDE} * vm_modulo(row_unit, {high})", "lane_begin": "lane_group"})
        limits = {"lane_end": f"vm_least(lane_group + {SIDE}, {lane}_size)"}
        limits["row_limit"] = f"vm_least(row_group + {SIDE}, {last.name}_size)"
        self.set(body, limits | indices(outer, f"int_floor(row_unit, {high})"))
        for name in self.loops.turned:
            source, code = self.plan.arrays.place[name], Code()
            code.ins["here"] = (self.array(block, source), TYPES[self.arrays[source].dtype])
            code.write("there", self.array(block, f"square_{name}"), self.arrays[source].dtype, "here")
            over = [*self.lanes(), (last.name, sym("row_group"), sym("row_limit"))]
            self.tasklet(body, f"turn_{name}", code, over, TURN)
        inner = self.loop(body, last.name, "(row_group + vm_team())", "row_limit", str(self.geometry.teams))
        self.stages(block, inner, p, rows)
        self.end(block, block, rows)

    def row_blocks(self, block: Any, region: Any, p: int, rows: Rows) -> None:
        """Every team processes rows; blocks may process tiles of the lanes. Accumulators, then partial results."""
        total = " * ".join(f"{a.name}_size" for a in self.loops.lane_axes)
        if not self.tiled:
            self.tile(region, "vm_modulo(block, tiles)" if self.geometry.tiled else "", total)
        ends = [n for s in rows.stages for n in s.columns]
        sums = [n for n in ends if f"sum_{n}" in self.arrays]
        for n in ends:
            self.clear(block, region, f"part_{n}", n)
        self.begin(block, region, rows)
        teams = self.geometry.teams
        count = " * ".join(f"{a.name}_size" for a in self.loops.row_axes) or "1"
        first, step = (f"part * {teams}", f"(parts * {teams})") if not self.tiled else ("0", "1")
        body, begin, end = region, f"({first} + vm_team())" if teams > 1 else f"({first})", f"({count})"
        if sums:
            body = self.loop(region, "row_group", first, count, f"{FLUSH} * {step}")
            for n in sums:
                self.clear(block, body, f"sum_{n}", n)
            begin = "(row_group + vm_team())" if teams > 1 else "row_group"
            end = f"vm_least(row_group + {FLUSH} * {step}, {count})"
        steady = not any(s.rows for s in rows.stages)  # no barriers, so rows may be prefetched
        axes = self.loops.row_axes
        variable = axes[0].name if len(axes) == 1 else "row_index"
        inner = self.loop(body, variable, begin, end, step, self.geometry.ahead if steady else None)
        if len(axes) > 1:
            self.set(inner, indices(axes, "row_index"))
        self.stages(block, inner, p, rows)
        self.row_end(block, inner, p, rows)
        for n in sums:
            self.flush(block, body, n)
        self.end(block, region, rows)

    def tile(self, region: Any, tile: str, total: str) -> None:
        """Set the lanes of the block."""
        if not tile:
            self.set(region, {"lane_begin": "0", "lane_end": total})
            return
        self.set(region, {"lane_begin": f"({tile}) * {self.geometry.capacity}"})
        self.set(region, {"lane_end": f"vm_least(lane_begin + {self.geometry.capacity}, {total})"})

    def stages(self, block: Any, region: Any, p: int, rows: Rows) -> None:
        """The stages of a row."""
        self.holding = set()
        for k, stage in enumerate(rows.stages):
            self.scalars(block, region, p, k, rows)
            self.stage(block, region, p, k, stage, rows)

    def begin(self, block: Any, region: Any, rows: Rows) -> None:
        """Clear the reductions over all rows of a block."""
        code = Code()
        for n in [n for s in rows.stages for n in s.fulls] + rows.scalar_columns:
            total = self.phases.accumulators(n)[1]
            code.write(f"zero_{n}", self.local(block, f"total_{n}", total), total, self.identity(n, total))
        self.tasklet(region, "begin", code)

    def end(self, block: Any, region: Any, rows: Rows) -> None:
        """Combine and store the reductions over all rows of a block: of every thread's lanes, or of every row."""
        code, mine = Code(), "vm_member() == 0 && lane_begin == 0"
        for n in [n for s in rows.stages for n in s.fulls] + rows.scalar_columns:
            total = self.phases.accumulators(n)[1]
            code.ins[f"mine_{n}"] = (scalar(f"total_{n}"), TYPES[total])
            own = f"mine_{n}"
            if n in rows.scalar_columns:  # each thread of a team has the sum over the team's rows
                own = f"({mine}) ? mine_{n} : {self.identity(n, total)}"
            reduce = f"vm::over_block<{self.functor(n)}, {self.geometry.threads}, {total.c}>({own})"
            code.write(f"save_of_{n}", self.array(block, f"part_{n}"), total, reduce)
        self.tasklet(region, "end", code, condition="vm_thread() == 0")

    def functor(self, name: str) -> str:
        """The reduction of `native/kernel.cuh`."""
        return functor(self.how(name))

    # ---- values ---------------------------------------------------------------------------------------------------
    def first(self, name: str) -> bool:
        """Whether a value depends on no element, and on no reduction."""
        return self.plan.first(name)

    def value(self, block: Any, code: Code, name: str, p: int) -> None:
        """Read a value that lanes share."""
        rows = self.loops.has_rows(name) or self.loops.kind(self.leaves[name]) == "row"
        if self.constant(name) or self.leaves[name].op is None or rows:
            super().value(block, code, name, p)
        else:
            self.before(block, code, name)

    def before(self, block: Any, code: Code, name: str) -> None:
        """Read a value without rows: an argument, one of an earlier phase, or one that threads compute first."""
        if self.constant(name) or self.leaves[name].op is None or self.loops.has_lanes(name):
            super().before(block, code, name)
        elif self.first(name):
            self.want_early(name)
            self.load(code, name, self.local(block, f"between_{name}", self.held(name)))
        else:
            self.load(code, name, self.array(block, f"between_{name}"))

    def want_early(self, name: str) -> None:
        """Record a value that threads compute first, and its operands."""
        if name in self.early or not self.first(name):
            return
        for i in self.leaves[name].inputs:
            self.want_early(i)
        self.early.append(name)

    def compute_early(self, block: Any) -> None:
        """Fill the first state of a kernel."""
        code = Code()
        for v in self.early:
            for i in self.leaves[v].inputs:
                if self.leaves[i].op is None:
                    self.before(block, code, i)
            self.define(code, v)
            code.write(f"save_of_{v}", self.local(block, f"between_{v}", self.held(v)), self.held(v), v)
        self.tasklet(block, "first", code, state=block.start_block)

    def lane_value(self, block: Any, code: Code, name: str, rows: Rows) -> None:
        """Read a value that differs from lane to lane: from registers where an earlier stage has read it."""
        held = f"held_{name}"
        if held not in self.plan.fragments or name in self.holding:
            if name in self.holding:
                self.load(code, name, self.array(block, held))
            else:
                super().lane_value(block, code, name, rows)
            return
        super().lane_value(block, code, name, rows)
        (raw,) = {name, f"half_{name}", f"byte_{name}"} & set(code.ins)
        code.write(f"hold_of_{name}", self.array(block, held), self.arrays[held].dtype, raw)
        self.holding.add(name)

    # ---- accumulators of columns ----------------------------------------------------------------------------------
    def clear(self, block: Any, region: Any, array: str, name: str) -> None:
        """Set an accumulator to the neutral element."""
        code, dtype = Code(), self.arrays[array].dtype
        code.write("zero", self.array(block, array), dtype, self.identity(name, dtype))
        self.tasklet(region, f"clear_{array}", code, self.lanes(), LANES if array in self.plan.fragments else TEAM)

    def flush(self, block: Any, region: Any, name: str) -> None:  # type: ignore[override]
        """Add the accumulators of a block's teams to its partial results."""
        near, total = self.arrays[f"sum_{name}"], self.arrays[f"part_{name}"]
        code, kind = Code(), self.how(name)
        code.ins[f"near_{kind}"] = (self.array(block, near.name), TYPES[near.dtype])
        code.ins["old"] = (self.array(block, total.name), TYPES[total.dtype])
        more = self.combined(name, total.dtype, "old", f"({total.dtype.c})near_{kind}")
        code.write("total", self.array(block, total.name), total.dtype, more)
        self.tasklet(region, f"flush_{name}", code, self.lanes(), TEAM)

    # ---- columns --------------------------------------------------------------------------------------------------
    def combine_kernels(self, p: int) -> None:
        """The launches of `columns(p)`: one block for scalars, then blocks for lanes."""
        columns = self.phases.columns[p]
        vectors = [n for n in columns.combined if len(self.arrays[f"part_{n}"].axes) > 1]
        parts = [n for n in columns.combined if n not in vectors]
        results = [i for i in columns.results if not self.results[i].axes]
        scalars = [v for v in columns.scalars if not self.first(v)]
        if results or parts or scalars:
            block = self.kernel(f"scalars{p}", 1, COMBINING, {})
            self.combine_scalars(block, p, scalars, parts, results)
            self.launch(block)
        results = [i for i in columns.results if self.results[i].axes]
        stores = [v for v in columns.stores if self.loops.has_lanes(v)]
        if results or stores:
            total = " * ".join(f"{a.name}_size" for a in self.loops.lane_axes)
            lanes = call("groups", self.count(self.loops.lane_axes), SIDE)
            block = self.kernel(f"columns{p}", lanes, COMBINING, {})
            self.set(block, {"lane_begin": f"block * {SIDE}", "lane_end": total, "part_end": "parts"})
            self.combine_lanes(block, columns, vectors, results, stores)
            self.launch(block)

    def combine_scalars(
        self, block: Any, p: int, scalars: Sequence[str], parts: Sequence[str], results: Sequence[int]
    ) -> None:
        """One block computes values with neither rows nor lanes."""
        code, here = Code(), [*parts, *scalars]
        for n in parts:
            total, name = self.phases.accumulators(n)[1], f"part_{n}"
            self.use(block, name)
            code.ins[f"parts_{n}"] = (whole(name, block.arrays[name]), dace.pointer(TYPES[total]))
            code.lines += [
                f"{total.c} total_{n} = {self.identity(n, total)};",
                f"for (int64_t i = vm_thread(); i < tiles * parts; i += {COMBINING})",
                f"    total_{n} = {self.combined(n, total, f'total_{n}', f'parts_{n}[i]')};",
                f"total_{n} = vm::over_block<{self.functor(n)}, {COMBINING}>(total_{n});",
                f"const {self.held(n).c} {n} = total_{n};",
            ]
        for v in scalars:
            for i in self.leaves[v].inputs:
                if i not in here:
                    self.before(block, code, i)
            self.define(code, v)
        for number in results:
            if self.results[number].leaf not in here:
                self.before(block, code, self.results[number].leaf)
            self.store(block, code, number)
        for v in here:
            code.write(f"save_of_{v}", self.array(block, f"between_{v}"), self.held(v), v)
        self.tasklet(block, f"scalars_of_columns{p}", code, condition="vm_thread() == 0")

    def combine_lanes(
        self, block: Any, columns: Columns, vectors: Sequence[str], results: Sequence[int], stores: Sequence[str]
    ) -> None:
        """Blocks of lanes and slices: each slice combines some of the partial results, the first one goes on."""
        code = Code()

        def need(v: str) -> None:
            if v in vectors:
                if f"parts_{v}" not in code.ins:
                    array = self.arrays[f"part_{v}"]
                    self.use(block, array.name)
                    where = [(0, sym("parts") - 1, 1), *((sym(a), sym(a), 1) for a in array.axes[1:])]
                    memlet = Memlet(data=array.name, subset=subsets.Range(where))
                    code.ins[f"parts_{v}"] = (memlet, TYPES[array.dtype])
                    code.lines.append(f"const {self.held(v).c} {v} = parts_{v};")
                    self.conditions[f"parts_{v}"] = self.functor(v)
            elif v not in columns.lanes:
                self.before(block, code, v)

        for v in columns.lanes:
            for i in self.leaves[v].inputs:
                need(i)
        for v in [self.results[i].leaf for i in results] + list(stores):
            need(v)
        for v in columns.lanes:
            self.define(code, v)
        for number in results:
            self.store(block, code, number)
        for v in stores:
            self.keep(block, code, v, f"column_{v}")
        over = [(a.name, 0, self.sizes[a.name]) for a in self.loops.lane_axes]
        self.tasklet(block, "columns", code, over, COLUMNS)

    # ---- tiles ----------------------------------------------------------------------------------------------------
    def tiles(self) -> None:
        """All phases of a tile of lanes in one launch: each thread has all rows of its lanes."""
        block = self.kernel("all_rows", sym("blocks"), self.geometry.threads, {})
        total = " * ".join(f"{a.name}_size" for a in self.loops.lane_axes)
        body = self.loop(block, "tile_index", "block", "tiles", "blocks")
        self.tile(body, "tile_index", total)
        for p in range(self.phases.last + 1):
            if p:
                self.columns(block, body, p)
            rows = self.phases.rows[p]
            if rows is not None:
                self.row_blocks(block, body, p, rows)
            if not p:
                self.columns(block, body, p)
        self.launch(block)
