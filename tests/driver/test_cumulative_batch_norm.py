"""Batch normalizations with momentum=None: running statistics are cumulative averages, of a count that is a buffer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of

pytestmark = pytest.mark.compiled


class Images(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=None, **options)
        self.plain, self.last = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.plain(self.norm(self.first(x)).tanh()).mean((2, 3)))
        return result


def assert_alike(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=name)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize("way", ["optimize", "training_step"])
def test_against_eager(way: str, options: dict[str, Any]) -> None:
    theirs = Images(**options).double()
    ours = copy.deepcopy(theirs)
    their, mine = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (theirs, ours))
    compiled = dt.optimize(ours)
    step = dt.training_step(ours, F.mse_loss, mine, keep_gradients=True)
    for number in range(5):
        if number == 3:  # as `swa_utils.update_bn` does
            for model in (ours, theirs):
                model.norm.reset_running_stats()
        x, y = torch.randn(2 + number, 2, 6, 6).double(), torch.randn(2 + number, 3).double()
        their.zero_grad()
        expected = F.mse_loss(theirs(x), y)
        expected.backward()
        their.step()
        if way == "training_step":
            loss = step(x, y)
        else:
            mine.zero_grad()
            loss = F.mse_loss(compiled(x), y)
            loss.backward()
            mine.step()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=1e-12)
        assert_alike(ours, theirs)
    theirs.eval(), ours.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), theirs(x), rtol=1e-12, atol=1e-12)
    state = state_of(compiled)
    assert state is not None and state.backend.breaks == [] and step.breaks == [] and step.pieces is None


def test_a_momentum_that_is_changed() -> None:
    theirs = Images().double()
    ours = copy.deepcopy(theirs)
    compiled = dt.optimize(ours)
    x = torch.randn(3, 2, 6, 6).double()
    for momentum in (None, 0.3, None):
        for model in (ours, theirs):
            model.norm.momentum = momentum
        torch.testing.assert_close(compiled(x), theirs(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.norm.running_var, theirs.norm.running_var, rtol=1e-12, atol=1e-12)


def test_one_value_per_channel_is_eagers_error() -> None:
    model = nn.BatchNorm1d(3, momentum=None)
    compiled = dt.optimize(model)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        compiled(torch.randn(1, 3))
    assert model.num_batches_tracked == 1  # which eager execution counts before it raises
