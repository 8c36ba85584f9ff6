"""Steps under a memory budget: the same training, the planned bytes within the budget, an error below the minimum."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import BudgetInfeasible
from daceml_train.lowering.footprint import Footprint, footprint
from daceml_train.tensor import Dim
from daceml_train.transformations.global_movement.rematerialize import Rematerialize
from daceml_train.transformations.pipelines import TRAINING

pytestmark = pytest.mark.compiled


class Network(nn.Module):
    """Convolutions with statistics that a step writes, and dropout, whose numbers are drawn in the step."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 16, 16)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.drop(F.silu(norm(layer(x))))
        return self.head(x.mean((2, 3)))


def train(pipeline: dt.Pipeline, steps: int = 3) -> tuple[dict[str, Tensor], TrainingStep]:
    torch.manual_seed(0)
    model = Network().train()
    x, y = torch.randn(8, 3, 24, 24), torch.randint(0, 5, (8,))
    step = dt.training_step(
        model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), pipeline=pipeline
    )
    for _ in range(steps):
        step(x, y)
    assert step.breaks == []
    return model.state_dict(), step


def planned(step: TrainingStep) -> Footprint:
    executable = step.records[0].executable
    assert executable is not None

    def value(size: Dim) -> int:
        return size if isinstance(size, int) else int(size.subs(dict.fromkeys(size.free_symbols, 1)))

    return footprint(executable.program, value)


def with_budget(*arguments: object, **options: object) -> dt.Pipeline:
    return TRAINING.before("update_in_place", Rematerialize(*arguments, **options))  # type: ignore[arg-type]


def test_the_same_training_in_less_memory() -> None:
    plain, step = train(TRAINING)
    less, again = train(with_budget(budget=0.75))
    assert planned(again).peak <= 0.75 * planned(step).peak
    for name, value in plain.items():
        torch.testing.assert_close(less[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert int(less["norms.0.num_batches_tracked"]) == 3


def test_a_budget_below_the_minimum_is_an_error() -> None:
    with pytest.raises(BudgetInfeasible, match="a budget of 10 KiB is below the minimum of"):
        train(with_budget(budget="10 KiB"))
