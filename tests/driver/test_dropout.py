"""Dropout in compiled code: PyTorch's generator decides, each layer and call draws its own, backward sees the same mask."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt

pytestmark = pytest.mark.compiled

ONES = torch.ones(200, 100)


def test_rate_and_scaling() -> None:
    result = dt.optimize(nn.Dropout(0.3))(ONES)
    kept = result != 0
    assert abs(kept.float().mean().item() - 0.7) < 0.015
    torch.testing.assert_close(result[kept], torch.full_like(result[kept], 1 / 0.7))


def test_the_seed_decides() -> None:
    dropout = dt.optimize(nn.Dropout(0.5))
    torch.manual_seed(1)
    first, second = dropout(ONES), dropout(ONES)
    torch.manual_seed(1)
    assert torch.equal(dropout(ONES), first)
    assert not torch.equal(first, second)


def test_layers_draw_independently() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return F.dropout(x, 0.5), F.dropout(x, 0.5)

    a, b = dt.optimize(Two())(ONES)
    both = ((a != 0) & (b != 0)).float().mean().item()
    assert abs(both - 0.25) < 0.015


def test_backward_uses_the_mask_of_its_forward() -> None:
    dropout = dt.optimize(nn.Dropout(0.5))
    x = ONES.clone().requires_grad_()
    first, second = dropout(x), dropout(x)
    (gradient,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
    assert torch.equal(gradient, first.detach())
    (gradient,) = torch.autograd.grad(second.sum(), x)
    assert torch.equal(gradient, second.detach())


def test_eval_is_the_identity() -> None:
    dropout = dt.optimize(nn.Dropout(0.5))
    assert not torch.equal(dropout(ONES), ONES)
    assert torch.equal(dropout.eval()(ONES), ONES)


def test_steps_draw_anew_and_repeat_with_the_seed() -> None:
    def losses() -> list[float]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 1))
        step = dt.training_step(model, lambda y: y.square().mean(), torch.optim.SGD(model.parameters(), lr=0.0))
        x = torch.randn(6, 8)
        found = [float(step(x)) for _ in range(4)]
        assert step.breaks == []
        return found

    first = losses()
    assert len(set(first)) == 4
    assert losses() == first


class Changed(nn.Module):
    """Changes what dropout returns, which is its input where nothing is dropped."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.dropout(x, self.p, self.training)
        y += 1
        return x + y, F.dropout(y, self.p, self.training)


@pytest.mark.parametrize("way", ["optimize", "torch.compile"])
@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True)])
def test_dropout_that_drops_nothing_is_its_input(way: str, p: float, training: bool) -> None:
    model = Changed(p).train(training)
    called = dt.optimize(model) if way == "optimize" else torch.compile(model, backend="daceml_train")
    for _ in range(2):
        x = torch.zeros(2)
        total, same = called(x)
        assert same is x and x._version == 1
        torch.testing.assert_close((x, total), (torch.ones(2), torch.full((2,), 2.0)))
