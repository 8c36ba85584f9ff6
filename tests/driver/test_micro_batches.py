"""Micro-batches equal as many backward passes and one update in PyTorch, and take less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.errors import Invalid

pytestmark = pytest.mark.compiled


def network() -> nn.Module:
    """No bias before the normalization: its gradient is rounding, which Adam would scale up to whole steps."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32, bias=False), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 5)).train()


def batch(rows: int = 16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 12), torch.randint(0, 5, (rows,))


def eager_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, count: int, reduction: str) -> float:
    optimizer.zero_grad()
    total = 0.0
    for a, b in zip(x.chunk(count), y.chunk(count), strict=True):
        loss = F.cross_entropy(model(a), b, reduction=reduction)
        loss = loss / count if reduction == "mean" else loss
        loss.backward()
        total += float(loss)
    optimizer.step()
    return total


@pytest.mark.parametrize(
    ("kind", "options", "reduction"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, "mean"),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3}, "sum"),
        (torch.optim.AdamW, {"lr": 1e-2}, "mean"),
    ],
)
def test_equal_to_accumulating_in_pytorch(kind: Any, options: dict[str, float], reduction: str) -> None:
    ours, theirs = network(), network()
    mine, their = kind(ours.parameters(), **options), kind(theirs.parameters(), **options)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction=reduction)

    step = dt.training_step(ours, loss, mine, micro_batches=4, reduction=reduction)
    x, y = batch()
    for _ in range(4):
        expected = eager_step(theirs, their, x, y, 4, reduction)
        assert float(step(x, y)) == pytest.approx(expected, rel=1e-5)
    assert step.breaks == [] and step.accumulating.breaks == []
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert all(p.grad is None for p in ours.parameters())
    assert {k for s in mine.state.values() for k in s} == {k for s in their.state.values() for k in s}


def test_in_pieces() -> None:
    """An optimizer without an update of ours: PyTorch's runs once per batch."""
    ours, theirs = network(), network()
    mine, their = torch.optim.Adafactor(ours.parameters()), torch.optim.Adafactor(theirs.parameters())
    step = dt.training_step(ours, F.cross_entropy, mine, micro_batches=2)
    x, y = batch()
    for _ in range(2):
        expected = eager_step(theirs, their, x, y, 2, "mean")
        assert float(step(x, y)) == pytest.approx(expected, rel=1e-5)
    assert "Adafactor" in step.breaks[0]
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_memory_falls() -> None:
    def planned(count: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU())), nn.Linear(32, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = dt.training_step(model, F.cross_entropy, optimizer, micro_batches=count)
        step(torch.randn(512, 32), torch.randint(0, 5, (512,)))
        assert step.breaks == []
        return next(iter(step.arenas.values())).capacity

    assert planned(8) < planned(1) / 3


def test_a_later_batch_size_and_a_changed_rate() -> None:
    ours, theirs = network(), network()
    mine, their = torch.optim.SGD(ours.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    step = dt.training_step(ours, F.cross_entropy, mine, micro_batches=2)
    for rows in (16, 24, 16):
        x, y = batch(rows)
        expected = eager_step(theirs, their, x, y, 2, "mean")
        assert float(step(x, y)) == pytest.approx(expected, rel=1e-5)
        mine.param_groups[0]["lr"] = their.param_groups[0]["lr"] = 0.05


def test_refusals() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(10)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(Invalid, match="a batch of 10 has no 4 equal parts"):
        dt.training_step(model, F.cross_entropy, optimizer, micro_batches=4)(x, y)
    with pytest.raises(Invalid, match=r"first dimension, whose sizes are \[8, 10\]"):
        dt.training_step(model, F.cross_entropy, optimizer, micro_batches=2)(x, y[:8])
    with pytest.raises(Invalid, match="positive whole number"):
        dt.training_step(model, F.cross_entropy, optimizer, micro_batches=0)
    with pytest.raises(Invalid, match="reduction is 'batch', 'mean' or 'sum'"):
        dt.training_step(model, F.cross_entropy, optimizer, micro_batches=2, reduction="none")  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="exclude each other"):
        dt.training_step(model, F.cross_entropy, optimizer, micro_batches=2, keep_gradients=True)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
