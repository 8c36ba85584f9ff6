"""The stages of the sweep: which entries, which samples, and how each is run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from benchmarks.conformance import captured, compiled, refused
from benchmarks.conformance.outcome import Outcome, Row, row
from benchmarks.conformance.samples import LEFT_OUT, THROUGH_OPTIMIZE, entries, label, samples


@dataclass(frozen=True)
class Stage:
    """One way of running samples: of which type, how many per entry (None: all), with gradients, compiled or not."""

    name: str
    title: str
    dtype: torch.dtype
    count: int | None
    gradients: bool
    compiled: bool
    refused: bool = False
    """Whether samples are given element types that most operators do not take."""

    def entries(self) -> list[Any]:
        """The entries of the stage, those that are left out by declaration included."""
        return entries(self.dtype, differentiable=self.dtype.is_floating_point)

    def run(self, op: Any, cache: str) -> Row:
        """All samples of one entry."""
        start = time.perf_counter()
        outcomes = list(self._outcomes(op, cache))
        return row(self.name, label(op), outcomes, time.perf_counter() - start)

    def _outcomes(self, op: Any, cache: str) -> Iterator[Outcome]:
        try:
            given = list(islice(samples(op, self.dtype, self.gradients), self.count))
        except Exception as error:
            yield Outcome("0", "left out", f"no samples can be created: {type(error).__name__}")
            return
        if op.name in LEFT_OUT:
            yield from (Outcome(str(i), "left out", LEFT_OUT[op.name]) for i in range(len(given)))
        elif self.refused:
            yield from refused.outcomes(op, given)
        elif self.compiled or op.name in THROUGH_OPTIMIZE:
            yield from compiled.outcomes(op, iter(given), len(given), cache, self.gradients)
        else:
            yield from self._captured(op, given, cache)

    def _captured(self, op: Any, given: list[Any], cache: str) -> Iterator[Outcome]:
        """Through capture; what it refuses for want of TorchDynamo, which breaks a graph, then through `optimize`."""
        found = captured.outcomes(op, given, self.gradients)
        refused = [(o.sample, given[int(o.sample)], False) for o in found if o.kind == "as PyTorch"]
        again = {o.sample: o for o in compiled.compare(op, refused, cache, self.gradients)}
        yield from (again.get(o.sample, o) for o in found)


STAGES: tuple[Stage, ...] = (
    Stage("captured", "all samples, values and gradients, interpreted", torch.float32, None, True, False),
    Stage("compiled", "three samples per entry, values and gradients, compiled", torch.float32, 3, True, True),
    Stage("float64", "float64, values, interpreted", torch.float64, 4, False, False),
    Stage("bfloat16", "bfloat16, values, interpreted", torch.bfloat16, 4, False, False),
    Stage("int64", "int64, values, interpreted", torch.int64, 4, False, False),
    Stage("bool", "bool, values, interpreted", torch.bool, 4, False, False),
    Stage("refused", "element types that eager execution may refuse", torch.float32, 2, False, False, refused=True),
)
"""In the order in which they run."""


def work(chosen: Callable[[Stage, Any], bool]) -> list[tuple[Stage, Any]]:
    """Stages and entries that `chosen` accepts, in order."""
    return [(stage, op) for stage in STAGES for op in stage.entries() if chosen(stage, op)]
