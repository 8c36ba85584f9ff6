"""Containers that a forward pass reads and adds to: as in eager execution, and without a program for each length."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of

pytestmark = pytest.mark.compiled


class Noting(nn.Module):
    """A network that keeps notes on its hidden values."""

    def __init__(self, note: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.first, self.last, self.note = nn.Linear(8, 8), nn.Linear(8, 4), note
        self.calls, self.history, self.classes = 0, dict[Any, Any](), Counter[int]()
        self.rows, self.seen = list[float](), set[Any]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        self.calls += 1
        self.note(self, h)
        return self.last(h)


def by_step(model: Any, h: Tensor) -> None:
    model.history[model.calls] = round(h.mean().item(), 3)


def classes(model: Any, h: Tensor) -> None:
    model.classes.update(h.argmax(1).tolist())


def one_class(model: Any, h: Tensor) -> None:
    model.classes[int(h.argmax(1)[0])] += 1


def last(model: Any, h: Tensor) -> None:
    model.rows.append(float(model.calls))
    model.history["mean"] = sum(model.rows) / len(model.rows)


def seen(model: Any, h: Tensor) -> None:
    model.seen.add(model.calls * 3)
    model.history["seen"] = len(model.seen)


@pytest.mark.parametrize("note", [by_step, classes, one_class, last, seen], ids=lambda f: f.__name__)
def test_a_container_that_grows_is_left_to_python(note: Callable[[Any, Tensor], None]) -> None:
    torch.manual_seed(0)
    ours = Noting(note)
    theirs = copy.deepcopy(ours)
    run = dt.optimize(ours)
    programs = []
    for _ in range(14):
        x = torch.randn(16, 8)
        torch.testing.assert_close(run(x), theirs(x))
        programs.append(state_of(run).backend.graphs)
        assert (ours.calls, ours.classes, ours.rows, ours.seen) == (
            theirs.calls,
            theirs.classes,
            theirs.rows,
            theirs.seen,
        )
        assert ours.history == pytest.approx(theirs.history, abs=2e-3)
    assert programs[-1] == programs[6], programs
    assert programs[-1] <= 6


def test_modules_that_a_user_adds_are_captured() -> None:
    """A dictionary of modules grows as well, by a user's hand: each length is another network."""
    torch.manual_seed(0)

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"0": nn.Linear(8, 8)})
            self.scales = [1.0]

        def forward(self, x: Tensor) -> Tensor:
            for part, scale in zip(self.parts.values(), self.scales, strict=True):
                x = part(x).tanh() * scale
            return x

    ours = Growing()
    run = dt.optimize(ours)
    for t in range(1, 6):
        x = torch.randn(4, 8)
        torch.testing.assert_close(run(x), ours.forward(x))
        ours.parts[str(t)] = nn.Linear(8, 8)
        ours.scales.append(0.5)
    backend = state_of(run).backend
    assert backend.graphs == 5
    assert not backend.breaks
