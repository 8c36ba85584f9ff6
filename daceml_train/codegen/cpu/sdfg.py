"""From a plan to an SDFG.

    columns<p>, rows<p>    the states of the outer SDFG; `rows` holds a parallel map over blocks around
    block                  a nested SDFG whose loop over the rows of a block holds, per stage,
                           one scalar tasklet and one lane map around one tasklet

Sizes and strides are symbols, so one kernel serves all sizes. Where tiles of lanes run in parallel, one nested SDFG
holds all phases of a tile. Scalars are called `reduced_v` (accumulator of a row), `scalar_v` (value of a row),
`total_v` (accumulator of a block) and `between_v` (value between phases).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import dace
from dace import subsets
from dace.memlet import Memlet

from daceml_train.codegen.cpu import emitter
from daceml_train.codegen.cpu.emitter import TYPES, Code, Emitter, assign, call, indices, loop, outside, scalar, sym
from daceml_train.codegen.cpu.schedule import BLOCKS
from daceml_train.codegen.kernel.loops import SQUARE, SQUARE_LANES, TILE
from daceml_train.codegen.kernel.plan import Plan
from daceml_train.codegen.kernel.staging import Columns, Rows, Stage
from daceml_train.tensor import hint, product

FLUSH = 16
"""The largest number of rows that are accumulated in the narrow type. The error of a mean grows with it, and a
normalization multiplies that by mean over deviation; with 8 instead of 128 a step of MobileNetV2 takes some 5 % longer.
"""
TOGETHER = 4
"""Rows that are added to an accumulator at once, so it is read and written a quarter as often."""
TOGETHER_LANES = 256
"""The smallest number of lanes for this; with 64 it is slower."""
TOGETHER_VALUES = 12
"""The largest number of values per lane for this."""
SCALARS = 32
"""Values per tasklet that are neither of rows nor of lanes: DaCe visits all nodes of a state for each of them."""
_DEFINED = re.compile(r"const [\w:]+ (\w+) = ")
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")
_VARIABLES = {"row_index", "row_unit", "row_group", "lane_group", "tile_index"}
"""Loop variables of nested SDFGs beside those of the axes."""


def build(plan: Plan, name: str) -> Any:
    """The SDFG of a plan."""
    return Builder(plan, name).top


class Builder(Emitter):
    """Builds the SDFG of one plan."""

    def __init__(self, plan: Plan, name: str) -> None:
        super().__init__(plan)
        self.name, self.top = name, dace.SDFG(name)
        self.inner: set[str] = set(_VARIABLES)
        """Symbols that nested SDFGs set themselves."""
        for array in self.arrays:
            self.use(self.top, array)
        for symbol in [*plan.integers(), "blocks", *(["lane_blocks"] if self.loops.mode == "flat" else [])]:
            if symbol not in self.top.symbols and not symbol.endswith("_offset"):
                self.top.add_symbol(symbol, dace.float64 if symbol in self.values.reals else dace.int64)
        self.kernels()

    def kernels(self) -> None:
        """The states of the outer SDFG."""
        if self.tiled:
            self.tiles()
            return
        for p in range(self.phases.last + 1):
            self.columns(self.top, self.top, p)
            rows = self.phases.rows[p]
            if rows is not None:
                block = dace.SDFG(f"{self.name}_rows{p}")
                self.rows(block, block, p, rows)
                self.nest(block, f"rows{p}", self.share())

    # ---- blocks ---------------------------------------------------------------------------------------------------
    def count(self, axes: Sequence[Any]) -> Any:
        """The number of elements of loops."""
        return math.prod([self.sizes[a.name] for a in axes], start=dace.symbolic.pystr_to_symbolic("1"))

    def share(self) -> dict[str, Any]:
        """The rows and lanes of a block: the symbols of the nested SDFG."""
        part, parts = sym("block"), sym("blocks")
        floor, axes, lanes = dace.symbolic.int_floor, self.loops.row_axes, self.loops.lane_axes
        count, mapping = self.count(axes), {}
        if self.loops.squares:
            count = self.count(axes[:-1]) * call("groups", self.sizes[axes[-1].name], SQUARE)
        if self.loops.mode == "flat":
            lane_parts = sym("lane_blocks")
            for name, position in (("lane_begin", 0), ("lane_end", 1)):
                place = call("modulo", part, lane_parts) + position
                mapping[name] = call("share", self.sizes[lanes[-1].name], place, lane_parts)
            part, parts = floor(part, lane_parts), floor(parts, lane_parts)
        if axes:
            mapping["row_begin"] = floor(count * part, parts)
            mapping["row_end"] = floor(count * (part + 1), parts)
        return mapping

    def nest(self, block: Any, label: str, mapping: dict[str, Any], count: Any = None, schedule: Any = BLOCKS) -> Any:
        """A state with the parallel map around `block`, with every array that it uses passed whole; the map's entry.

        The map counts blocks unless there is a `count`. None, and no map, where the block stores nothing.
        """
        states = [b for b in block.all_control_flow_blocks() if isinstance(b, dace.SDFGState)]
        nodes = [(s, n) for s in states for n in s.data_nodes() if not block.arrays[n.data].transient]
        read = sorted({n.data for s, n in nodes if s.out_degree(n)})
        written = sorted({n.data for s, n in nodes if s.in_degree(n)})
        if not written:
            return None
        known = {str(s) for a in block.arrays.values() for s in a.free_symbols} | set(mapping) | self.inner
        known |= {str(s) for s in self.sizes.values()} | set(self.values.constants) | {"block", "blocks"}
        for name in sorted(known):
            if name not in block.symbols:
                block.add_symbol(name, dace.float64 if name in self.values.reals else dace.int64)
        symbols = {name: mapping.get(name, sym(name)) for name in block.symbols if name not in self.inner}
        state, count = emitter.after(self.top, label), sym("blocks") if count is None else count
        entry, leave = state.add_map(label, {"block": subsets.Range([(0, count - 1, 1)])}, schedule=schedule)
        types = {name: emitter.passed(array) for name, array in self.top.arrays.items()}
        node = state.add_nested_sdfg(block, {n: types[n] for n in read}, {n: types[n] for n in written}, symbols)
        for name in read:
            memlet = emitter.whole(name, self.top.arrays[name])
            outside(state, state.add_read(name), entry, memlet)
            state.add_edge(entry, f"OUT_{name}", node, name, memlet)
        if not read:
            state.add_nedge(entry, node, Memlet())
        for name in written:
            memlet = emitter.whole(name, self.top.arrays[name])
            outside(state, state.add_write(name), leave, memlet)
            state.add_edge(node, name, leave, f"IN_{name}", memlet)
        return entry

    # ---- rows -----------------------------------------------------------------------------------------------------
    def rows(self, block: Any, region: Any, p: int, rows: Rows) -> None:
        """Accumulators, the loop over rows, and partial results."""
        ends = [n for s in rows.stages for n in s.columns]
        narrow = [n for n in ends if f"sum_{n}" in self.arrays]
        fulls = [n for s in rows.stages for n in s.fulls] + rows.scalar_columns
        for n in ends:
            self.clear(block, region, f"part_{n}", n)
        begin, end = Code(), Code()
        for n in fulls:
            total = self.phases.accumulators(n)[1]
            begin.write(f"zero_{n}", self.local(block, f"total_{n}", total), total, self.identity(n, total))
            end.ins[f"all_{n}"] = (scalar(f"total_{n}"), TYPES[total])
            end.write(f"save_of_{n}", self.array(block, f"part_{n}"), total, f"all_{n}")
        self.tasklet(region, "begin", begin)
        body, first, last = region, sym("row_begin"), sym("row_end")
        if narrow:
            body = loop(region, "groups", "row_group", first, last, FLUSH)
            for n in narrow:
                self.clear(block, body, f"sum_{n}", n)
            first, last = sym("row_group"), call("least", sym("row_group") + FLUSH, sym("row_end"))
        if narrow and self.together(p, rows):
            whole = first + TOGETHER * dace.symbolic.int_floor(last - first, TOGETHER)
            several = loop(body, "several", self.loops.row_axes[0].name, first, whole, TOGETHER)
            self.stage(block, several, p, 0, rows.stages[0], rows, TOGETHER)
            first = whole
        inner = self.squares(block, body) if self.loops.squares else self.row_loop(body, first, last)
        for k, stage in enumerate(rows.stages):
            self.scalars(block, inner, p, k, rows)
            self.stage(block, inner, p, k, stage, rows)
        self.row_end(block, inner, p, rows)
        for n in narrow:
            self.flush(body, n)
        self.tasklet(region, "end", end)

    def together(self, p: int, rows: Rows) -> bool:
        """Whether several rows may be accumulated at once: lanes do little, and nothing is done once per row."""
        if len(rows.stages) != 1 or len(self.loops.row_axes) != 1 or self.loops.squares or rows.kept:
            return False
        stage = rows.stages[0]
        once = stage.scalars or stage.rows or stage.fulls or stage.keeps or stage.results or stage.reads
        last = rows.scalar_results or rows.scalar_stores or rows.scalar_columns
        wide = hint(product(axis.size for axis in self.loops.lane_axes)) >= TOGETHER_LANES
        return wide and not (once or last) and len(stage.lanes) <= TOGETHER_VALUES and len(stage.columns) <= 2

    def row_loop(self, region: Any, first: Any, last: Any) -> Any:
        """The loop over rows, in which the indices of all row axes are known."""
        axes = self.loops.row_axes
        if len(axes) < 2:
            return loop(region, "rows", axes[0].name, first, last) if axes else region
        inner = loop(region, "rows", "row_index", first, last)
        self.set(inner, indices(axes, "row_index"))
        return inner

    def set(self, region: Any, assignments: dict[str, str]) -> None:
        """Assign symbols in a nested SDFG."""
        if not region.number_of_nodes():
            emitter.after(region, "where")
        assign(region, assignments)
        self.inner |= set(assignments)

    def squares(self, block: Any, region: Any) -> Any:
        """The loop over rows within squares of rows and lanes; `row_begin` and `row_end` count groups of rows."""
        *outer, last = self.loops.row_axes
        body = loop(region, "row_groups", "row_unit", sym("row_begin"), sym("row_end"))
        groups = f"vm_groups({last.name}_size, {SQUARE})"
        group = {"row_group": f"{SQUARE} * vm_modulo(row_unit, {groups})"}
        self.set(body, group | indices(outer, f"int_floor(row_unit, {groups})"))
        body = loop(body, "lane_groups", "lane_group", sym("lane_begin"), sym("lane_end"), SQUARE_LANES)
        end = call("least", sym("row_group") + SQUARE, self.sizes[last.name])
        for name in self.loops.turned:
            source, code = self.plan.arrays.place[name], Code()
            code.ins["here"] = (self.array(block, source), TYPES[self.arrays[source].dtype])
            code.write("there", self.array(block, f"square_{name}"), self.arrays[source].dtype, "here")
            self.tasklet(body, f"turn_{name}", code, [*self.lanes(), (last.name, sym("row_group"), end)])
        return loop(body, "rows", last.name, sym("row_group"), end)

    def value(self, block: Any, code: Code, name: str, p: int) -> None:
        """Read a value that lanes share: from memory, from an earlier phase, or from this row. Constants are not."""
        leaf = self.leaves[name]
        if self.constant(name):
            return
        if leaf.op is None:
            self.load(code, name, self.array(block, self.plan.arrays.place[name]))
        elif self.loops.kind(leaf) == "row" and self.phases.phase[name] == p:
            self.load(code, name, scalar(f"reduced_{name}"), self.phases.accumulators(name)[1])
        elif not self.phases.stored(name, p):
            self.load(code, name, scalar(f"scalar_{name}"))
        elif self.loops.has_rows(name):
            self.load(code, name, self.array(block, f"row_{name}"))
        else:
            if f"between_{name}" not in block.arrays:
                block.add_scalar(f"between_{name}", TYPES[self.held(name)])
            self.load(code, name, scalar(f"between_{name}"))

    def lane_value(self, block: Any, code: Code, name: str, rows: Rows) -> None:
        """Read a value that differs from lane to lane."""
        if self.leaves[name].op is None:
            array = f"square_{name}" if name in self.loops.turned else self.plan.arrays.place[name]
        else:
            array = rows.kept.get(name, f"column_{name}")
        self.load(code, name, self.array(block, array))

    def scalars(self, block: Any, region: Any, p: int, k: int, rows: Rows) -> None:
        """A tasklet that computes per-row values, and clears the row reductions of a stage."""
        code, names = Code(), rows.stages[k].scalars
        shared = {v for s in rows.stages[k:] for v in s.reads}
        shared |= {i for s in rows.stages[k + 1 :] for v in s.scalars for i in self.leaves[v].inputs}
        shared |= {self.results[i].leaf for i in rows.scalar_results} | set(rows.scalar_stores)
        shared |= {self.leaves[v].inputs[0] for v in rows.scalar_columns}
        for v in names:
            for i in self.leaves[v].inputs:
                if i not in names:
                    self.value(block, code, i, p)
            self.define(code, v)
            if v in shared:
                code.write(f"new_{v}", self.local(block, f"scalar_{v}", self.held(v)), self.held(v), v)
        for v in rows.stages[k].rows:
            total = self.phases.accumulators(v)[1]
            code.write(f"zero_{v}", self.local(block, f"reduced_{v}", total), total, self.identity(v, total))
        self.tasklet(region, f"scalars{k}", code)

    def stage(self, block: Any, region: Any, p: int, k: int, stage: Stage, rows: Rows, count: int = 1) -> None:
        """The lane map of one stage, for `count` rows at once."""
        code = Code()
        for v in stage.loads:
            self.lane_value(block, code, v, rows)
        for v in stage.reads:
            self.value(block, code, v, p)
        for v in stage.lanes:
            self.define(code, v)
        for number in stage.results:
            self.store(block, code, number)
        for v in stage.keeps:
            self.keep(block, code, v, rows.kept[v])
        for v in stage.rows + stage.fulls:
            target, connector = f"reduced_{v}" if v in stage.rows else f"total_{v}", f"{self.how(v)}_{v}"
            code.reductions.append(connector)
            source = self.values.operand(self.leaves[v].inputs[0])
            code.write(connector, scalar(target), self.phases.accumulators(v)[0], source)
        sources = {v: [self.values.operand(self.leaves[v].inputs[0])] for v in stage.columns}
        if count > 1:
            sources = self.repeated(code, sources, count)
        for v in stage.columns:
            accumulator = self.array(block, f"sum_{v}" if f"sum_{v}" in self.arrays else f"part_{v}")
            self.accumulate(code, v, accumulator, sources[v])
        self.tasklet(region, f"lanes{k}", code, self.lanes())

    def repeated(self, code: Code, sources: dict[str, list[str]], count: int) -> dict[str, list[str]]:
        """Let a tasklet that only computes values do so for `count` rows; the texts of each source in each of them."""
        axis = self.loops.row_axes[0].name
        names = {*code.ins, *(found[1] for line in code.lines if (found := _DEFINED.match(line)))}

        def renamed(text: str, row: int) -> str:
            indexed = {name: f"{name}_{row}" for name in names} | {axis: f"({axis} + {row})"}
            return _NAME.sub(lambda found: indexed.get(found[0], found[0]), text)

        ins, lines = dict(code.ins), list(code.lines)
        code.ins, code.lines = {}, []
        for row in range(count):
            for connector, (memlet, kind) in ins.items():
                moved = emitter.element(memlet.data, copy.deepcopy(memlet.subset))
                moved.subset.replace({sym(axis): sym(axis) + row})
                code.ins[f"{connector}_{row}"] = (moved, kind)
            code.lines += [renamed(line, row) for line in lines]
        return {v: [renamed(text, row) for row in range(count) for text in texts] for v, texts in sources.items()}

    def accumulate(self, code: Code, name: str, memlet: Memlet, sources: Sequence[str] = ()) -> None:
        """Combine the operand of a reduction, or what stands for it in several rows, with an accumulator."""
        array = self.arrays.get(memlet.data)
        dtype = self.phases.accumulators(name)[1] if array is None else array.dtype
        operand = self.leaves[name].inputs[0]
        held = self.held(operand)
        parts = [s if held is dtype else f"({dtype.c}){s}" for s in sources or [self.values.operand(operand)]]
        while len(parts) > 1:
            parts = [f"({self.combined(name, dtype, *pair)})" for pair in zip(parts[::2], parts[1::2], strict=True)]
        (shown,) = parts
        code.ins[f"old_{name}"] = (memlet, TYPES[dtype])
        code.write(f"next_{name}", memlet, dtype, self.combined(name, dtype, f"old_{name}", shown))

    def row_end(self, block: Any, region: Any, p: int, rows: Rows) -> None:
        """Once per row, after its stages: per-row results, values for later phases, reductions of per-row values."""
        code = Code()
        for number in rows.scalar_results:
            self.value(block, code, self.results[number].leaf, p)
            self.store(block, code, number)
        for v in rows.scalar_stores:
            self.value(block, code, v, p)
            self.keep(block, code, v, f"row_{v}")
        for v in rows.scalar_columns:
            self.value(block, code, self.leaves[v].inputs[0], p)
            self.accumulate(code, v, scalar(f"total_{v}"))
        self.tasklet(region, "row_end", code)

    def clear(self, block: Any, region: Any, array: str, name: str) -> None:
        """Set this block's part of an accumulator to the neutral element."""
        code, dtype = Code(), self.arrays[array].dtype
        code.write("zero", self.array(block, array), dtype, self.identity(name, dtype))
        self.tasklet(region, f"clear_{array}", code, self.lanes())

    def flush(self, region: Any, name: str) -> None:
        """Add the narrow accumulators to the wide ones."""
        near, total = self.arrays[f"sum_{name}"], self.arrays[f"part_{name}"]
        code = Code()
        code.ins["near"] = (self.at(near.name), TYPES[near.dtype])
        code.ins["old"] = (self.at(total.name), TYPES[total.dtype])
        more = self.combined(name, total.dtype, "old", f"({total.dtype.c})near")
        code.write("total", self.at(total.name), total.dtype, more)
        self.tasklet(region, f"flush_{name}", code, self.lanes())

    # ---- columns --------------------------------------------------------------------------------------------------
    def columns(self, block: Any, region: Any, p: int) -> None:
        """Combine partial results; then compute values without rows, on scalars and on lanes."""
        columns = self.phases.columns[p]
        vectors = [n for n in columns.combined if len(self.arrays[f"part_{n}"].axes) > 1]
        if not self.tiled:
            for n in vectors:
                self.combine(region, n)
        self.column_scalars(block, region, p, columns, [n for n in columns.combined if n not in vectors])
        code = Code()

        def need(v: str) -> None:
            if v in vectors:
                where = {} if self.tiled else {"block": 0}
                self.load(code, v, self.array(block, f"part_{v}", **where), self.phases.accumulators(v)[1])
            elif v not in columns.lanes:
                self.before(block, code, v)

        results = [i for i in columns.results if self.results[i].axes]
        stores = [v for v in columns.stores if self.loops.has_lanes(v)]
        for v in columns.lanes:
            for i in self.leaves[v].inputs:
                need(i)
        for v in [self.results[i].leaf for i in results] + stores:
            need(v)
        for v in columns.lanes:
            self.define(code, v)
        for number in results:
            self.store(block, code, number)
        for v in stores:
            self.keep(block, code, v, f"column_{v}")
        self.tasklet(region, f"columns{p}", code, self.lanes())

    def before(self, block: Any, code: Code, name: str) -> None:
        """Read a value without rows: an argument, or one of an earlier phase."""
        if self.constant(name):
            return
        if self.leaves[name].op is None:
            self.load(code, name, self.array(block, self.plan.arrays.place[name]))
        elif self.loops.has_lanes(name):
            self.load(code, name, self.array(block, f"column_{name}"))
        else:
            self.load(code, name, scalar(f"between_{name}"))

    def column_scalars(self, block: Any, region: Any, p: int, columns: Columns, parts: Sequence[str]) -> None:
        """Tasklets for values with neither rows nor lanes."""
        values, results = [*parts, *columns.scalars], [i for i in columns.results if not self.results[i].axes]
        chunks = [values[first : first + SCALARS] for first in range(0, len(values), SCALARS)] or [[]]
        for place, here in enumerate(chunks, 1):
            later, code = {v for chunk in chunks[place:] for v in chunk}, Code()
            for v in here:
                if v in parts:
                    self.part(block, code, v)
                    continue
                for operand in self.leaves[v].inputs:
                    if operand not in here:
                        self.before(block, code, operand)
                self.define(code, v)
            now = [i for i in results if self.results[i].leaf not in later]
            results = [i for i in results if self.results[i].leaf in later]
            for i in now:
                if self.results[i].leaf not in here:
                    self.before(block, code, self.results[i].leaf)
                self.store(block, code, i)
            for v in here:
                code.write(f"save_of_{v}", self.local(block, f"between_{v}", self.held(v)), self.held(v), v)
            self.tasklet(region, f"scalars_of_columns{p}", code)

    def combine(self, region: Any, name: str) -> None:
        """Add every block's partial results to those of block 0."""
        total, code = self.arrays[f"part_{name}"], Code()
        inner = loop(region, f"parts_{name}", "part_index", 1, sym("blocks"))
        here = self.at(total.name, block=0)
        code.ins["old"] = (here, TYPES[total.dtype])
        code.ins["more"] = (self.at(total.name, block=sym("part_index")), TYPES[total.dtype])
        code.write("total", here, total.dtype, self.combined(name, total.dtype, "old", "more"))
        self.tasklet(inner, f"combine_{name}", code, self.lanes())

    # ---- tiles ----------------------------------------------------------------------------------------------------
    def tiles(self) -> None:
        """All phases of a tile of lanes in one nested SDFG; tiles run in parallel."""
        block = dace.SDFG(f"{self.name}_tiles")
        *outer, lane = self.loops.lane_axes
        count = self.count(outer) * call("groups", self.sizes[lane.name], TILE)
        body = loop(block, "tiles", "tile_index", sym("tile_begin"), sym("tile_end"))
        groups = f"vm_groups({lane.name}_size, {TILE})"
        begin = {"lane_begin": f"{TILE} * vm_modulo(tile_index, {groups})"}
        self.set(body, begin | indices(outer, f"int_floor(tile_index, {groups})"))
        self.set(body, {"lane_end": f"vm_least(lane_begin + {TILE}, {lane.name}_size)"})
        for p in range(self.phases.last + 1):
            self.columns(block, body, p)
            rows = self.phases.rows[p]
            if rows is not None:
                self.rows(block, body, p, rows)
        floor, part, parts = dace.symbolic.int_floor, sym("block"), sym("blocks")
        mapping = {
            "tile_begin": floor(count * part, parts),
            "tile_end": floor(count * (part + 1), parts),
            "row_begin": dace.symbolic.pystr_to_symbolic("0"),
            "row_end": self.count(self.loops.row_axes),
        }
        self.nest(block, "tiles", mapping)
