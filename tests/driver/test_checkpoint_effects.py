"""Python objects that a checkpointed function changes: PyTorch calls it once more in the backward pass."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import daceml_train as dt
from tests.driver.conformity import losses_beside


class Counting(nn.Module):
    """Scales by how often it was called, which an attribute and a list count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.rows = nn.Linear(4, 3, dtype=torch.float64), 0, list[int]()

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rows.append(len(x))
        return self.layer(x).tanh() * self.calls

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Branching(Counting):
    """The same beside a decision on a value."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Counting, Branching])
@pytest.mark.filterwarnings("ignore:daceml_train runs a")
def test_they_change_as_often_as_in_eager_execution(kind: type[Counting]) -> None:
    torch.manual_seed(0)
    eager: Any = kind()
    optimized, stepped = copy.deepcopy(eager), copy.deepcopy(eager)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (eager, optimized, stepped)]
    step = dt.training_step(stepped, lambda y: y.square().mean(), optimizers[2])
    faster = dt.optimize(optimized)
    for _ in range(6):
        x = torch.randn(5, 4, dtype=torch.float64)
        expected, *losses = losses_beside((eager, faster), optimizers[:2], step, x)
        for loss in losses:
            torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)
        assert eager.calls == optimized.calls == stepped.calls
        assert eager.rows == optimized.rows == stepped.rows
