"""A batch: recorded runs as the data of `levels`, whose program computes their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from daceml_train.frontends.torch.recursion import columns
from daceml_train.frontends.torch.recursion.cells import Cell
from daceml_train.frontends.torch.recursion.forest import alive, rows
from daceml_train.frontends.torch.recursion.kinds import DATA, Kind, Layout
from daceml_train.frontends.torch.recursion.lazy import Lazy
from daceml_train.frontends.torch.recursion.reached import Marks, Reach, apart
from daceml_train.frontends.torch.recursion.runs import Run


class Members:
    """Runs by their cells, which have all outputs that are read of them, in the order of levels.

    `columns` has the inputs of a cell's runs, per input a list, or an array of integers. Runs that compute the same are
    one, as leaves with equal words are: no cell draws random numbers.
    """

    def __init__(self, structures: Any, runs: Sequence[Run]) -> None:
        self.runs: dict[Cell, list[Run]] = {}
        self.merged: dict[Cell, tuple[list[Run], columns.Numbers]] = {}
        """All runs of cells some of whose runs are equal, and which of `runs` each of them is."""
        self.columns: dict[Cell, list[Any]] = {}
        for at, own in columns.by_structure(list(runs)).items():
            if at.cell is None:
                at.cell = Cell(at)
                structures.cells.append(at.cell)
            cell = at.cell
            cell.want(alive(own))
            inputs = list(map(_integers, columns.inputs(own)))
            columns.place(own, cell)
            if (equal := _equal(inputs)) is not None:
                self.merged[cell] = own, equal[1]
                own = [own[k] for k in equal[0].tolist()]
                inputs = [column[equal[0]] for column in inputs]
            self.runs[cell] = own
            self.columns[cell] = inputs
        self.data: dict[tuple[Cell, int], bool] = {}
        """Whether data are among what an input is taken from."""
        self._learn()

    def _learn(self) -> None:
        """Note where the inputs of cells come from."""
        for cell, inputs in self.columns.items():
            for k, (column, sources) in enumerate(zip(inputs, cell.sources, strict=True)):
                data = isinstance(column, np.ndarray)
                self.data[cell, k], outputs = (True, set()) if data else columns.sources(column)
                now = {*outputs, DATA} if self.data[cell, k] else outputs
                if not now <= sources.keys():
                    sources.update(dict.fromkeys(source for source in map(_source, column) if source not in sources))


def _integers(column: list[Any]) -> Any:
    """An input that consists of lists of Python's integers as an array, one row per run; others as they are."""
    if type(column[0]) is not list or not column[0] or set(map(type, column)) != {list}:
        return column
    found = np.array([n for numbers in column for n in numbers])
    width = len(column[0])
    return found.reshape(-1, width) if found.dtype == np.int64 and found.size == width * len(column) else column


def _equal(inputs: Sequence[Any]) -> tuple[columns.Numbers, columns.Numbers] | None:
    """The positions of runs that differ, and which of these each run is equal to; None if all differ.

    Only runs of which all inputs are Python's integers are compared.
    """
    if not inputs or not all(isinstance(column, np.ndarray) for column in inputs):
        return None
    whole = np.concatenate(inputs, axis=1) if len(inputs) > 1 else inputs[0]
    narrow = whole.shape[1] == 1  # compared as numbers, not as rows of bytes
    given, axis = (whole[:, 0], None) if narrow else (whole, 0)
    _, first, numbers = np.unique(given, axis=axis, return_index=True, return_inverse=True)
    return None if len(first) == len(whole) else (first, numbers.reshape(-1))


def _source(a: Any) -> Any:
    return (a.source.group, a.index) if type(a) is Lazy and a.source.forest is None else DATA


