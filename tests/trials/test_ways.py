"""Steps that are not one program run in one way, whichever trials came before: values are equal to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.faster import Faster
from tests.trials.net import data
from tests.trials.test_attributes import held_out

pytestmark = [pytest.mark.compiled, pytest.mark.filterwarnings("ignore:daceml_train")]


class Looking(nn.Module):
    """Python looks at a value, so that the step is in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.drop = nn.Linear(8, 8), nn.Linear(8, 4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.inner(x).tanh())
        return self.last(y * 2 if y.sum().item() > 0 else y)


class Counting(Looking):
    """A number that changes becomes an input of its program."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.drop(self.inner(x).tanh()) * (1 + 0.1 * self.calls))


class Growing(Looking):
    """It has a program for each text, of which there is no end."""

    text = ""

    def forward(self, x: Tensor) -> Tensor:
        self.text += "x"
        return self.last(self.drop(self.inner(x).tanh()) * (1 + 0.1 * len(self.text)))


class Both(Looking):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


def new(kind: type[nn.Module]) -> dt.Stages:
    torch.manual_seed(0)
    model = kind()
    step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    return dt.Stages(step, data=data, evaluate=held_out, seed=0)


@pytest.mark.parametrize("kind", [Looking, Counting, Growing, Both])
def test_trials_equal_separate_ones(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faster, "takes_pieces", lambda self: self.calls > 11)  # whatever is measured
    trials: list[Any] = [{"lr": dt.schedule.piecewise({0: 0.1, 2: rate})} for rate in (0.1, 0.05, 0.2)]
    found = new(kind)
    values = [dict(found.run(number, trial, (2, 12))) for number, trial in enumerate(trials)]
    assert values == [dict(new(kind).run(0, trial, (2, 12))) for trial in trials]
    assert found.step.fixed is False and found.step.in_python is (kind in (Growing, Both))
