"""Classes of modules whose `forward` is replaced while a model trains, which TorchDynamo does not notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt


def trained(way: str) -> tuple[list[Tensor], list[str]]:
    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).tanh()

    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Layer(4, 6), Layer(6, 2)).to(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = dt.optimize(model) if way == "optimize" else model
    step = dt.training_step(model, F.mse_loss, optimizer) if way == "step" else None
    losses = []
    for number in range(4):
        if number == 2:
            changed: Any = lambda self, x: F.linear(x, self.weight) * 2  # noqa: E731
            Layer.forward = changed  # type: ignore[method-assign]
        x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
        if step is not None:
            losses.append(step(x, y))
            continue
        optimizer.zero_grad()
        loss = F.mse_loss(called(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())], [] if step is None else step.breaks


@pytest.mark.compiled
@pytest.mark.parametrize("way", ["optimize", "step"])
def test_a_class_gets_another_forward(way: str) -> None:
    found, breaks = trained(way)
    torch.testing.assert_close(found, trained("eager")[0])
    assert breaks == []
