"""Models that note values in lists and deques: as in eager execution, and one program however long the lists are."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.variables.builder import VariableBuilder

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.imperative import Imperative, Pair, assert_alike, batches, kept, loss_of

VariableBuilder._type_dispatch()  # TorchDynamo, which stores its methods at its first trace, has run before
EVERYWHERE: list[Any] = []


class Noting(Imperative):
    """Numbers, tensors, tuples and new lists in a list, a deque, a dictionary's list, and a global list."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[Tensor] = deque(maxlen=3)
        self.by_name: dict[str, list[Any]] = {"calls": []}

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.notes.append(self.calls)  # as it is before it changes
        self.calls += 1
        self.notes.append((self.calls, h.mean().item()))
        self.last.append(h.detach().sum())
        self.by_name["calls"].append([self.calls, "call"])
        EVERYWHERE.append(self.calls)
        return self.r(h)


class Sharing(Imperative):
    """One list under two names, and a new list that is kept twice."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.notes
        self.row: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.row = [h.detach().amax()]
        self.notes.append(self.row)
        self.other.append("other")
        self.row.append(1.5)
        return self.r(h)


class ReadingLater(Imperative):
    """A list that is read after it was appended to, as long as it is short."""

    def forward(self, x: Tensor) -> Tensor:
        if self.calls < 3:
            self.calls += 1
            self.notes.append(0.5)
        h = self.l(x) * len(self.notes)
        return self.r(h + self.notes[-1])


class Window(Imperative):
    """A deque of limited length of which the mean is an operand."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[float] = deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.last.append(2.0)
        self.last.append(float(len(self.last)))
        return self.r(h * sum(self.last))


MODELS = (Noting, Sharing, ReadingLater, Window)


@pytest.mark.parametrize("model", MODELS)
def test_steps_as_in_eager_execution(model: Callable[[], Imperative]) -> None:
    EVERYWHERE.clear()
    pair = Pair(model())
    pair.train(batches(8))
    if model is Noting:
        assert [n for call in range(1, 9) for n in (call, call)] == EVERYWHERE
        assert len(pair.step.records) == 2 and not pair.step.breaks  # one for the first value of the counter
    if model is Sharing:
        assert len(pair.step.records) == 1 and not pair.step.breaks
        assert pair.ours.other is pair.ours.notes and pair.ours.notes[-2] is pair.ours.row


@pytest.mark.parametrize("model", MODELS)
def test_modules_as_in_eager_execution(model: Callable[[], Imperative]) -> None:
    theirs = model().double()
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (ours, theirs)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = dt.optimize(ours, random="eager")
        for x in batches(8):
            losses = []
            for called, optimizer in zip((compiled, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                loss = loss_of(called(x), torch.ones_like(x))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            assert_alike(*losses)
            assert_alike(kept(ours), kept(theirs))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_alike(a, b)
    state = state_of(compiled)
    assert state is not None
    if model is Noting:
        assert state.backend.graphs == 2


def test_what_is_not_a_list_any_more_is_captured_again() -> None:
    pair = Pair(Sharing())
    pair.train(batches(3))
    for model in (pair.ours, pair.theirs):
        model.notes = []  # no longer the list that `other` is
    pair.train(batches(3))
    assert pair.ours.other is not pair.ours.notes


class Waiting(Imperative):
    """A graph breaks while methods of a list and of a dictionary wait for their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.notes.append(int(h.argmax(1).unique().numel()))
        self.counts.update(largest=int(h.argmax(1).unique()[0]))
        return self.r(h)


def test_a_method_that_waits_at_a_break_compiles_nothing() -> None:
    theirs = Waiting()
    ours = copy.deepcopy(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = dt.optimize(ours)
        state = state_of(compiled)
        assert state is not None
        graphs = []
        for x in batches(5):
            loss_of(compiled(x.float()), torch.ones(x.shape)).backward()
            loss_of(theirs(x.float()), torch.ones(x.shape)).backward()
            assert_alike(kept(ours), kept(theirs))
            graphs.append(state.backend.graphs)
    assert graphs[1:] == graphs[1:2] * 4 and not state.backend.breaks
