"""Plan: all decisions for one kernel before an SDFG exists, and the kernel's identity, which follows from them."""

from __future__ import annotations

from collections.abc import Sequence

from daceml_train.codegen.kernel.arrays import Arrays
from daceml_train.codegen.kernel.domain import Domain
from daceml_train.codegen.kernel.loops import Layout, Loops
from daceml_train.codegen.kernel.staging import Staging
from daceml_train.codegen.kernel.values import Values
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import Dim, same


class Plan:
    """Loops, arrays, phases and texts of a kernel. Sizes, strides and most constants are arguments of the code.

    Raises `Refused` with a sentence.
    """

    def __init__(self, domain: Domain, operands: Sequence[Layout], results: Sequence[Layout]) -> None:
        self.loops = Loops(domain, operands, results)
        self.arrays = Arrays(self.loops)
        self.phases = Staging(self.loops, self.arrays.results)
        self.arrays.add_scratch(self.loops, self.phases)
        self.values = Values(self.loops)

    def integers(self) -> dict[str, Dim]:
        """Every integer that the generated code takes, by symbol: sizes, strides, offsets, constants."""
        values: dict[str, Dim] = {f"{a.name}_size": a.size for a in self.loops.row_axes + self.loops.lane_axes}
        for array in self.arrays.named.values():
            if array.pointer[0] == "scratch":
                continue
            for axis, stride in zip(array.axes, array.strides, strict=True):
                if not same(stride, 1):
                    values[f"{array.name}_{axis}"] = stride
            if not same(array.offset, 0):
                values[f"{array.name}_offset"] = array.offset
        return values | self.values.constants

    def structure(self) -> str:
        """All properties that the source depends on, as text, without the user's names or sizes."""
        loops, phases, values = self.loops, self.phases, self.values
        lines = [loops.mode, str(loops.squares), *(a.name for a in loops.row_axes + loops.lane_axes)]
        lines += [*self.integers(), str(values.reals), str(values.constant_text)]
        for a in self.arrays.named.values():
            unit = [same(s, 1) for s in a.strides] if a.pointer[0] != "scratch" else []
            lines.append(f"{a.name} {a.dtype.short} {a.axes} {unit} {a.pointer}")
        for name, leaf in loops.leaves.items():
            how = f"{loops.kind(leaf)} {leaf.op.kind}" if isinstance(leaf.op, Reduce) else values.text[name]
            lines.append(f"{name} {leaf.dtype.short} {self.arrays.place.get(name)} {leaf.inputs} {how}")
        for result, array in zip(loops.domain.results, self.arrays.results, strict=True):
            lines.append(f"{result.leaf} {array} {result.axes == frozenset()}")
        lines += [str(sorted(phases.saved)), str(phases.rows), str(phases.columns), str(len(loops.operands))]
        return "\n".join(lines)
