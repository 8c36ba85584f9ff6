"""Programs of recursions: recorded runs become levels, which are compiled once for all shapes of trees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daceml_train.driver.binding import apart
from daceml_train.driver.function import run_with_layout
from daceml_train.driver.goals import Differentiable, compile_differentiable
from daceml_train.driver.records import Record
from daceml_train.driver.settings import Settings
from daceml_train.errors import why
from daceml_train.frontends.torch.capture.trace import first_line
from daceml_train.frontends.torch.recursion.batch import Batch, Members
from daceml_train.frontends.torch.recursion.cells import TRACING, Cell
from daceml_train.frontends.torch.recursion.derivatives import first_only
from daceml_train.frontends.torch.recursion.kinds import DATA, Layout
from daceml_train.frontends.torch.recursion.reached import Reach
from daceml_train.frontends.torch.recursion.runs import Run
from daceml_train.runtime.levels import last_seconds

MOST, SECONDS = 8, 30.0
"""From how many programs and seconds on new cells are no reason to compile."""


@dataclass(frozen=True)
class LevelTimes:
    """The levels of one batch, in the order in which they ran: the calls of each, and its seconds in wall clock."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    backward: bool


WATCHERS: list[Callable[[LevelTimes], None]] = []
"""What is told the times of levels that run now."""


def _tell(bounds: torch.Tensor, backward: bool) -> None:
    rows = bounds.diff(dim=0).sum(1).tolist()
    pairs = zip(rows[::-1] if backward else rows, last_seconds(len(rows)), strict=False)
    found = [(count, time) for count, time in pairs if count]
    if found:  # a derivative that is hoisted as a whole has no levels
        times = LevelTimes(tuple(count for count, _ in found), tuple(time for _, time in found), backward)
        for watcher in WATCHERS:
            watcher(times)


@dataclass
class ForestProgram:
    """The compiled levels of a set of cells."""

    layout: Layout
    compiled: Differentiable
    names: list[str]
    """The graph's inputs."""
    outputs: frozenset[int]
    """The results through which gradients flow."""

    def __post_init__(self) -> None:
        self.kept = [self.names.index(name) for name in self.compiled.kept]
        self.wanted = {self.names.index(name): k for k, name in enumerate(self.compiled.gradients)}

    def __call__(self, batch: Batch) -> Sequence[torch.Tensor]:
        """The results, as autograd sees them; what no call of the batch reads has no gradient."""
        read = batch.shared_arrays
        shared = range(1, 1 + len(self.layout.shared))
        wanted = [k for k in self.wanted if k not in shared or k in read]
        arrays = [t if k in wanted else t.detach() for k, t in enumerate(batch.arrays)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in arrays):
            results: Sequence[torch.Tensor] = _Levels.apply(self, batch.reach, *arrays)  # type: ignore[no-untyped-call]
            return results
        results = run_with_layout(self.compiled.forward, arrays)[: self.compiled.results]
        if WATCHERS:
            _tell(arrays[0], False)
        return results


class _Levels(torch.autograd.Function):
    """A batch's levels as one node of PyTorch's autograd."""

    @staticmethod
    def forward(ctx: Any, program: ForestProgram, reach: Reach, *arrays: torch.Tensor) -> Any:
        outputs = run_with_layout(program.compiled.forward, arrays)
        results, saved = outputs[: program.compiled.results], outputs[program.compiled.results :]
        if WATCHERS:
            _tell(arrays[0], False)
        ctx.bounds = arrays[0]
        ctx.program, ctx.reach, ctx.count = program, reach, len(arrays)
        ctx.shapes = [(results[i].shape, results[i].dtype) for i in program.compiled.cotangents]
        results = apart(results, saved)
        ctx.save_for_backward(*(arrays[i] for i in program.kept), *saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in program.outputs))
        return tuple(results)

    @staticmethod
    @first_only
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        program: ForestProgram = ctx.program
        compiled = program.compiled
        gradients: list[torch.Tensor | None] = [None] * ctx.count
        given = [cotangents[i] for i in compiled.cotangents]
        reached = ctx.reach(cotangents)
        if compiled.backward is not None and not reached.isdisjoint(program.wanted):
            dense = [
                torch.zeros(shape, dtype=dtype) if g is None else g
                for g, (shape, dtype) in zip(given, ctx.shapes, strict=True)
            ]
            found = run_with_layout(compiled.backward, [*ctx.saved_tensors, *dense])
            if WATCHERS:
                _tell(ctx.bounds, True)
            for position, index in program.wanted.items():
                if position in reached:
                    gradients[position] = found[index]
        return None, None, *gradients


class Forests:
    """The programs of one recursion, by the cells that they have."""

    def __init__(self, settings: Settings, records: list[Record], note: Callable[[str], None]) -> None:
        self.settings, self.records, self.note = settings, records, note
        self.programs: list[ForestProgram] = []
        self.compiled = 0
        """How many programs were compiled."""
        self.refused: set[Cell] = set()
        """Cells that no program can have, which PyTorch runs level by level."""
        self.closed = False
        """Whether no further program is compiled."""
        self.spent = 0.0
        """Seconds of compiling."""

    def run(self, structures: Any, runs: Sequence[Run]) -> Batch | None:
        """The values of runs that a compiled program has computed; None if PyTorch has to."""
        members = Members(structures, runs)
        if not self.refused.isdisjoint(members.runs):
            return None
        program = self._program(members.runs)
        if program is None:
            return None
        batch = Batch(program.layout, members)
        batch.finish(program(batch))
        return batch

    def _program(self, members: dict[Cell, list[Run]]) -> ForestProgram | None:
        if (found := self._known(members)) is not None or self.closed:
            return found
        with TRACING:  # of which PyTorch knows one at a time, whichever model it is for
            return self._known(members) or self._new(members)

    def _known(self, members: dict[Cell, list[Run]]) -> ForestProgram | None:
        return next((program for program in self.programs if program.layout.serves(members)), None)

    def _new(self, members: dict[Cell, list[Run]]) -> ForestProgram | None:
        cells = list(members)
        replaced = [p for p in self.programs if not set(cells).isdisjoint(p.layout.cells)]
        cells = list(dict.fromkeys([*(c for p in replaced for c in p.layout.cells), *cells]))
        for cell in cells:  # grows
            found = dict.fromkeys(s[0] for sources in cell.sources for s in sources if s is not DATA)
            cells += [c for c in found if c not in cells]
        start = time.perf_counter()
        try:
            result = self._compiled(Layout(cells))
        except Exception as error:  # of PyTorch's batching rules, too, which do not know every operator
            alone = [cell for cell in cells if not cell.batches]
            self.note(f"a recursion whose levels PyTorch runs: {first_line(error) if alone else why(error)}")
            self.refused.update(alone or cells)
            return None
        self.spent += time.perf_counter() - start
        self.closed = self.compiled >= MOST and self.spent > SECONDS
        if self.closed:
            kinds = f"{len(cells)} kinds of cells by now"
            self.note(f"a recursion whose cells are others in many batches, {kinds}: PyTorch runs levels with new ones")
        self.programs = [p for p in self.programs if p not in replaced] + [result]
        return result

    def _compiled(self, layout: Layout) -> ForestProgram:
        graph, wrt, outputs = layout.graph()
        compiled = compile_differentiable(graph, wrt, outputs, self.settings)
        self.records += compiled.records
        self.compiled += 1
        return ForestProgram(layout, compiled, list(graph.inputs), frozenset(outputs))
