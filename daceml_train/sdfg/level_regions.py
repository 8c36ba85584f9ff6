"""Levels of a recursion in DaCe's form: a `LoopRegion` over levels, in which each kind of cell is a region of its own.

Before the region of a kind, the symbol `rows` takes the number of its calls in the level, and `<label>_first` the first
of them: both are read from the bounds, which are data. In the region, a state `load` slices rows of data and gathers
rows of children, states of library nodes compute, and a state `store` writes the results to their rows. In reverse, it
adds them to the rows of children.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daceml_train.graph.grammar import Reader, show_size, show_type
from daceml_train.graph.graph import Graph
from daceml_train.ops.fallback import Body
from daceml_train.ops.levels import ROWS, Levels

Writer = Any
"""A `sdfg.regions.Writer`, which imports this module."""

_ADD = "lambda a, b: a + b"


def write_levels(
    writer: Writer, label: str, op: Levels, inner: Sequence[Graph], operands: Sequence[str], results: Sequence[str]
) -> list[dict[str, str]]:
    """Write levels; the names of each body's arrays."""
    if str(ROWS) not in writer.sdfg.symbols:
        writer.sdfg.add_symbol(str(ROWS), writer.dace.int64)
    writer.sdfg.add_symbol(f"{label}_first", writer.dace.int64)
    return _LevelWriter(writer, label, op, operands, results).write(inner)


