"""Blocks: parts of a recursive function that only compute with tensors; what they record is kept, and repeated."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from daceml_train.frontends.torch.recursion.effects import all_settled
from daceml_train.frontends.torch.recursion.lazy import Lazy, meta_of, recording
from daceml_train.frontends.torch.recursion.pure import modules_of
from daceml_train.frontends.torch.recursion.repeats import (
    MISS,
    Alias,
    Known,
    Numbers,
    Operand,
    Place,
    entry,
    repeat,
    returned,
)
from daceml_train.frontends.torch.recursion.runs import Run
from daceml_train.frontends.torch.recursion.simple import only_computes
from daceml_train.frontends.torch.recursion.state import SCALARS
from daceml_train.frontends.torch.recursion.watches import Reads, Watch


class Unkept(Exception):
    """Operands or results for which a record cannot be repeated."""


@dataclass
class Kept:
    """What a block recorded for operands of some structure: functions that repeat it."""

    known: list[Callable[..., Any]] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    """What each of them depends on."""
    failed: int = 0
    """How often nothing could be kept."""


MOST = 32
"""How many records are kept for one structure of operands, and how often keeping them is tried in vain."""
FAILED = 256
"""How often that is tried in vain for all structures."""


class Block:
    """A function of what some statements of a recursive function read.

    Operands in the positions `numbers` are lists of Python's numbers, of which the function takes a tensor.
    """

    def __init__(
        self, function: types.FunctionType, owner: types.FunctionType, numbers: frozenset[int] = frozenset()
    ) -> None:
        self.function, self.owner, self.numbers = function, owner, numbers
        self.entry = entry(function.__code__.co_argcount, self, self._run)
        """What the owner calls."""
        self.entry_code = getattr(self.entry, "__code__", None)
        """Its code; None where it is native, and has no frames."""
        self.keyed: tuple[int, ...] = ()
        """The positions of operands that were ever scalars or lists."""
        self.failed = 0
        """How often nothing could be kept, as where each call has numbers of its own."""

    def _run(self, *operands: Any) -> Any:
        recorder = recording()
        if recorder is None or recorder.eager or self.failed >= FAILED:
            return self.function(*self._tensors(operands))
        key = self if not self.keyed else (self, *[_structure(operands[k]) for k in self.keyed])
        kept = recorder.memo.get(key)
        if kept is not None:
            if (result := self._repeated(recorder, kept, operands)) is not MISS:
                return result
            if recorder.settle(kept.watches):
                kept = recorder.memo.get(key)
                if kept is not None and (result := self._repeated(recorder, kept, operands)) is not MISS:
                    return result
        if kept is not None and (kept.failed >= MOST or len(kept.known) >= MOST):
            return self.function(*self._tensors(operands))
        return self._first(recorder, operands)

    def _repeated(self, recorder: Any, kept: Kept, operands: Sequence[Any]) -> Any:
        for repeated in kept.known:
            if (result := repeated(recorder, *operands)) is not MISS:
                recorder.last[self] = repeated
                return result
        return MISS

    def _tensors(self, operands: Sequence[Any]) -> list[Any]:
        return [torch.tensor(a) if k in self.numbers else a for k, a in enumerate(operands)]

    def _kept(self, memo: dict[Any, Kept], operands: Sequence[Any]) -> Kept:
        more = [k for k, a in enumerate(operands) if k not in self.numbers and type(a) in (*SCALARS, list)]
        self.keyed = tuple(sorted({*self.keyed, *more}))
        key = self if not self.keyed else (self, *[_structure(operands[k]) for k in self.keyed])
        return memo.setdefault(key, Kept())

    def _first(self, recorder: Any, operands: Sequence[Any]) -> Any:
        """Run the statements, and keep what they record if that can be repeated."""
        given = [all_settled(a) if id(a) not in recorder.shared else a for a in self._tensors(operands)]
        if not (outermost := recorder.outermost(self._caller())):
            recorder.settle()  # before the record is kept for a state
        before, events = len(recorder.pending), recorder.events
        grad = torch.is_grad_enabled()
        reads = Reads(recorder.structures.noisy)
        described = None if outermost else self._described(recorder, operands, given, reads)
        watch = Watch(reads)
        result = self.function(*given)
        if outermost:
            return result
        kept = self._kept(recorder.memo, operands)
        results: list[Run] = recorder.pending[before:]
        try:
            if described is None or recorder.events != events or len(results) != 1:
                raise Unkept
            run = results[0]
            positions = _positions(given, recorder.shared)
            if any(id(a) not in positions for a in run.inputs):
                raise Unkept
            template = _template(result, run, positions)
        except Unkept:
            kept.failed += 1
            self.failed += 1
            return result
        run.sealed = True
        run.used.update(returned(template))
        inputs = [positions[id(a)] for a in run.inputs]
        repeated = repeat(run.at, grad, described, inputs, tuple(v.meta for v in run.values), template, watch)
        kept.known.append(repeated)
        kept.watches.append(watch)
        recorder.watches.append(watch)
        recorder.last[self] = repeated
        return result

    def _caller(self) -> types.FrameType:
        """The frame of the function whose statements these are: the first one that is not ours."""
        frame: types.FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code is self.entry_code:
            frame = frame.f_back
        assert frame is not None
        return frame

    def _described(
        self, recorder: Any, operands: Sequence[Any], given: Sequence[Any], reads: Reads
    ) -> list[Operand] | None:
        """What is compared before a record is repeated; None where it cannot be. `reads` receives what else is read."""
        reads.files(self.owner, modules_of(self.owner).intersection(self.function.__code__.co_names))
        found: list[Operand] = []
        first: dict[int, int] = {}
        for k, a in enumerate(operands):
            kind = type(a)
            if isinstance(a, torch.Tensor) and first.setdefault(id(a), k) != k:
                found.append(Alias(first[id(a)]))
            elif k in self.numbers:
                types_ = set(map(type, a))
                if len(types_) != 1 or not types_ <= {int, float}:
                    return None
                found.append(Numbers(len(a), types_.pop()))
            elif kind is Lazy and a.value is None:
                found.append(a.meta)
            elif kind is list and a and all(type(b) is Lazy and b.value is None for b in a):
                found.append([b.meta for b in a])
            elif kind in SCALARS:
                found.append((kind, a))
            elif isinstance(a, types.MethodType | torch.nn.Module):
                if not only_computes(a, recorder.modules, reads):
                    return None
                found.append(a)
            elif kind is torch.Tensor or kind is torch.nn.Parameter:
                found.append(recorder.shared[id(a)] if id(a) in recorder.shared else Known(kind, meta_of(a)))
            else:
                return None
        return found


def _structure(a: Any) -> Any:
    """What an operand has in common with those for which a record may be repeated."""
    kind = type(a)
    if kind is list:
        return len(a)
    return (kind, a, str(a)) if kind in SCALARS else kind


def _positions(operands: Sequence[Any], shared: Any) -> dict[int, Place]:
    """Where tensors are first among the operands; those in lists are nowhere else."""
    found: dict[int, Place] = {}
    for k, a in enumerate(operands):
        for j, b in enumerate(a) if type(a) is list else ((None, a),):
            if isinstance(b, torch.Tensor) and id(b) not in shared:
                place = found.setdefault(id(b), Place(k, j))
                if place != Place(k, j) and (j is not None or place.element is not None):
                    raise Unkept
    return found


def _template(found: Any, run: Run, positions: dict[int, Place]) -> Any:
    """A result of a block: a number of a value of its run, the place of an operand, or a list or tuple of such."""
    if type(found) is Lazy and found.source is run:
        return found.index
    if isinstance(found, torch.Tensor) and id(found) in positions:
        return positions[id(found)]
    if type(found) in (list, tuple):
        return (type(found), *(_template(f, run, positions) for f in found))
    raise Unkept