def padded(count: int) -> int:
    """A number of rows, or of levels, with at most an eighth more, which few batches differ in.

    A program is bound to sizes, so equal ones need less time. No level contains the rows that are more.
    """
    step = max(1 << max(count - 1, 0).bit_length() >> 4, 8)
    return max(-(-count // step) * step, 1)


def _filled(found: torch.Tensor | None, dtype: Any, device: Any, unused: tuple[int, ...]) -> torch.Tensor:
    """Rows of data, with unused ones after them."""
    if found is not None and not unused[0]:
        return found
    rest = torch.zeros(unused, dtype=dtype, device=device)
    return rest if found is None else torch.cat([found, rest])


class Batch:
    """Runs of one flush as rows of kinds. `results` are those of the layout's graph, once they are computed."""

    def __init__(self, layout: Layout, members: Members) -> None:
        self.layout, self.members = layout, members
        self.results: Sequence[torch.Tensor] = ()
        self.calls: list[list[Any]] = [members.runs.get(k.cell, []) if k.cell else [] for k in layout.every]
        self.every: list[list[Run]] = []
        """Runs by kind, equal ones included."""
        self.merged = bool(members.merged)
        first = len(layout.kinds)
        counts = [padded(len(runs)) for runs in self.calls[:first]]
        start = 0
        for kind, runs, count in zip(layout.kinds, self.calls, counts, strict=False):
            whole, numbers = members.merged.get(kind.cell, (runs, None)) if kind.cell else (runs, None)
            columns.place(whole, kind, start, self, numbers)
            self.every.append(whole)
            start += count
        self.fed: dict[int, list[Any]] = {state: [] for state in layout.feeders}
        mixed = dict(self._mixed())
        counts += [padded(len(found)) for found in self.fed.values()]
        self.starts = np.cumsum([0, *counts]).tolist()
        self.counts = counts
        bounds = self._bounds()
        children: dict[int, np.ndarray[Any, Any]] = {}
        data: dict[int, Marks] = {}
        self.arrays = [torch.from_numpy(bounds), *[s.tensor for s in layout.shared]]
        for kind, count in zip(layout.every, counts, strict=True):
            for k, ((operand, state), meta) in enumerate(zip(kind.inputs, layout.metas(kind), strict=True)):
                if state is not None:
                    children[operand] = self._numbers(kind, k, mixed.get(operand), count)
                    self.arrays.append(torch.from_numpy(children[operand]))
                else:
                    found = self.fed[self._state(kind)] if kind.cell is None else self._data(kind, k)
                    unused = meta.dtype, meta.device, (count - len(found), *meta.shape)
                    given, marks = rows(found) if len(found) else (None, None)
                    self.arrays.append(_filled(given, *unused))
                    data |= {} if marks is None else {operand: marks}
        self.reach = Reach(layout, bounds, counts, children, data)

    @property
    def shared_arrays(self) -> set[int]:
        """The positions of shared tensors on which calls of this batch depend with a gradient."""
        first = len(self.layout.kinds)
        kinds = [k for k, runs in zip(self.layout.kinds, self.calls[:first], strict=True) if runs]
        used = {s for kind in kinds if kind.cell is not None for s in kind.cell.differentiated}
        return {k for k, s in enumerate(self.layout.shared, 1) if s in used}

    # ---- structure ----------------------------------------------------------------------------------------------
    def _state(self, kind: Kind) -> int:
        return next(state for state, feeder in self.layout.feeders.items() if feeder is kind)

    def _data(self, kind: Kind, k: int) -> list[Any]:
        assert kind.cell is not None
        if not kind.cell.inputs:
            return [torch.tensor(n) for n in range(len(self.calls[kind.number]))]
        inputs = self.members.columns.get(kind.cell)
        return [] if inputs is None else inputs[k]

    def _mixed(self) -> Any:
        """Per operand that names children, some of which are data, the kind and number of each.

        Data become rows of feeders.
        """
        for kind in self.layout.kinds:
            assert kind.cell is not None
            for k, (operand, state) in enumerate(kind.inputs):
                if state is None or not self.members.data.get((kind.cell, k)):
                    continue
                found: list[tuple[int | None, int]] = []
                column = self.members.columns[kind.cell][k]
                for a in column.tolist() if isinstance(column, np.ndarray) else column:
                    source = a.source if type(a) is Lazy else None
                    if type(source) is Run and source.forest is self:
                        found.append((None, source.position))
                    else:
                        fed = self.fed[state]
                        found.append((self.layout.feeders[state].number, len(fed)))
                        fed.append(a)
                yield operand, found

    def _numbers(self, kind: Kind, k: int, mixed: list[tuple[int | None, int]] | None, count: int) -> columns.Numbers:
        """The rows of children."""
        assert kind.cell is not None
        numbers: Any
        if mixed is not None:
            starts = self.starts
            numbers = [n if feeder is None else starts[feeder] + n for feeder, n in mixed]
        elif (inputs := self.members.columns.get(kind.cell)) is not None:
            numbers = columns.positions(inputs[k])
        else:
            numbers = []
        result = np.zeros(count, dtype=np.int64)
        result[: len(numbers)] = numbers
        return result

    def _bounds(self) -> columns.Numbers:
        """The bounds of levels; rows that are fed stand before all calls."""
        first = 1 if self.fed else 0
        heights = [columns.heights(runs) + first for runs in self.calls]
        last = max((int(h[-1]) for h in heights if len(h)), default=0)
        count = padded(last + 1) + 1
        levels = np.arange(count)
        bounds = np.zeros((count, len(heights)), dtype=np.int64)
        for kind, own in enumerate(heights):
            bounds[:, kind] = np.searchsorted(own, levels, side="left")
        for kind, fed in enumerate(self.fed.values(), len(self.layout.kinds)):
            bounds[1:, kind] = len(fed)
        return bounds

    # ---- values -------------------------------------------------------------------------------------------------
    def finish(self, results: Sequence[torch.Tensor]) -> None:
        """Take the computed values; what they were computed from is released."""
        self.results = results
        self.arrays = []
        self.fed = {}
        for runs in self.every:
            columns.release(runs)  # values refer to the run
        self.calls = self.every = []
        del self.members

    def place(self, value: Lazy) -> tuple[torch.Tensor, Marks, int]:
        """The tensor that has a value, what its readers mark, and the row."""
        run = value.source
        assert isinstance(run, Run)
        is_state, result = run.group.outputs[value.index]
        row = run.position - (0 if is_state else self.starts[run.group.number])
        return self.results[result], self.reach.results[result], row

    def places(self, values: Sequence[Any]) -> tuple[torch.Tensor, Marks, columns.Numbers] | None:
        """The same for all values and their rows; None if they are in several tensors, or of other batches."""
        values = values if type(values) is list else list(values)
        if not columns.all_of(values, self):
            return None
        results = {(*kind.outputs[index], kind.number) for kind, index in columns.outputs(values)}
        is_state, result, number = next(iter(results))
        if any(r[1] != result for r in results):
            return None
        start = 0 if is_state else self.starts[number]
        return self.results[result], self.reach.results[result], columns.positions(values) - start

    def value(self, value: Lazy) -> torch.Tensor:
        """A computed value."""
        if value.value is not None:
            return value.value
        tensor, marks, row = self.place(value)
        return apart(tensor, [row], marks)[0]
