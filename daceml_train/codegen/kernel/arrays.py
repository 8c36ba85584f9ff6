"""Arrays: every array that a kernel's code indexes: views of arguments, results, and scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.codegen.kernel.expression import computed
from daceml_train.codegen.kernel.loops import SQUARE, SQUARE_LANES, TILE, Loops
from daceml_train.codegen.kernel.staging import Staging
from daceml_train.errors import Refused
from daceml_train.tensor import Dim, DType, same, simplify, symbol


@dataclass
class Array:
    """An array of the SDFG: a view of an argument, of a result, or scratch memory."""

    name: str
    dtype: DType
    axes: tuple[str, ...]
    """Loops that index it; `block` for one element per block."""
    strides: tuple[Dim, ...] = ()
    pointer: tuple[str, int] = ("scratch", 0)
    """`input`, `output` or `scratch`, and the position among those."""
    offset: Dim = 0
    bytes: Dim = 0
    """Scratch arrays only."""


class Arrays:
    """The arrays of one kernel by name. An argument that is read under two indexings is two arrays."""

    def __init__(self, loops: Loops) -> None:
        self.scratch: list[Array] = []
        self.named: dict[str, Array] = {}
        self.place: dict[str, str] = {}
        """Argument read -> its array."""
        self.results: list[str] = []
        """Array of each result."""
        names = [a.name for a in loops.row_axes + loops.lane_axes]

        def array(name: str, strides: dict[int, Dim], dtype: DType, pointer: tuple[str, int], offset: Dim) -> Array:
            where = {n: strides[loops.innermost[n]] for n in names if not same(strides.get(loops.innermost[n], 0), 0)}
            return Array(name, dtype, tuple(where), tuple(where.values()), pointer, offset)

        def shape(a: Array) -> tuple[object, ...]:
            return a.axes, a.strides, a.offset, a.pointer

        for number, (leaf, strides) in enumerate(zip(loops.reads, loops.memory, strict=True)):
            layout = loops.operands[leaf.argument]
            offset = simplify(sum((layout.strides[d] * m for d, m in leaf.offset), start=0))
            output = array(f"x{number}", strides, layout.dtype, ("input", leaf.argument), offset)
            twin = next((a.name for a in self.named.values() if shape(a) == shape(output)), None)
            self.place[leaf.name] = twin or output.name
            if twin is None:
                self.named[output.name] = output
        outputs = 0
        for number, (result, strides) in enumerate(zip(loops.domain.results, loops.stores, strict=True)):
            if result.target is None:
                output = array(f"y{number}", strides, loops.results[number].dtype, ("output", outputs), 0)
                outputs += 1
            else:
                output = array(f"y{number}", strides, loops.results[number].dtype, ("input", result.target), 0)
            twin = next((a.name for a in self.named.values() if a.pointer == output.pointer), None)
            if twin is not None:
                if shape(self.named[twin]) != shape(output):
                    raise Refused(f"result {number} is stored over argument {result.target} under another index")
                output = self.named[twin]
            self.named[output.name] = output
            self.results.append(output.name)
        for target in {r.target for r in loops.domain.results if r.target is not None}:
            if sum(a.pointer == ("input", target) for a in self.named.values()) > 1:
                raise Refused(f"argument {target} is written and read under several indices")

    def add_scratch(self, loops: Loops, phases: Staging) -> None:
        """Scratch arrays: accumulators and partial results of columns, kept rows, values between phases."""
        lanes = tuple(a.name for a in loops.lane_axes)
        whole = {a.name: a.size for a in loops.row_axes + loops.lane_axes} | {"block": symbol("blocks")}

        def add(name: str, axes: Sequence[str], dtype: DType) -> None:
            strides: list[Dim] = []
            step: Dim = 1
            for axis in reversed(axes):
                strides.append(step)
                step = step * (TILE if loops.mode == "tiles" and axis in lanes else whole[axis])
            pointer = ("scratch", len(self.scratch))
            result = Array(name, dtype, tuple(axes), tuple(reversed(strides)), pointer, 0, simplify(step * dtype.bytes))
            self.scratch.append(result)
            self.named[name] = result

        for name in loops.turned:
            dtype = self.named[self.place[name]].dtype
            pointer = ("scratch", len(self.scratch))
            size = SQUARE_LANES * (SQUARE + 1)  # one more, so the rows of a square are in different cache sets
            axes = ("block", loops.lane_axes[-1].name, loops.row_axes[-1].name)
            bytes_of = simplify(symbol("blocks") * size * dtype.bytes)
            result = Array(f"square_{name}", dtype, axes, (size, SQUARE + 1, 1), pointer, 0, bytes_of)
            self.scratch.append(result)
            self.named[result.name] = result
        tile = ("block", loops.lane_axes[-1].name) if loops.mode == "tiles" else ("block", *lanes)
        for name, leaf in loops.leaves.items():
            kind = loops.kind(leaf)
            if kind in ("column", "full"):
                dtype, total = phases.accumulators(name)
                vector = kind == "column" and loops.has_lanes(leaf.inputs[0])
                if vector and dtype is not total:
                    add(f"sum_{name}", tile, dtype)
                add(f"part_{name}", tile if vector else ("block",), total)
        for plan in phases.rows:
            for name, array in plan.kept.items() if plan else ():
                if array.startswith("keep_"):
                    add(array, tile, computed(loops.leaves[name].dtype))
        for name in sorted(phases.saved, key=phases.order.__getitem__):
            dtype = computed(loops.leaves[name].dtype)
            if loops.has_rows(name):
                add(f"row_{name}", tuple(a.name for a in loops.row_axes), dtype)
            elif loops.has_lanes(name):
                add(f"column_{name}", tile if loops.mode == "tiles" else lanes, dtype)
