"""A batch: recorded runs as the data of `levels`, whose program computes their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from daceml_train.frontends.torch.recursion.cells import Cell
from daceml_train.frontends.torch.recursion.forest import alive, rows
from daceml_train.frontends.torch.recursion.kinds import DATA, Kind, Layout
from daceml_train.frontends.torch.recursion.lazy import Lazy
from daceml_train.frontends.torch.recursion.runs import Run


def by_cell(structures: Any, runs: Sequence[Run]) -> dict[Cell, list[Run]]:
    """Runs by their cells, which have all outputs that are read of them, in the order of levels."""
    found: dict[Any, list[Run]] = {}
    for run in runs:
        found.setdefault(run.at, []).append(run)
    members: dict[Cell, list[Run]] = {}
    for at, own in found.items():
        if at.cell is None:
            at.cell = Cell(at)
            structures.cells.append(at.cell)
        own.sort(key=_height)
        at.cell.want(alive(own))
        members[at.cell] = own
    return members


def _height(run: Run) -> int:
    return run.height


def learn(members: dict[Cell, list[Run]]) -> None:
    """Note where the inputs of cells come from."""
    own = {id(run): cell for cell, runs in members.items() for run in runs}
    for cell, runs in members.items():
        for k, sources in enumerate(cell.sources):
            for run in runs:
                a = run.inputs[k]
                if type(a) is Lazy and a.value is None and (source := own.get(id(a.source))) is not None:
                    sources[source, a.index] = None
                else:
                    sources[DATA] = None


class Batch:
    """Runs of one flush as rows of kinds. `results` are those of the layout's graph, once they are computed."""

    def __init__(self, layout: Layout, members: dict[Cell, list[Run]]) -> None:
        self.layout = layout
        self.results: Sequence[torch.Tensor] = ()
        self.calls: list[list[Any]] = [members.get(k.cell, []) if k.cell else [] for k in layout.every]
        for kind, runs in zip(layout.every, self.calls, strict=True):
            for position, run in enumerate(runs):
                run.group, run.position, run.forest = kind, position, self
        self.fed: dict[int, list[Any]] = {state: [] for state in layout.feeders}
        first = len(layout.kinds)
        children = dict(self._children())
        counts = [max(1, len(runs)) for runs in self.calls[:first]]
        counts += [max(1, len(found)) for found in self.fed.values()]
        self.starts = np.cumsum([0, *counts]).tolist()
        self.counts = counts
        self.arrays = [self._bounds(), *[s.tensor for s in layout.shared]]
        for kind, count in zip(layout.every, counts, strict=True):
            for k, ((operand, state), meta) in enumerate(zip(kind.inputs, layout.metas(kind), strict=True)):
                if state is not None:
                    self.arrays.append(self._numbers(children[operand], count))
                else:
                    found = self.fed[self._state(kind)] if kind.cell is None else self._data(kind, k)
                    empty = torch.zeros((1, *meta.shape), dtype=meta.dtype, device=meta.device)
                    self.arrays.append(rows(found) if found else empty)

    # ---- structure ----------------------------------------------------------------------------------------------
    def _state(self, kind: Kind) -> int:
        return next(state for state, feeder in self.layout.feeders.items() if feeder is kind)

    def _data(self, kind: Kind, k: int) -> list[Any]:
        assert kind.cell is not None
        if not kind.cell.inputs:
            return [torch.tensor(n) for n in range(len(self.calls[kind.number]))]
        return [run.inputs[k] for run in self.calls[kind.number]]

    def _children(self) -> Any:
        """Per operand that names children, the (kind, position) of each; data become rows of feeders."""
        for kind, runs in zip(self.layout.kinds, self.calls, strict=False):
            for k, (operand, state) in enumerate(kind.inputs):
                if state is None:
                    continue
                found = []
                for run in runs:
                    a = run.inputs[k]
                    source = a.source if type(a) is Lazy else None
                    if type(source) is Run and source.forest is self and a.value is None:
                        found.append((source.group.number, source.position))
                    else:
                        fed = self.fed[state]
                        found.append((self.layout.feeders[state].number, len(fed)))
                        fed.append(a)
                yield operand, found

    def _numbers(self, found: list[tuple[int, int]], count: int) -> torch.Tensor:
        starts = self.starts
        numbers = [starts[kind] + position for kind, position in found] or [0] * count
        return torch.from_numpy(np.array(numbers, dtype=np.int64))

    def _bounds(self) -> torch.Tensor:
        """The bounds of levels; rows that are fed stand before all calls."""
        first = 1 if self.fed else 0
        heights = [np.array([run.height + first for run in runs], dtype=np.int64) for runs in self.calls]
        last = max((int(h[-1]) for h in heights if len(h)), default=0)
        levels = np.arange(last + 2)
        bounds = np.zeros((last + 2, len(heights)), dtype=np.int64)
        for kind, own in enumerate(heights):
            bounds[:, kind] = np.searchsorted(own, levels, side="left")
        for kind, fed in enumerate(self.fed.values(), len(self.layout.kinds)):
            bounds[1:, kind] = len(fed)
        return torch.from_numpy(bounds)

    # ---- values -------------------------------------------------------------------------------------------------
    def finish(self, results: Sequence[torch.Tensor]) -> None:
        """Take the computed values; what they were computed from is released."""
        self.results = results
        self.arrays = []
        self.fed = {}
        for runs in self.calls:
            for run in runs:
                run.height = run.stage = 0
                run.inputs = []
                run.values = []  # which refer to the run
        self.calls = []

    def place(self, value: Lazy) -> tuple[torch.Tensor, int]:
        """The tensor and the row in it that have a value."""
        run = value.source
        assert isinstance(run, Run)
        is_state, result = run.group.outputs[value.index]
        return self.results[result], (self.starts[run.group.number] if is_state else 0) + run.position

    def value(self, value: Lazy) -> torch.Tensor:
        """A computed value."""
        if value.value is not None:
            return value.value
        tensor, row = self.place(value)
        return tensor[row]
