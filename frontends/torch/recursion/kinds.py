"""Kinds: what the cells of one program read of each other, as learned from batches, and the operator graph of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.recursion.cells import Cell
from daceml_train.frontends.torch.recursion.lazy import Meta
from daceml_train.graph.bodies import body_of
from daceml_train.graph.graph import Graph, Role
from daceml_train.ops.fallback import Body
from daceml_train.ops.levels import ROWS, Levels
from daceml_train.tensor import Dim, DType, Tensor, symbol

Output = tuple[Cell, int]
"""A value of a cell, by its position among the values of the cell."""
DATA = None
"""Stands for data, in place of an output, among what an input is taken from."""


@dataclass(eq=False)
class Kind:
    """A cell as a kind of `levels`, or a feeder: rows of data that stand among the rows of a state (no cell).

    `inputs` tells per input of the cell the operand, and the state of which it is the row, or None for rows of data.
    """

    number: int
    cell: Cell | None
    meta: Meta | None = None
    inputs: list[tuple[int, int | None]] = field(default_factory=list)
    outputs: dict[int, tuple[bool, int]] = field(default_factory=dict)
    """Value -> whether it is a state, and the result of `levels` that has it."""


class Layout:
    """The kinds, states, and operands of the levels of a set of cells; `learned` has the sources of their inputs."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = list(cells)
        self.learned = [[set(sources) for sources in cell.sources] for cell in cells]
        self.outputs = [cell.outputs for cell in cells]
        self.shared = list(dict.fromkeys(s for cell in cells for s in cell.shared))
        self.classes: dict[Output, Output] = {}
        self._unite()
        self.states = self._states()
        self.kinds = [Kind(number, cell) for number, cell in enumerate(cells)]
        self.feeders: dict[int, Kind] = {}
        """State -> the kind that feeds rows of data into it."""
        self.operands = 1 + len(self.shared)
        self._bind()
        self.results = self._results()

    def serves(self, cells: Iterable[Cell]) -> bool:
        """Whether it has these cells as they are now known."""
        known = {cell: k for k, cell in enumerate(self.cells)}
        for cell in cells:
            k = known.get(cell)
            if k is None or self.outputs[k] != cell.outputs:
                return False
            for (_, state), now, then in zip(self.kinds[k].inputs, cell.sources, self.learned[k], strict=False):
                if not all(self._takes(state, source, known) for source in now.keys() - then):
                    return False
                then.update(now)
        return True

    def _takes(self, state: int | None, source: Output | None, known: dict[Cell, int]) -> bool:
        """Whether an input that is a row of `state`, or of data, can come from there."""
        if source is DATA or state is None:
            return source is DATA and (state is None or state in self.feeders)
        k = known.get(source[0])
        return k is not None and self.kinds[k].outputs.get(source[1]) == (True, state)

    # ---- states -------------------------------------------------------------------------------------------------
    def _find(self, output: Output) -> Output:
        while (parent := self.classes.setdefault(output, output)) != output:
            output = parent
        return output

    def _unite(self) -> None:
        """Unite outputs that one input is taken from, and, since further batches may, those that are alone of a type.

        The latter only where no cell has two outputs in one class then.
        """
        alone: dict[Meta, Output] = {}
        for cell in self.cells:
            for sources in cell.sources:
                outputs = [s for s in sources if s is not DATA]
                for other in outputs[1:]:
                    self.classes[self._find(other)] = self._find(outputs[0])
        for cell in self.cells:
            metas = [cell.metas[k] for k in cell.outputs]
            for k, meta in zip(cell.outputs, metas, strict=True):
                if metas.count(meta) == 1:
                    self._join(alone.setdefault(meta, (cell, k)), (cell, k))

    def _join(self, a: Output, b: Output) -> None:
        first, second = self._find(a), self._find(b)
        owners = [output[0] for output in self._every() if self._find(output) in (first, second)]
        if len(set(owners)) == len(owners):
            self.classes[second] = first

    def _every(self) -> list[Output]:
        return [(cell, k) for cell in self.cells for k in cell.outputs]

    def _states(self) -> dict[Output, int]:
        """The classes of outputs that an input may be taken from, each a state."""
        states: dict[Output, int] = {}
        for cell in self.cells:
            for sources in cell.sources:
                for output in sources:
                    if output is not DATA:
                        states.setdefault(self._find(output), len(states))
        for cell in self.cells:
            own = [states[c] for k in cell.outputs if (c := self._find((cell, k))) in states]
            if len(set(own)) != len(own):
                raise Unsupported("a recursion that reads different results of a cell in the same place")
        return states

    def _bind(self) -> None:
        for kind in self.kinds:
            cell = kind.cell
            assert cell is not None
            for sources in cell.sources or [{DATA: None}]:
                outputs = [s for s in sources if s is not DATA]
                state = self.states[self._find(outputs[0])] if outputs else None
                kind.inputs.append((self._operand(), state))
                if state is not None and DATA in sources and state not in self.feeders:
                    self.feeders[state] = Kind(-1, None)
        for number, kind in enumerate(self.feeders.values(), len(self.kinds)):
            kind.number = number
            kind.inputs.append((self._operand(), None))

    def _operand(self) -> int:
        self.operands += 1
        return self.operands - 1

    def _results(self) -> list[Meta]:
        metas: dict[int, Meta] = {}
        result = len(self.states)
        for kind in self.kinds:
            assert kind.cell is not None
            for k in kind.cell.outputs:
                state = self.states.get(self._find((kind.cell, k)))
                if state is None:
                    kind.outputs[k], result = (False, result), result + 1
                else:
                    kind.outputs[k] = (True, state)
                metas[kind.outputs[k][1]] = kind.cell.metas[k]
        for state, kind in self.feeders.items():
            kind.meta = metas[state]
        return [metas[k] for k in range(result)]

    # ---- the graph ----------------------------------------------------------------------------------------------
    @property
    def every(self) -> list[Kind]:
        """Kinds of cells, then feeders."""
        return [*self.kinds, *self.feeders.values()]

    def metas(self, kind: Kind) -> list[Meta]:
        """The types of a kind's inputs."""
        if kind.cell is None:
            assert kind.meta is not None
            return [kind.meta]
        return list(kind.cell.given)

    def graph(self) -> tuple[Graph, list[str], list[int]]:
        """The levels as a graph, its inputs that have gradients, and its outputs through which gradients flow."""
        graph, every = Graph("recursion"), self.every
        bounds = graph.input("bounds", Tensor((symbol("bounds"), len(every)), DType.int64))
        operands, wrt = [bounds], list[str]()
        for number, shared in enumerate(self.shared):
            tensor = Tensor(tuple(shared.tensor.shape), types.element_type(shared.tensor.dtype))
            operands.append(graph.input(f"shared_{number}", tensor, Role.parameter))
            wrt += [f"shared_{number}"] if shared.tensor.requires_grad else []
        counts = [symbol(f"calls_{kind.number}") for kind in every]
        for kind, count in zip(every, counts, strict=True):
            for (operand, state), meta in zip(kind.inputs, self.metas(kind), strict=True):
                name = f"{'rows' if state is None else 'children'}_{operand}"
                operands.append(
                    graph.input(name, _rows(meta, count) if state is None else Tensor((count,), DType.int64))
                )
                wrt += [name] if state is None and meta.requires_grad else []
        results = graph.emit(self._levels(counts), *operands)
        graph.output(*results)
        return graph, wrt, [k for k, meta in enumerate(self.results) if meta.requires_grad]

    def _levels(self, counts: Sequence[Dim]) -> Levels:
        bodies, rows, children = [], [], []
        shared: list[tuple[int, ...]] = []
        states: list[tuple[int, ...]] = []
        for kind in self.every:
            rows.append(tuple(operand for operand, state in kind.inputs if state is None))
            children.append(tuple((state, operand) for operand, state in kind.inputs if state is not None))
            if kind.cell is None:
                bodies.append(Body(("x",), (), ("x",)))
                shared.append(())
                states.append(next((s,) for s, feeder in self.feeders.items() if feeder is kind))
            else:
                bodies.append(self._body(kind, kind.cell))
                shared.append(tuple(1 + self.shared.index(s) for s in kind.cell.shared))
                states.append(tuple(at for is_state, at in kind.outputs.values() if is_state))
        types_ = tuple(_row(meta) for meta in self.results[: len(self.states)])
        return Levels(tuple(bodies), types_, tuple(counts), tuple(rows), tuple(children), tuple(shared), tuple(states))

    def _body(self, kind: Kind, cell: Cell) -> Body:
        """The body of a cell: rows of data first, then rows of states, then what is shared; states first as results."""
        graph = cell.graph(ROWS)
        names = list(graph.inputs)
        own = names[: len(kind.inputs)]
        first = [n for n, (_, state) in zip(own, kind.inputs, strict=True) if state is None]
        second = [n for n, (_, state) in zip(own, kind.inputs, strict=True) if state is not None]
        found = dict(zip(cell.outputs, graph.outputs, strict=True))
        results = [found[k] for k, (is_state, _) in kind.outputs.items() if is_state]
        results += [found[k] for k, (is_state, _) in kind.outputs.items() if not is_state]
        body = body_of(graph)
        return Body((*first, *second, *names[len(own) :]), body.statements, tuple(results))


def _row(meta: Meta) -> Tensor:
    return Tensor(tuple(meta.shape), types.element_type(meta.dtype))


def _rows(meta: Meta, count: Dim) -> Tensor:
    return Tensor((count, *meta.shape), types.element_type(meta.dtype))
