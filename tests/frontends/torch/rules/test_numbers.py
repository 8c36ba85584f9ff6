"""Floats of a model that are symbolic: PyTorch's expressions over them become operators on 0-d arrays."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import daceml_train as dt

pytestmark = pytest.mark.compiled

_MATH = "sqrt cos cosh sin sinh tan tanh asin acos atan exp log asinh log2 log10 log1p"
FUNCTIONS: dict[str, Callable[[float], float]] = {
    **{name: getattr(math, name) for name in _MATH.split()},
    "abs": lambda a: abs(a - 1.0),
    "remainder": lambda a: (a - 1.0) % 0.7,
    "divided by": lambda a: 1.0 / a,
    "power": lambda a: 0.9**a + a**1.5 + a**-2,
    "largest": lambda a: max(a, 0.5) - min(a, 0.3),
    "logistic schedule": lambda a: 2.0 / (1.0 + math.exp(-10.0 * a)) - 1.0,
    "cosine schedule": lambda a: 0.5 * (1.0 + math.cos(math.pi * a)),
}


class Scaled(nn.Module):
    """A float of the model, through a function of Python, scales what is computed."""

    def __init__(self, function: Callable[[float], float]) -> None:
        super().__init__()
        self.function, self.number = function, 0.37
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.weight) * self.function(self.number)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_float_that_changes(name: str) -> None:
    model = Scaled(FUNCTIONS[name])
    compiled = dt.optimize(model, dynamic=True)
    for number, rows in ((0.37, 3), (0.81, 5), (0.59, 4)):
        model.number = number
        x = torch.linspace(-2.0, 2.0, rows * 4, dtype=torch.float64).view(rows, 4)
        found = []
        for call in (compiled, model):
            model.weight.grad = None
            result = call(x)
            result.sum().backward()
            found.append((result.detach(), model.weight.grad))
        torch.testing.assert_close(found[0], found[1], rtol=1e-14, atol=1e-14)
    assert compiled._daceml_train.backend.breaks == []


def test_a_number_without_an_operator_runs_as_pytorch() -> None:
    model = Scaled(lambda a: round(a, 1))
    compiled = dt.optimize(model, dynamic=True)
    x = torch.ones(2, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="the number RoundDecimal"):
        found = compiled(x)
    assert torch.equal(found, model(x))


class Scheduled(Scaled):
    """Moves its float at each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 0.05
        return torch.tanh(x * self.weight) * self.function(-10.0 * self.number)


@pytest.mark.parametrize(("name", "programs"), [("exp", 2), ("asinh", 2), ("expm1", 5)])
def test_a_schedule(name: str, programs: int) -> None:
    """What TorchDynamo compares of it: the float, since rounding makes terms that it reorders other numbers."""
    model, twin = Scheduled(getattr(math, name)), Scheduled(getattr(math, name))
    compiled = dt.optimize(model)
    for number in range(5):
        x = torch.full((2, 4), float(number), dtype=torch.float64)
        torch.testing.assert_close(compiled(x), twin(x), rtol=1e-14, atol=1e-14)
        assert model.number == twin.number
    assert compiled._daceml_train.backend.breaks == []
    assert compiled._daceml_train.backend.graphs == programs
