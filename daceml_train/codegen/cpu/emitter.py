"""Building blocks of a kernel's SDFG: descriptors, memlets, loops, and tasklets with or without a lane map."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import dace
import sympy
from dace import subsets
from dace.memlet import Memlet
from dace.sdfg.state import LoopRegion

from daceml_train.codegen.cpu.schedule import COMBINE, IDENTITY, LANES
from daceml_train.codegen.kernel.arrays import Array
from daceml_train.codegen.kernel.expression import HALVES, computed
from daceml_train.codegen.kernel.loops import SQUARE_LANES, TILE, Axis
from daceml_train.codegen.kernel.plan import Plan
from daceml_train.ops.elementwise import Full
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import DType

TYPES = {
    DType.float32: dace.float32,
    DType.float64: dace.float64,
    DType.int64: dace.int64,
    DType.int32: dace.int32,
    DType.int16: dace.int16,
    DType.int8: dace.int8,
    DType.uint8: dace.uint8,
    DType.bool: dace.uint8,
    DType.bfloat16: dace.uint16,
    DType.float16: dace.uint16,
}
"""Element types in memory."""
Over = Sequence[tuple[str, Any, Any]]
"""Loops of a lane map: variable, begin, end."""
_CONFLICT = {
    "sum": "lambda a, b: a + b",
    "prod": "lambda a, b: a * b",
    "max": "lambda a, b: max(a, b)",
    "min": "lambda a, b: min(a, b)",
    "any": "lambda a, b: a or b",
    "all": "lambda a, b: a and b",
}


@functools.lru_cache(maxsize=1024)
def sym(name: str) -> Any:
    """The integer symbol with that name."""
    return dace.symbol(name, dace.int64)


def call(name: str, *arguments: Any) -> Any:
    """A call of `vm_<name>` of `native/kernel.h` in a symbolic expression."""
    return sympy.Function(f"vm_{name}", integer=True)(*arguments)


def after(region: Any, label: str) -> Any:
    """A new state after all blocks of a region."""
    if not region.number_of_nodes():
        return region.add_state(label, is_start_block=True)
    (previous,) = region.sink_nodes()
    state = region.add_state(label)
    region.add_edge(previous, state, dace.InterstateEdge())
    return state


def assign(region: Any, assignments: dict[str, str]) -> None:
    """Assign symbols after all blocks of a nonempty region."""
    (previous,) = region.sink_nodes()
    region.add_edge(previous, region.add_state("at"), dace.InterstateEdge(assignments=assignments))


def loop(region: Any, label: str, variable: str, first: Any, last: Any, step: int = 1) -> Any:
    """A loop after all blocks of a region."""
    begin, end = map(dace.symbolic.symstr, (first, last))
    more = f"{variable} = {variable} + {step}"
    if label in {block.label for block in region.nodes()}:
        label = f"{label}{region.number_of_nodes()}"
    result = LoopRegion(label, f"{variable} < {end}", variable, f"{variable} = {begin}", more)
    if not region.number_of_nodes():
        region.add_node(result, is_start_block=True)
    else:
        (previous,) = region.sink_nodes()
        region.add_node(result)
        region.add_edge(previous, result, dace.InterstateEdge())
    return result


def indices(axes: Sequence[Axis], flat: str) -> dict[str, str]:
    """Assignments of loop variables from one flat index over `axes`, outermost first."""
    assignments: dict[str, str] = {}
    for axis in reversed(axes[1:]):
        assignments[axis.name] = f"vm_modulo({flat}, {axis.name}_size)"
        flat = f"int_floor({flat}, {axis.name}_size)"
    return assignments | {axis.name: flat for axis in axes[:1]}


def outside(state: Any, node: Any, scope: Any, memlet: Memlet) -> None:
    """The edge between an access node and a map, once per array."""
    name = memlet.data
    if f"IN_{name}" in scope.in_connectors:
        return
    scope.add_in_connector(f"IN_{name}")
    scope.add_out_connector(f"OUT_{name}")
    all_of_it = whole(name, state.sdfg.arrays[name])
    all_of_it.wcr = memlet.wcr
    if isinstance(scope, dace.nodes.MapEntry):
        state.add_edge(node, None, scope, f"IN_{name}", all_of_it)
    else:
        state.add_edge(scope, f"OUT_{name}", node, None, all_of_it)


def scalar(name: str) -> Memlet:
    """The memlet of a scalar."""
    return element(name, subsets.Range([(0, 0, 1)]))


def element(name: str, subset: Any, wcr: Any = None) -> Memlet:
    """The memlet of one element; DaCe would count the elements of the subset."""
    return Memlet(data=name, subset=subset, volume=1, wcr=wcr)


def whole(name: str, array: Any) -> Memlet:
    """The memlet of a whole array."""
    return Memlet(data=name, subset=subsets.Range.from_array(array), volume=array.total_size)


def passed(array: Any) -> Any:
    """The type under which a nested SDFG receives an array, by its address, or a scalar."""
    return array.dtype if isinstance(array, dace.data.Scalar) else dace.pointer(array.dtype)


@dataclass
class Code:
    """A tasklet under construction: connectors with memlets and types, and lines of C++."""

    ins: dict[str, tuple[Memlet, Any]] = field(default_factory=dict)
    outs: dict[str, tuple[Memlet, Any]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    reductions: list[str] = field(default_factory=list)
    """Output connectors that reduce, named `<kind>_<value>`."""

    def write(self, connector: str, memlet: Memlet, dtype: DType, text: str) -> None:
        """Store an expression."""
        own = element(memlet.data, subsets.Range(memlet.subset.ranges))  # edges must not share memlets
        self.outs[connector] = (own, TYPES[dtype])
        self.lines.append(f"{connector} = {text};")


class Emitter:
    """The parts of a plan that the builder uses."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.loops, self.phases, self.values = plan, plan.loops, plan.phases, plan.values
        self.arrays, self.leaves, self.results = plan.arrays.named, plan.loops.leaves, plan.loops.domain.results
        self.tiled = self.loops.mode == "tiles"
        self.sizes = {a.name: sym(f"{a.name}_size") for a in self.loops.row_axes + self.loops.lane_axes}

    # ---- descriptors and memlets ----------------------------------------------------------------------------------
    def use(self, sdfg: Any, name: str) -> None:
        """Declare a planned array in an SDFG, once."""
        if name in sdfg.arrays:
            return
        array = self.arrays[name]
        shape = [sym("blocks") if a == "block" else self._extent(array, a) for a in array.axes]
        sdfg.add_array(name, shape or [1], TYPES[array.dtype], strides=self._strides(array) or [1])

    def _extent(self, array: Array, axis: str) -> Any:
        tile = self.tiled and array.pointer[0] == "scratch" and axis in self.loops.lane_set
        return TILE if tile else self.sizes[axis]

    def _strides(self, array: Array) -> list[Any]:
        if array.pointer[0] != "scratch":
            return [s if s == 1 else sym(f"{array.name}_{a}") for s, a in zip(array.strides, array.axes, strict=True)]
        if array.name.startswith("square_"):
            return list(array.strides)
        strides: list[Any] = []
        step: Any = 1
        for axis in reversed(array.axes):
            strides.append(step)
            if axis != "block":
                step = step * self._extent(array, axis)
        return strides[::-1]

    def at(self, name: str, **replaced: Any) -> Memlet:
        """The element of a planned array at the current loop indices."""
        array = self.arrays[name]
        index: list[Any] = []
        for axis in array.axes:
            where = replaced.get(axis, sym(axis))
            if name.startswith("square_") and axis != "block":
                where = where - sym("lane_group" if axis in self.loops.lane_set else "row_group")
            if self.tiled and array.pointer[0] == "scratch" and axis in self.loops.lane_set:
                where = where - sym("lane_begin")
            index.append(where)
        return element(name, subsets.Range([(i, i, 1) for i in index or [0]]))

    def array(self, sdfg: Any, name: str, /, **replaced: Any) -> Memlet:
        """Declare an array in an SDFG if necessary; returns a memlet of its element."""
        self.use(sdfg, name)
        return self.at(name, **replaced)

    def local(self, sdfg: Any, name: str, dtype: DType) -> Memlet:
        """A scalar of an SDFG, declared once."""
        if name not in sdfg.arrays:
            sdfg.add_scalar(name, TYPES[dtype], transient=True)
        return scalar(name)

    def lanes(self) -> Over:
        """The loops of a lane map."""
        axes = self.loops.lane_axes[-1:] if self.tiled else self.loops.lane_axes
        ranges: list[tuple[str, Any, Any]] = [(a.name, 0, self.sizes[a.name]) for a in axes]
        if not ranges:
            return []
        if self.loops.squares:
            end = call("least", sym("lane_group") + SQUARE_LANES, sym("lane_end"))
            ranges[-1] = (axes[-1].name, sym("lane_group"), end)
        elif self.tiled or self.loops.mode == "flat":
            ranges[-1] = (axes[-1].name, sym("lane_begin"), sym("lane_end"))
        return ranges

    # ---- code -----------------------------------------------------------------------------------------------------
    def held(self, name: str) -> DType:
        """The element type in which a value is computed."""
        return computed(self.leaves[name].dtype)

    def constant(self, name: str) -> bool:
        """Whether a value is a constant, which is written out where it is used."""
        return isinstance(self.leaves[name].op, Full)

    def define(self, code: Code, name: str) -> None:
        """Compute a value."""
        code.lines.append(f"const {self.held(name).c} {name} = {self.values.text[name]};")

    def load(self, code: Code, value: str, memlet: Memlet, wide: DType | None = None) -> None:
        """Read a value from memory or a scalar under its own name, once; `wide` is the type of an accumulator."""
        if not {value, f"half_{value}", f"byte_{value}", f"wide_{value}"}.isdisjoint(code.ins):
            return
        held = self.held(value)
        stored = self.arrays[memlet.data].dtype if memlet.data in self.arrays else held
        if stored in HALVES:
            code.ins[f"half_{value}"] = (memlet, dace.uint16)
            code.lines.append(f"const float {value} = vm::from_{stored.name}(half_{value});")
        elif held is DType.bool:  # gcc vectorizes tests of bytes, not loads of booleans
            code.ins[f"byte_{value}"] = (memlet, dace.uint8)
            code.lines.append(f"const bool {value} = byte_{value} != 0;")
        elif wide is not None and wide is not held:
            code.ins[f"wide_{value}"] = (memlet, TYPES[wide])
            code.lines.append(f"const {held.c} {value} = ({held.c})wide_{value};")
        else:
            code.ins[value] = (memlet, TYPES[held])

    def store(self, block: Any, code: Code, number: int) -> None:
        """Write a value to result `number`."""
        name = self.plan.arrays.results[number]
        dtype, text = self.arrays[name].dtype, self.values.operand(self.results[number].leaf)
        shown = f"vm::to_{dtype.name}({text})" if dtype in HALVES else text
        code.write(f"out{number}", self.array(block, name), dtype, shown)

    def keep(self, block: Any, code: Code, value: str, array: str) -> None:
        """Write a value to a scratch array, or to the row of a result, for later use."""
        code.write(f"save_of_{value}", self.array(block, array), self.held(value), value)

    # ---- reductions -----------------------------------------------------------------------------------------------
    def how(self, name: str) -> str:
        """The kind of a reduction under the schedules' name."""
        leaf = self.leaves[name]
        assert isinstance(leaf.op, Reduce)
        if leaf.dtype is DType.bool:
            return "any" if leaf.op.kind in ("sum", "max") else "all"
        return leaf.op.kind

    def identity(self, name: str, dtype: DType) -> str:
        """The neutral element of a reduction."""
        return IDENTITY[self.how(name)].format(t=dtype.c)

    def combined(self, name: str, dtype: DType, a: str, b: str) -> str:
        """The combination of two partial results of a reduction."""
        return COMBINE[self.how(name)].format(t=dtype.c, a=a, b=b)

    def part(self, block: Any, code: Code, name: str) -> None:
        """Combine the partial results of all blocks."""
        total, array = self.phases.accumulators(name)[1], f"part_{name}"
        self.use(block, array)
        code.ins[f"parts_{name}"] = (whole(array, block.arrays[array]), dace.pointer(TYPES[total]))
        code.lines += [
            f"{total.c} total_{name} = {self.identity(name, total)};",
            "for (int64_t part = 0; part < blocks; ++part)",
            f"    total_{name} = {self.combined(name, total, f'total_{name}', f'parts_{name}[part]')};",
            f"const {self.held(name).c} {name} = total_{name};",
        ]

    # ---- tasklets -------------------------------------------------------------------------------------------------
    def tasklet(
        self, region: Any, label: str, code: Code, over: Over = (), schedule: Any = LANES, state: Any = None
    ) -> None:
        """One tasklet, in a state of its own if none is given, under a map if `over` names loops; nothing without
        outputs.
        """
        if not code.outs:
            return
        state = after(region, label) if state is None else state
        tasklet = state.add_tasklet(
            label,
            {c: t for c, (_, t) in code.ins.items()},
            {c: t for c, (_, t) in code.outs.items()},
            "\n".join(code.lines),
            language=dace.Language.CPP,
        )
        entry = leave = None
        if over:
            ranges = {name: subsets.Range([(first, last - 1, 1)]) for name, first, last in over}
            entry, leave = state.add_map(label, ranges, schedule=schedule)
            if not code.ins:
                state.add_nedge(entry, tasklet, Memlet())
        reads = {name: state.add_read(name) for name in dict.fromkeys(m.data for m, _ in code.ins.values())}
        writes = {name: state.add_write(name) for name in dict.fromkeys(m.data for m, _ in code.outs.values())}
        for connector, (memlet, _) in code.ins.items():
            if entry is None:
                state.add_edge(reads[memlet.data], None, tasklet, connector, memlet)
            else:
                outside(state, reads[memlet.data], entry, memlet)
                state.add_edge(entry, f"OUT_{memlet.data}", tasklet, connector, memlet)
        for connector, (memlet, _) in code.outs.items():
            if connector in code.reductions:
                memlet = element(memlet.data, memlet.subset, _CONFLICT[connector.split("_", 1)[0]])
            if leave is None:
                state.add_edge(tasklet, connector, writes[memlet.data], None, memlet)
            else:
                outside(state, writes[memlet.data], leave, memlet)
                state.add_edge(tasklet, connector, leave, f"IN_{memlet.data}", memlet)
