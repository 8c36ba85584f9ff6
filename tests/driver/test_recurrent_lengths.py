"""Recurrent layers over sequences whose length changes: eager execution's numbers, and one program for all lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.holding import close, total

pytestmark = pytest.mark.compiled

LENGTHS = (4, 6, 9, 3, 7)
LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm in both directions": (nn.LSTM, {"bidirectional": True, "num_layers": 2, "batch_first": True}),
    "lstm that projects": (nn.LSTM, {"proj_size": 3, "num_layers": 2}),
    "lstm without biases that projects": (nn.LSTM, {"proj_size": 3, "bias": False, "bidirectional": True}),
    "gru": (nn.GRU, {"num_layers": 2, "batch_first": True}),
    "gru in both directions": (nn.GRU, {"bidirectional": True, "bias": False}),
    "tanh": (nn.RNN, {"bidirectional": True}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
}


class Network(nn.Module):
    """A recurrent layer of a kind, whose first states are computed from the sequence if `begin`."""

    def __init__(self, name: str, begin: bool) -> None:
        super().__init__()
        kind, options = LAYERS[name]
        self.layer, self.begin = kind(4, 5, **options).double(), begin

    def forward(self, x: Tensor) -> Any:
        layer: Any = self.layer
        if not self.begin:
            return layer(x)
        directions = layer.num_layers * (2 if layer.bidirectional else 1)
        mean = x.mean((0, 1, 2))
        sizes = [layer.proj_size or 5, 5] if isinstance(layer, nn.LSTM) else [5]
        batch = x.shape[0 if layer.batch_first else 1]
        states = tuple((mean + k).expand(directions, batch, size).contiguous() for k, size in enumerate(sizes))
        return layer(x, states if isinstance(layer, nn.LSTM) else states[0])

    def data(self, number: int) -> Tensor:
        """A batch of a length of its own."""
        generator, length = torch.Generator().manual_seed(number), LENGTHS[number]
        first: Any = self.layer
        return torch.randn((2, length, 4) if first.batch_first else (length, 2, 4), generator=generator).double()


@pytest.mark.parametrize("begin", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["zeros", "states"])
@pytest.mark.parametrize("name", LAYERS)
def test_optimize(name: str, begin: bool) -> None:
    torch.manual_seed(0)
    theirs = Network(name, begin)
    ours = copy.deepcopy(theirs)
    optimized = dt.optimize(ours)
    for number in range(len(LENGTHS)):
        x, y = (theirs.data(number).requires_grad_() for _ in range(2))
        expected, found = theirs(x), optimized(y)
        for a, b in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True):
            close(a, b, f"result of length {number}", 1e-12)
        total(expected).backward()
        total(found).backward()
        close(y.grad, x.grad, f"gradient of length {number}", 1e-10)
        for (which, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            close(p.grad, q.grad, f"{which} of length {number}", 1e-10)
            p.grad = q.grad = None
    assert state_of(optimized).backend.graphs == 2  # the first length, and all others


@pytest.mark.parametrize("name", ["lstm in both directions", "gru", "relu"])
def test_step(name: str) -> None:
    torch.manual_seed(0)
    theirs = Network(name, False)
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (theirs, ours)]
    step = dt.training_step(ours, total, optimizers[1])
    for number in range(len(LENGTHS)):
        x = theirs.data(number)
        optimizers[0].zero_grad()
        loss = total(theirs(x))
        loss.backward()
        optimizers[0].step()
        close(step(x), loss.detach(), f"loss of length {number}", 1e-6)  # the loss itself is float32
    for (which, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        close(p, q, which, 1e-6)
    assert step.breaks == []
    assert len(step.records) == 2


def test_dropout_between_the_layers() -> None:
    torch.manual_seed(0)
    theirs = nn.GRU(4, 5, 3, dropout=0.5)
    ours = copy.deepcopy(theirs)
    optimized = dt.optimize(ours, random="eager")
    for length in LENGTHS:
        x, results = torch.randn(length, 2, 4), []
        for model in (theirs, optimized):
            torch.manual_seed(length)
            results.append(total(model(x)))
            results[-1].backward()
        close(results[1], results[0], f"of length {length}", 1e-5)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            close(p.grad, q.grad, f"gradient of length {length}", 1e-4)