class _LevelWriter:
    """What the regions of one operator have in common."""

    def __init__(self, writer: Writer, label: str, op: Levels, operands: Sequence[str], results: Sequence[str]) -> None:
        self.writer, self.label, self.op, self.operands, self.results = writer, label, op, operands, results
        self.step, self.first = f"{label}_level", f"{label}_first"
        self.states = results[: len(op.types)]
        self.starts = [show_size(start) for start in op.starts()]

    def write(self, inner: Sequence[Graph]) -> list[dict[str, str]]:
        """Write the loop."""
        count, dace = len(self.op.types), self.writer.dace
        if self.op.reverse:
            given = self.operands[1 : 1 + count]
            self.writer.move("enter", [(x, s, None, None) for x, s in zip(given, self.states, strict=True)])
            self._clear(self.results[count:])
        else:
            self._clear(self.results)
        levels = f"({self.writer.sdfg.arrays[self.operands[0]].shape[0]} - 1)"
        step = self.step
        first, holds, onward = f"{step} = 0", f"{step} < {levels}", f"{step} = {step} + 1"
        if self.op.reverse:
            first, holds, onward = f"{step} = {levels} - 1", f"{step} >= 0", f"{step} = {step} - 1"
        region = dace.sdfg.state.LoopRegion(self.label, holds, step, first, onward, sdfg=self.writer.sdfg)
        loop = self.writer.inside(self.writer.block(region))
        loop.state("start")
        own = list(self.results[count:])
        return [self._kind(loop, kind, body, own) for kind, body in enumerate(inner)]

    def _kind(self, loop: Writer, kind: int, body: Graph, own: list[str]) -> dict[str, str]:
        """The region of a kind; takes the kind's own results from `own`."""
        op, bounds = self.op, self.operands[0]
        region = loop.dace.sdfg.state.ControlFlowRegion(f"{self.label}_kind{kind}", self.writer.sdfg)
        now, following = (f"{bounds}[{self.step}{more}, {kind}]" for more in ("", " + 1"))
        loop.block(region, {self.first: now, str(ROWS): f"{following} - {now}"})
        inside = loop.inside(region)
        calls = f"{self.first}:{self.first} + {ROWS}"
        placed = f"{self.starts[kind]} + {self.first}:{self.starts[kind]} + {self.first} + {ROWS}"
        rows = [self.operands[k] for k in op.rows[kind]]
        arguments = list(body.inputs)
        count = len(arguments) - len(op.shared[kind])
        local = [
            inside.fresh(f"{self.label}_rows{kind}_{i}", body.tensors[name]) for i, name in enumerate(arguments[:count])
        ]
        cuts = [(x, to, inside.of_rows(x, calls), None) for x, to in zip(rows, local, strict=False)]
        if op.reverse:
            held = [self.states[k] for k in op.states[kind]]
            cuts += [(x, to, inside.of_rows(x, placed), None) for x, to in zip(held, local[len(rows) :], strict=True)]
        inside.move("load", cuts)
        if not op.reverse:
            for (state, operand), to in zip(op.children[kind], local[len(rows) :], strict=True):
                self._gather(inside, self.states[state], self.operands[operand], to)
        names = inside.locals(self.label, body, [*local, *(self.operands[k] for k in op.shared[kind])])
        inside.nodes(body, names)
        made = [names[y] for y in body.outputs]
        yielded = len(op.placed(kind))
        stores = [(y, r, None, inside.of_rows(r, calls)) for y, r in zip(made[yielded:], own, strict=False)]
        del own[: len(made) - yielded]
        if op.reverse:
            for (state, operand), value in zip(op.children[kind], made, strict=False):
                self._add(inside, self.states[state], self.operands[operand], value)
        else:
            held = [self.states[k] for k in op.states[kind]]
            stores += [(y, s, None, inside.of_rows(s, placed)) for y, s in zip(made, held, strict=False)]
        inside.move("store", stores)
        return names

    # ---- states that move rows --------------------------------------------------------------------------------------
    def _ranges(self, name: str) -> tuple[dict[str, str], str]:
        """The range of a map over the elements of a row, and the subscript of an element after that of its row."""
        sizes = self.writer.sdfg.arrays[name].shape[1:]
        ranges = {f"_j{d}": f"0:{size}" for d, size in enumerate(sizes)}
        return ranges, "".join(f", {index}" for index in ranges)

    def _clear(self, names: Sequence[str]) -> None:
        """Zeros: of the rows that no level contains."""
        for name in names:
            state, (ranges, at) = self.writer.state("enter"), self._ranges(name)
            size, memlet = self.writer.sdfg.arrays[name].shape[0], self.writer.dace.Memlet(f"{name}[_r{at}]")
            state.add_mapped_tasklet(
                "zero", {"_r": f"0:{size}", **ranges}, {}, "_o = 0", {"_o": memlet}, external_edges=True
            )

    def _gather(self, inside: Writer, source: str, indices: str, to: str) -> None:
        """A state that copies the rows of children."""
        memlet, (ranges, at) = self.writer.dace.Memlet, self._ranges(source)
        size = self.writer.sdfg.arrays[source].shape[0]
        inside.state("load").add_mapped_tasklet(
            "gather",
            {"_r": f"0:{ROWS}", **ranges},
            {"_i": memlet(f"{indices}[{self.first} + _r]"), "_s": memlet(f"{source}[0:{size}{at}]")},
            "_o = _s[_i]",
            {"_o": memlet(f"{to}[_r{at}]")},
            external_edges=True,
        )

    def _add(self, inside: Writer, target: str, indices: str, value: str) -> None:
        """A state that adds rows to those of children, one after the other."""
        memlet, (ranges, at) = self.writer.dace.Memlet, self._ranges(target)
        size = self.writer.sdfg.arrays[target].shape[0]
        inside.state("store").add_mapped_tasklet(
            "add",
            {"_r": f"0:{ROWS}", **ranges},
            {"_i": memlet(f"{indices}[{self.first} + _r]"), "_v": memlet(f"{value}[_r{at}]")},
            "_o[_i] = _v",
            {"_o": memlet(f"{target}[0:{size}{at}]", wcr=_ADD)},
            schedule=self.writer.dace.ScheduleType.Sequential,
            external_edges=True,
        )


# ---- what regions do not express ------------------------------------------------------------------------------------
def level_attributes(op: Levels) -> dict[str, Any]:
    """The attributes of levels, bodies left out, as JSON has them."""
    plain = {name: getattr(op, name) for name in ("rows", "children", "shared", "states", "reverse")}
    return {**plain, "types": [*map(show_type, op.types)], "counts": [*map(show_size, op.counts)]}


def levels_of(bodies: Sequence[Body], given: Mapping[str, Any]) -> Levels:
    """The operator with these bodies and attributes."""
    return Levels(
        tuple(bodies),
        tuple(Reader(text).type() for text in given["types"]),
        tuple(Reader(text).size() for text in given["counts"]),
        tuple(map(tuple, given["rows"])),
        tuple(tuple((state, operand) for state, operand in pairs) for pairs in given["children"]),
        tuple(map(tuple, given["shared"])),
        tuple(map(tuple, given["states"])),
        given["reverse"],
    )
