"""From a plan to an SDFG, and from the SDFG to C++.

    columns<p>, rows<p>    the states of the outer SDFG; `rows` holds a parallel map over blocks around
    block                  a nested SDFG whose loop over the rows of a block holds, per stage,
                           one scalar tasklet and one lane map around one tasklet

Sizes and strides are symbols, so one kernel serves all sizes. Where tiles of lanes run in parallel, one nested SDFG
holds all phases of a tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import dace
from dace import subsets
from dace.memlet import Memlet
from dace.sdfg.state import LoopRegion

from daceml_train.codegen.expression import HALVES, computed
from daceml_train.codegen.plan import SQUARE, SQUARE_LANES, TILE, Array, Columns, Plan, Rows, Stage
from daceml_train.codegen.schedule import BLOCKS, COMBINE, IDENTITY, LANES
from daceml_train.ops.elementwise import Full
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import DType

FLUSH = 128
"""Most rows that are accumulated in the narrow type."""
_TYPES = {
    DType.float32: dace.float32, DType.float64: dace.float64, DType.int64: dace.int64, DType.int32: dace.int32,
    DType.int16: dace.int16, DType.int8: dace.int8, DType.uint8: dace.uint8, DType.bool: dace.uint8,
    DType.bfloat16: dace.uint16, DType.float16: dace.uint16,
}  # fmt: skip
Over = Sequence[tuple[str, Any, Any]]


def sym(name: str) -> Any:
    """The integer symbol of that name."""
    return dace.symbol(name, dace.int64)


class Build:
    """Builds the SDFG of one plan."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name = plan, name
        self.top = dace.SDFG(name)
        self.tiled = plan.mode == "tiles"
        self.sizes = {a.name: sym(f"{a.name}_size") for a in plan.row_axes + plan.lane_axes}
        for array in plan.arrays.values():
            self.declare(self.top, array)
        for name in [*(n for n in plan.integers() if not n.endswith('_offset')), "blocks", *(["lane_blocks"] if plan.mode == "flat" else [])]:
            if name not in self.top.symbols:
                self.top.add_symbol(name, dace.float64 if name in plan.reals else dace.int64)
        if self.tiled:
            self.tiles()
        else:
            for p in range(plan.phases + 1):
                self.columns(self.top, self.top, p)
                if plan.rows[p]:
                    self.parallel(p)

    # ---- descriptors ----------------------------------------------------------------------------------------------
    def declare(self, sdfg: Any, array: Array) -> None:
        """Add the descriptor of a planned array."""
        shape = [sym("blocks") if a == "block" else self.extent(array, a) for a in array.axes]
        sdfg.add_array(array.name, shape or [1], _TYPES[array.dtype], strides=self.strides(array) or [1])

    def extent(self, array: Array, axis: str) -> Any:
        tile = self.tiled and array.pointer[0] == "scratch" and axis in self.plan.lane_set
        return TILE if tile else self.sizes[axis]

    def strides(self, array: Array) -> list[Any]:
        if array.pointer[0] != "scratch":
            return [s if s == 1 else sym(f"{array.name}_{a}") for s, a in zip(array.strides, array.axes, strict=True)]
        if array.name.startswith("square_"):
            return list(array.strides)
        strides: list[Any] = []
        step: Any = 1
        for axis in reversed(array.axes):
            strides.append(step)
            if axis != "block":
                step = step * self.extent(array, axis)
        return strides[::-1]

    def at(self, name: str, **replaced: Any) -> Memlet:
        """The element of a planned array that the loops are at."""
        array = self.plan.arrays[name]
        index: list[Any] = []
        for axis in array.axes:
            where = replaced.get(axis, sym(axis))
            if name.startswith("square_") and axis != "block":
                where = where - sym("lane_group" if axis in self.plan.lane_set else "row_group")
            if self.tiled and array.pointer[0] == "scratch" and axis in self.plan.lane_set:
                where = where - sym("lane_begin")
            index.append(where)
        return Memlet(data=name, subset=subsets.Range([(i, i, 1) for i in index or [0]]))

    def scalar(self, name: str) -> Memlet:
        return Memlet(data=name, subset=subsets.Range([(0, 0, 1)]))

    # ---- tasklets -------------------------------------------------------------------------------------------------
    def tasklet(
        self, region: Any, label: str, ins: dict[str, tuple[Memlet, Any]], outs: dict[str, tuple[Memlet, Any]],
        lines: Sequence[str], over: Over = (), reductions: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """A state with one tasklet, under a lane map if `over` names loops."""
        state = after(region, label)
        code = "\n".join(lines)
        t = state.add_tasklet(
            label, {c: d for c, (_, d) in ins.items()}, {c: d for c, (_, d) in outs.items()}, code,
            language=dace.Language.CPP,
        )  # fmt: skip
        entry = leave = None
        if over:
            ranges = {name: subsets.Range([(first, last - 1, 1)]) for name, first, last in over}
            entry, leave = state.add_map(label, ranges, schedule=LANES)
        reads: dict[str, Any] = {}
        writes: dict[str, Any] = {}
        for c, (memlet, _) in ins.items():
            node = reads.get(memlet.data) or reads.setdefault(memlet.data, state.add_read(memlet.data))
            if entry is None:
                state.add_edge(node, None, t, c, memlet)
            else:
                outside(state, node, entry, memlet)
                state.add_edge(entry, f"OUT_{memlet.data}", t, c, memlet)
        if entry is not None and not ins:
            state.add_nedge(entry, t, Memlet())
        for c, (memlet, _) in outs.items():
            if c in reductions:
                memlet = Memlet(data=memlet.data, subset=memlet.subset, wcr=_WCR[c.split("_", 1)[0]])
            node = writes.get(memlet.data) or writes.setdefault(memlet.data, state.add_write(memlet.data))
            if leave is None:
                state.add_edge(t, c, node, None, memlet)
            else:
                outside(state, node, leave, memlet)
                state.add_edge(t, c, leave, f"IN_{memlet.data}", memlet)

    def load(self, ins: dict[str, tuple[Memlet, Any]], lines: list[str], value: str, memlet: Memlet) -> None:
        """Read a value from memory or from a scalar under its own name, once."""
        if not {value, f"half_{value}", f"byte_{value}", f"wide_{value}"}.isdisjoint(ins):
            return
        dtype = self.plan.leaves[value].dtype
        stored = self.plan.arrays[memlet.data].dtype if memlet.data in self.plan.arrays else computed(dtype)
        if stored in HALVES:
            ins[f"half_{value}"] = (memlet, dace.uint16)
            lines.append(f"const float {value} = vm::from_{stored.name}(half_{value});")
        elif dtype is DType.bool:  # gcc vectorises tests of bytes, not loads of truth values
            ins[f"byte_{value}"] = (memlet, dace.uint8)
            lines.append(f"const bool {value} = byte_{value} != 0;")
        elif memlet.data == f"reduced_{value}":
            ins[f"wide_{value}"] = (memlet, _TYPES[self.plan.accumulators(value)[1]])
            lines.append(f"const {computed(dtype).c} {value} = ({computed(dtype).c})wide_{value};")
        else:
            ins[value] = (memlet, _TYPES[computed(dtype)])

    def store(self, outs: dict[str, tuple[Memlet, Any]], lines: list[str], number: int) -> None:
        """Write a value to result `number`."""
        array = self.plan.arrays[self.plan.result_array[number]]
        value = self.plan.operand(self.plan.domain.results[number].leaf)
        if array.dtype in HALVES:
            value = f"vm::to_{array.dtype.name}({value})"
        connector = f"out{number}"
        outs[connector] = (self.at(array.name), _TYPES[array.dtype])
        lines.append(f"{connector} = {value};")

    def define(self, value: str) -> str:
        return f"const {computed(self.plan.leaves[value].dtype).c} {value} = {self.plan.text[value]};"

    def lanes(self) -> Over:
        """The loops of a lane map."""
        axes = self.plan.lane_axes
        if self.tiled:
            axes = axes[-1:]
        ranges = [(a.name, 0, self.sizes[a.name]) for a in axes]
        if self.plan.squares:
            end = vm_function("least", sym("lane_group") + SQUARE_LANES, sym("lane_end"))
            ranges[-1] = (axes[-1].name, sym("lane_group"), end)
        elif self.tiled or self.plan.mode == "flat":
            ranges[-1] = (axes[-1].name, sym("lane_begin"), sym("lane_end"))
        return ranges

    def how(self, name: str) -> str:
        """The kind of a reduction as schedules call it."""
        leaf = self.plan.leaves[name]
        assert isinstance(leaf.op, Reduce)
        if leaf.dtype is DType.bool:
            return "any" if leaf.op.kind in ("sum", "max") else "all"
        return leaf.op.kind

    def identity(self, name: str, dtype: DType) -> str:
        return IDENTITY[self.how(name)].format(t=dtype.c)

    def combined(self, name: str, dtype: DType, a: str, b: str) -> str:
        return COMBINE[self.how(name)].format(t=dtype.c, a=a, b=b)

    # ---- rows -----------------------------------------------------------------------------------------------------
    def parallel(self, p: int) -> None:
        """The state `rows<p>`: a parallel map over blocks around a nested SDFG."""
        block = dace.SDFG(f"{self.name}_rows{p}")
        rows = self.plan.rows[p]
        assert rows is not None
        self.rows_of_block(block, block, p, rows)
        count = 1
        for axis in self.plan.row_axes:
            count = count * self.sizes[axis.name]
        part, parts = sym("block"), sym("blocks")
        mapping: dict[str, Any] = {}
        if self.plan.squares:
            groups = vm_function("groups", self.sizes[self.plan.row_axes[-1].name], SQUARE)
            count = dace.symbolic.pystr_to_symbolic("1") * groups
            for axis in self.plan.row_axes[:-1]:
                count = count * self.sizes[axis.name]
        if self.plan.mode == "flat":
            lane_parts, lanes = sym("lane_blocks"), self.sizes[self.plan.lane_axes[0].name] if self.plan.lane_axes else 1
            row_parts = dace.symbolic.int_floor(parts, lane_parts)
            row_part, lane_part = dace.symbolic.int_floor(part, lane_parts), vm_function("modulo", part, lane_parts)
            mapping["lane_begin"] = vm_function("share", lanes, lane_part, lane_parts)
            mapping["lane_end"] = vm_function("share", lanes, lane_part + 1, lane_parts)
            if self.plan.row_axes:
                mapping["row_begin"] = dace.symbolic.int_floor(count * row_part, row_parts)
                mapping["row_end"] = dace.symbolic.int_floor(count * (row_part + 1), row_parts)
        else:
            mapping["row_begin"] = dace.symbolic.int_floor(count * part, parts)
            mapping["row_end"] = dace.symbolic.int_floor(count * (part + 1), parts)
        self.nest(block, f"rows{p}", mapping)

    def nest(self, block: Any, label: str, mapping: dict[str, Any]) -> None:
        """A state with the block map around `block`, with every array that it uses passed whole."""
        read, written = used(block)
        state = after(self.top, label)
        entry, leave = state.add_map(label, {"block": subsets.Range([(0, sym("blocks") - 1, 1)])}, schedule=BLOCKS)
        known = {str(s) for a in block.arrays.values() for s in a.free_symbols}
        known |= {str(s) for s in block.free_symbols} - set(mapping) - set(block.arrays)
        known |= set(self.plan.constants)  # named by tasklets only
        for name in sorted(known | set(mapping) | self.assigned):
            if name not in block.symbols:
                block.add_symbol(name, dace.float64 if name in self.plan.reals else dace.int64)
        symbols = {str(s): mapping.get(str(s), sym(str(s))) for s in block.symbols if s not in self.assigned}
        node = state.add_nested_sdfg(block, dict.fromkeys(read), dict.fromkeys(written), symbols)
        for name in read:
            memlet = Memlet.from_array(name, self.top.arrays[name])
            outside(state, state.add_read(name), entry, memlet)
            state.add_edge(entry, f"OUT_{name}", node, name, memlet)
        if not read:
            state.add_nedge(entry, node, Memlet())
        for name in written:
            memlet = Memlet.from_array(name, self.top.arrays[name])
            outside(state, state.add_write(name), leave, memlet)
            state.add_edge(node, name, leave, f"IN_{name}", memlet)

    assigned = frozenset({"row_index", "row_unit", "row_group", "lane_group", "tile_index"})
    """Loop variables of the nested SDFG."""

    def rows_of_block(self, block: Any, region: Any, p: int, rows: Rows) -> None:
        """Accumulators, the loop over rows, and partial results."""
        plan = self.plan
        ends = [n for s in rows.stages for n in s.columns]
        fulls = [n for s in rows.stages for n in s.fulls] + rows.scalar_columns
        for n in ends:
            total = plan.arrays[f"part_{n}"].dtype
            self.fill(region, f"part_{n}", self.identity(n, total))
        for n in fulls:
            total = plan.accumulators(n)[1]
            self.local(block, f"total_{n}", total)
        if fulls:
            outs = {f"zero_{n}": (self.scalar(f"total_{n}"), block.arrays[f"total_{n}"].dtype) for n in fulls}
            lines = [f"zero_{n} = {self.identity(n, plan.accumulators(n)[1])};" for n in fulls]
            self.tasklet(region, "begin", {}, outs, lines)
        narrow = [n for n in ends if f"sum_{n}" in plan.arrays]
        body, first, last = region, sym("row_begin"), sym("row_end")
        if narrow:
            body = loop(region, "groups", "row_group", first, last, FLUSH)
            for n in narrow:
                self.fill(body, f"sum_{n}", self.identity(n, plan.arrays[f"sum_{n}"].dtype))
            first, last = sym("row_group"), vm_function("least", sym("row_group") + FLUSH, sym("row_end"))
        inner = self.squares(block, body) if plan.squares else self.row_loop(body, first, last)
        for k, stage in enumerate(rows.stages):
            self.stage(block, inner, p, k, stage, rows)
        self.row_end(block, inner, p, rows)
        for n in narrow:
            self.flush(body, n)
        if fulls:
            ins = {f"total{i}": (self.scalar(f"total_{n}"), None) for i, n in enumerate(fulls)}
            ins = {c: (m, block.arrays[m.data].dtype) for c, (m, _) in ins.items()}
            outs = {f"part{i}": (self.at(f"part_{n}"), block.arrays[f"total_{n}"].dtype) for i, n in enumerate(fulls)}
            for n in fulls:
                self.use(block, f"part_{n}")
            self.tasklet(region, "end", ins, outs, [f"part{i} = total{i};" for i in range(len(fulls))])

    def row_loop(self, region: Any, first: Any, last: Any) -> Any:
        """The loop over rows, in which the indices of all row axes are known."""
        axes = self.plan.row_axes
        if not axes:
            return region
        if len(axes) == 1:
            return loop(region, "rows", axes[0].name, first, last)
        inner = loop(region, "rows", "row_index", first, last)
        after(inner, "row")
        assignments: dict[str, str] = {}
        rest = "row_index"
        for axis in reversed(axes[1:]):
            assignments[axis.name] = f"vm_modulo({rest}, {axis.name}_size)"
            rest = f"int_floor({rest}, {axis.name}_size)"
        assignments[axes[0].name] = rest
        self.assign(inner, assignments)
        return inner

    def squares(self, block: Any, region: Any) -> Any:
        """The loop over rows within squares of rows and lanes; `row_begin` and `row_end` count groups of rows."""
        plan = self.plan
        *outer, last = plan.row_axes
        body = loop(region, "row_groups", "row_unit", sym("row_begin"), sym("row_end"))
        after(body, "row_unit")
        groups = f"vm_groups({last.name}_size, {SQUARE})"
        assignments = {"row_group": f"{SQUARE} * vm_modulo(row_unit, {groups})"}
        rest = f"int_floor(row_unit, {groups})"
        for axis in reversed(outer[1:]):
            assignments[axis.name] = f"vm_modulo({rest}, {axis.name}_size)"
            rest = f"int_floor({rest}, {axis.name}_size)"
        if outer:
            assignments[outer[0].name] = rest
        self.assign(body, assignments)
        body = loop(body, "lane_groups", "lane_group", sym("lane_begin"), sym("lane_end"), SQUARE_LANES)
        end = vm_function("least", sym("row_group") + SQUARE, self.sizes[last.name])
        for name in plan.turned:
            source, square = plan.place[name], f"square_{name}"
            self.use(block, source)
            self.use(block, square)
            dtype = _TYPES[plan.arrays[source].dtype]
            over = [*self.lanes(), (last.name, sym("row_group"), end)]
            ins, outs = {"here": (self.at(source), dtype)}, {"there": (self.at(square), dtype)}
            self.tasklet(body, f"turn_{name}", ins, outs, ["there = here;"], over)
        return loop(body, "rows", last.name, sym("row_group"), end)

    def assign(self, region: Any, assignments: dict[str, str]) -> None:
        state = region.add_state("at")
        (previous,) = (n for n in region.sink_nodes() if n is not state)
        region.add_edge(previous, state, dace.InterstateEdge(assignments=assignments))
        self.assigned = self.assigned | set(assignments)

    def use(self, sdfg: Any, name: str) -> None:
        if name not in sdfg.arrays and name in self.plan.arrays:
            self.declare(sdfg, self.plan.arrays[name])

    def local(self, sdfg: Any, name: str, dtype: DType) -> None:
        if name not in sdfg.arrays:
            sdfg.add_scalar(name, _TYPES[dtype], transient=True)

    def value(self, block: Any, name: str, p: int) -> Memlet:
        """Where the value of a row is: in memory, in a scalar of an earlier phase, or in one of this row."""
        plan, leaf = self.plan, self.plan.leaves[name]
        if leaf.op is None:
            self.use(block, plan.place[name])
            return self.at(plan.place[name])
        if plan.kind(leaf) == "row" and plan.phase[name] == p:
            return self.scalar(f"reduced_{name}")
        if plan.stored(name, p):
            if plan.has_rows(name):
                self.use(block, f"row_{name}")
                return self.at(f"row_{name}")
            if not self.tiled and f"between_{name}" not in block.arrays:
                block.add_scalar(f"between_{name}", _TYPES[computed(leaf.dtype)])
            return self.scalar(f"between_{name}")
        return self.scalar(f"scalar_{name}")

    def lane_source(self, block: Any, name: str, rows: Rows | None) -> Memlet:
        """Where a lane value that is read, not computed, lies."""
        plan = self.plan
        if plan.leaves[name].op is None:
            array = f"square_{name}" if name in plan.turned else plan.place[name]
        else:
            array = rows.kept[name] if rows and name in rows.kept else f"column_{name}"
        self.use(block, array)
        return self.at(array)

    def scalars(self, block: Any, region: Any, p: int, k: int, rows: Rows) -> None:
        """A tasklet that computes per-row values, and clears the row reductions of a stage."""
        plan = self.plan
        ins: dict[str, tuple[Memlet, Any]] = {}
        outs: dict[str, tuple[Memlet, Any]] = {}
        lines: list[str] = []
        names = rows.stages[k].scalars
        shared = {v for s in rows.stages[k:] for v in s.reads}
        shared |= {i for s in rows.stages[k + 1 :] for v in s.scalars for i in plan.leaves[v].inputs}
        shared |= {plan.domain.results[i].leaf for i in rows.scalar_results} | set(rows.scalar_stores)
        shared |= {plan.leaves[v].inputs[0] for v in rows.scalar_columns}
        for v in names:
            for i in plan.leaves[v].inputs:
                if i not in names and not self.constant(i):
                    self.load(ins, lines, i, self.value(block, i, p))
            lines.append(self.define(v))
            if v in shared:
                self.local(block, f"scalar_{v}", computed(plan.leaves[v].dtype))
                outs[f"new_{v}"] = (self.scalar(f"scalar_{v}"), _TYPES[computed(plan.leaves[v].dtype)])
                lines.append(f"new_{v} = {v};")
        for v in rows.stages[k].rows:
            total = plan.accumulators(v)[1]
            self.local(block, f"reduced_{v}", total)
            outs[f"zero_{v}"] = (self.scalar(f"reduced_{v}"), _TYPES[total])
            lines.append(f"zero_{v} = {self.identity(v, total)};")
        if outs:
            self.tasklet(region, f"scalars{k}", ins, outs, lines)

    def constant(self, name: str) -> bool:
        return isinstance(self.plan.leaves[name].op, Full)

    def stage(self, block: Any, region: Any, p: int, k: int, stage: Stage, rows: Rows) -> None:
        """The scalar tasklet and the lane map of one stage."""
        plan = self.plan
        self.scalars(block, region, p, k, rows)
        ins: dict[str, tuple[Memlet, Any]] = {}
        outs: dict[str, tuple[Memlet, Any]] = {}
        lines: list[str] = []
        for v in stage.loads:
            self.load(ins, lines, v, self.lane_source(block, v, rows))
        for v in stage.reads:
            self.load(ins, lines, v, self.value(block, v, p))
        lines += [self.define(v) for v in stage.lanes]
        for number in stage.results:
            self.use(block, plan.result_array[number])
            self.store(outs, lines, number)
        for v in stage.keeps:
            self.use(block, rows.kept[v])
            outs[f"kept_new_{v}"] = (self.at(rows.kept[v]), _TYPES[computed(plan.leaves[v].dtype)])
            lines.append(f"kept_new_{v} = {v};")
        reductions: list[str] = []
        for v in stage.rows + stage.fulls:
            target = f"reduced_{v}" if v in stage.rows else f"total_{v}"
            connector = f"{self.how(v)}_{v}"
            reductions.append(connector)
            outs[connector] = (self.scalar(target), _TYPES[plan.accumulators(v)[0]])
            lines.append(f"{connector} = {plan.operand(plan.leaves[v].inputs[0])};")
        for v in stage.columns:
            array = f"sum_{v}" if f"sum_{v}" in plan.arrays else f"part_{v}"
            dtype = plan.arrays[array].dtype
            self.use(block, array)
            ins[f"old_{v}"], outs[f"next_{v}"] = ((self.at(array), _TYPES[dtype]),) * 2
            source = plan.operand(plan.leaves[v].inputs[0])
            if plan.leaves[plan.leaves[v].inputs[0]].dtype is not dtype:
                source = f"({dtype.c}){source}"
            lines.append(f"next_{v} = {self.combined(v, dtype, f'old_{v}', source)};")
        if outs:
            self.tasklet(region, f"lanes{k}", ins, outs, lines, self.lanes(), reductions)

    def row_end(self, block: Any, region: Any, p: int, rows: Rows) -> None:
        """Once per row, after its stages: per-row results, values for later phases, reductions of per-row values."""
        plan = self.plan
        ins: dict[str, tuple[Memlet, Any]] = {}
        outs: dict[str, tuple[Memlet, Any]] = {}
        lines: list[str] = []

        def need(v: str) -> None:
            if not self.constant(v):
                self.load(ins, lines, v, self.value(block, v, p))

        for number in rows.scalar_results:
            need(plan.domain.results[number].leaf)
            self.use(block, plan.result_array[number])
            self.store(outs, lines, number)
        for v in rows.scalar_stores:
            need(v)
            self.use(block, f"row_{v}")
            outs[f"save_{v}"] = (self.at(f"row_{v}"), _TYPES[computed(plan.leaves[v].dtype)])
            lines.append(f"save_{v} = {v};")
        for v in rows.scalar_columns:
            source = plan.leaves[v].inputs[0]
            total = plan.accumulators(v)[1]
            need(source)
            ins[f"old_{v}"] = outs[f"next_{v}"] = (self.scalar(f"total_{v}"), _TYPES[total])
            shown = f"({total.c}){plan.operand(source)}"
            lines.append(f"next_{v} = {self.combined(v, total, f'old_{v}', shown)};")
        if outs:
            self.tasklet(region, "row_end", ins, outs, lines)

    def fill(self, region: Any, array: str, value: str) -> None:
        """Set this block's part of an accumulator."""
        self.use(region.sdfg if not isinstance(region, dace.SDFG) else region, array)
        dtype = _TYPES[self.plan.arrays[array].dtype]
        self.tasklet(region, f"clear_{array}", {}, {"zero": (self.at(array), dtype)}, [f"zero = {value};"], self.lanes())

    def flush(self, region: Any, n: str) -> None:
        """Add the narrow accumulators to the wide ones."""
        near, total = self.plan.arrays[f"sum_{n}"], self.plan.arrays[f"part_{n}"]
        ins = {"near": (self.at(near.name), _TYPES[near.dtype]), "old": (self.at(total.name), _TYPES[total.dtype])}
        line = f"total = {self.combined(n, total.dtype, 'old', f'({total.dtype.c})near')};"
        outs = {"total": (self.at(total.name), _TYPES[total.dtype])}
        self.tasklet(region, f"flush_{n}", ins, outs, [line], self.lanes())

    # ---- columns --------------------------------------------------------------------------------------------------
    def columns(self, block: Any, region: Any, p: int) -> None:
        """Combine partial results; then what has no rows, on scalars and on lanes."""
        plan, columns = self.plan, self.plan.columns[p]
        vectors = [n for n in columns.combined if "sum_" + n in plan.arrays or len(plan.arrays[f"part_{n}"].axes) > 1]
        if not self.tiled:
            for n in vectors:
                self.combine(region, n)
        scalars = [n for n in columns.combined if n not in vectors]
        self.column_scalars(block, region, p, columns, scalars)
        ins: dict[str, tuple[Memlet, Any]] = {}
        outs: dict[str, tuple[Memlet, Any]] = {}
        lines: list[str] = []

        def need(v: str) -> None:
            if v in columns.lanes or self.constant(v):
                return
            leaf = plan.leaves[v]
            if v in vectors:
                self.use(block, f"part_{v}")
                where = self.at(f"part_{v}") if self.tiled else self.at(f"part_{v}", block=0)
                total = plan.accumulators(v)[1]
                if f"wide_{v}" not in ins:
                    ins[f"wide_{v}"] = (where, _TYPES[total])
                    lines.append(f"const {computed(leaf.dtype).c} {v} = ({computed(leaf.dtype).c})wide_{v};")
            elif plan.has_lanes(v) and leaf.op is not None:
                self.use(block, f"column_{v}")
                self.load(ins, lines, v, self.at(f"column_{v}"))
            elif leaf.op is None:
                self.use(block, plan.place[v])
                self.load(ins, lines, v, self.at(plan.place[v]))
            else:
                self.load(ins, lines, v, self.scalar(f"between_{v}"))

        lane_results = [i for i in columns.results if plan.domain.results[i].axes]
        lane_stores = [v for v in columns.stores if plan.has_lanes(v)]
        for v in columns.lanes:
            for i in plan.leaves[v].inputs:
                need(i)
        for v in [plan.domain.results[i].leaf for i in lane_results] + lane_stores:
            need(v)
        lines += [self.define(v) for v in columns.lanes]
        for number in lane_results:
            self.use(block, plan.result_array[number])
            self.store(outs, lines, number)
        for v in lane_stores:
            self.use(block, f"column_{v}")
            outs[f"save_{v}"] = (self.at(f"column_{v}"), _TYPES[computed(plan.leaves[v].dtype)])
            lines.append(f"save_{v} = {v};")
        if outs:
            self.tasklet(region, f"columns{p}", ins, outs, lines, self.lanes())

    def column_scalars(self, block: Any, region: Any, p: int, columns: Columns, parts: Sequence[str]) -> None:
        """A tasklet for what has neither rows nor lanes."""
        plan = self.plan
        ins: dict[str, tuple[Memlet, Any]] = {}
        outs: dict[str, tuple[Memlet, Any]] = {}
        lines: list[str] = []
        here = [*parts, *columns.scalars]
        for n in parts:
            total = plan.accumulators(n)[1]
            name = f"part_{n}"
            self.use(block, name)
            ins[f"parts_{n}"] = (Memlet.from_array(name, block.arrays[name]), dace.pointer(_TYPES[total]))
            lines += [
                f"{total.c} total_{n} = {self.identity(n, total)};",
                f"for (int64_t part = 0; part < blocks; ++part)",
                f"    total_{n} = {self.combined(n, total, f'total_{n}', f'parts_{n}[part]')};",
                f"const {computed(plan.leaves[n].dtype).c} {n} = total_{n};",
            ]
        results = [i for i in columns.results if not plan.domain.results[i].axes]

        def need(v: str) -> None:
            if v in here or self.constant(v):
                return
            if plan.leaves[v].op is None:
                self.use(block, plan.place[v])
                self.load(ins, lines, v, self.at(plan.place[v]))
            else:
                self.load(ins, lines, v, self.scalar(f"between_{v}"))

        for v in columns.scalars:
            for i in plan.leaves[v].inputs:
                need(i)
            lines.append(self.define(v))
        for number in results:
            need(plan.domain.results[number].leaf)
            self.use(block, plan.result_array[number])
            self.store(outs, lines, number)
        for v in here:
            self.local(block, f"between_{v}", computed(plan.leaves[v].dtype))
            outs[f"save_{v}"] = (self.scalar(f"between_{v}"), _TYPES[computed(plan.leaves[v].dtype)])
            lines.append(f"save_{v} = {v};")
        if outs:
            self.tasklet(region, f"scalars_of_columns{p}", ins, outs, lines)

    def combine(self, region: Any, n: str) -> None:
        """Add every block's partial results to those of block 0."""
        total = self.plan.arrays[f"part_{n}"]
        inner = loop(region, f"parts_{n}", "part_index", 1, sym("blocks"))
        here, there = self.at(total.name, block=0), self.at(total.name, block=sym("part_index"))
        dtype = _TYPES[total.dtype]
        line = f"total = {self.combined(n, total.dtype, 'old', 'more')};"
        ins = {"old": (here, dtype), "more": (there, dtype)}
        self.tasklet(inner, f"combine_{n}", ins, {"total": (here, dtype)}, [line], self.lanes())

    # ---- tiles ----------------------------------------------------------------------------------------------------
    def tiles(self) -> None:
        """All phases of a tile of lanes in one nested SDFG; tiles run in parallel."""
        block = dace.SDFG(f"{self.name}_tiles")
        *outer, lane = self.plan.lane_axes
        count = vm_function("groups", self.sizes[lane.name], TILE)
        for axis in outer:
            count = count * self.sizes[axis.name]
        body = loop(block, "tiles", "tile_index", sym("tile_begin"), sym("tile_end"))
        after(body, "tile")
        inner = f"vm_groups({lane.name}_size, {TILE})"
        assignments = {"lane_begin": f"{TILE} * vm_modulo(tile_index, {inner})"}
        rest = f"int_floor(tile_index, {inner})"
        for axis in reversed(outer[1:]):
            assignments[axis.name] = f"vm_modulo({rest}, {axis.name}_size)"
            rest = f"int_floor({rest}, {axis.name}_size)"
        if outer:
            assignments[outer[0].name] = rest
        self.assign(body, assignments)
        self.assign(body, {"lane_end": f"vm_least(lane_begin + {TILE}, {lane.name}_size)"})
        for p in range(self.plan.phases + 1):
            self.columns(block, body, p)
            rows = self.plan.rows[p]
            if rows:
                self.rows_of_block(block, body, p, rows)
        part, parts = sym("block"), sym("blocks")
        rows_count: Any = 1
        for axis in self.plan.row_axes:
            rows_count = rows_count * self.sizes[axis.name]
        mapping = {
            "tile_begin": dace.symbolic.int_floor(count * part, parts),
            "tile_end": dace.symbolic.int_floor(count * (part + 1), parts),
            "row_begin": dace.symbolic.pystr_to_symbolic("0"),
            "row_end": rows_count,
        }
        self.nest(block, "tiles", mapping)


_WCR = {
    "sum": "lambda a, b: a + b", "prod": "lambda a, b: a * b", "max": "lambda a, b: max(a, b)",
    "min": "lambda a, b: min(a, b)", "any": "lambda a, b: a or b", "all": "lambda a, b: a and b",
}  # fmt: skip


def vm_function(name: str, *arguments: Any) -> Any:
    """A call of a function of `native/kernel.h` in a symbolic expression."""
    import sympy

    return sympy.Function(f"vm_{name}", integer=True)(*arguments)


def after(region: Any, label: str) -> Any:
    """A new state behind all blocks of a region."""
    if not region.number_of_nodes():
        return region.add_state(label, is_start_block=True)
    (previous,) = region.sink_nodes()
    return region.add_state_after(previous, label) if isinstance(previous, dace.SDFGState) else follow(region, label)


def follow(region: Any, label: str) -> Any:
    """A new state behind a loop."""
    (previous,) = region.sink_nodes()
    state = region.add_state(label)
    region.add_edge(previous, state, dace.InterstateEdge())
    return state


def loop(region: Any, label: str, variable: str, first: Any, last: Any, step: int = 1) -> Any:
    """A loop behind all blocks of a region."""
    text = dace.symbolic.symstr
    made = LoopRegion(
        label, f"{variable} < {text(last)}", variable, f"{variable} = {text(first)}", f"{variable} = {variable} + {step}"
    )
    if not region.number_of_nodes():
        region.add_node(made, is_start_block=True)
    else:
        (previous,) = region.sink_nodes()
        region.add_node(made)
        region.add_edge(previous, made, dace.InterstateEdge())
    return made


def outside(state: Any, node: Any, scope: Any, memlet: Memlet) -> None:
    """The edge between an access node and a map, once per array."""
    name = memlet.data
    array = state.sdfg.arrays[name]
    if f"IN_{name}" in scope.in_connectors:
        return
    scope.add_in_connector(f"IN_{name}")
    scope.add_out_connector(f"OUT_{name}")
    whole = Memlet.from_array(name, array)
    whole.wcr = memlet.wcr
    if isinstance(scope, dace.nodes.MapEntry):
        state.add_edge(node, None, scope, f"IN_{name}", whole)
    else:
        state.add_edge(scope, f"OUT_{name}", node, None, whole)


def used(block: Any) -> tuple[list[str], list[str]]:
    """Arrays of the outer SDFG that a nested one reads and writes."""
    read: set[str] = set()
    written: set[str] = set()
    for state in (b for b in block.all_control_flow_blocks() if isinstance(b, dace.SDFGState)):
        for node in state.data_nodes():
            if not block.arrays[node.data].transient:
                (read if state.out_degree(node) else written).add(node.data)
    return sorted(read), sorted(written)


def build(plan: Plan, name: str) -> Any:
    """The SDFG of a plan."""
    return Build(plan, name).top
