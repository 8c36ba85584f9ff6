"""Expressions in models: under torch.compile, in `optimize`, and in a training step."""

import copy

import pytest
import torch
from torch import nn

import daceml_train as dt
from benchmarks.novel import operators


class Model(nn.Module):
    """An involution between convolutions, as one kernel per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.kernels = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 18, 1)
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, x):
        h = self.stem(x).relu().view(-1, 2, 4, 6, 6)
        y = operators.involution(h, self.kernels(x).view(-1, 2, 3, 3, 6, 6))
        return self.head(y.flatten(1).tanh())


def problem():
    torch.manual_seed(0)
    return Model(), torch.randn(4, 3, 6, 6), torch.randint(0, 10, (4,))


def gradients(model, call, x, y):
    model.zero_grad()
    loss = nn.functional.cross_entropy(call(x), y)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def close(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_torch_compile() -> None:
    model, x, y = problem()
    close(
        gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True), x, y), gradients(model, model, x, y)
    )


@pytest.mark.compiled
@pytest.mark.slow
def test_optimize_and_training_step() -> None:
    model, x, y = problem()
    ours = copy.deepcopy(model)
    module = dt.optimize(copy.deepcopy(model))
    close(gradients(module, module, x, y), gradients(model, model, x, y))
    assert "expression" in str(dt.report(module))
    optimizer, mine = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(ours.parameters(), 0.1)
    step = dt.training_step(ours, nn.CrossEntropyLoss(), mine)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x, y).detach(), loss.detach(), rtol=1e-5, atol=1e-6)
    close(list(ours.parameters()), list(model.parameters()))
