"""NaN, infinite and equal bounds: values and gradients are eager's, in the interpreter and in kernels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import daceml_train as dt
from tests.frontends.torch.check import Interpreting

NUMBERS = [math.nan, math.inf, -math.inf, 0.0, 1.0, -1.0, 2.0, 3.0]
BOUNDS = ((math.nan, 2.0), (1.0, math.nan), (math.nan, None), (None, math.nan), (1.0, 2.0), (1.0, 1.0), (2.0, 1.0))


class Clamp(torch.nn.Module):
    """Clamps by several bounds, given as numbers, as 0-d tensors, or as tensors; None is no bound."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor, bounds: Any) -> torch.Tensor:
        return torch.stack([torch.clamp(x, low, high) for low, high in bounds])


def bounds_of(kind: str) -> list[tuple[Any, Any]]:
    def made(b: float | None) -> Any:
        if b is None or kind == "number":
            return b
        return torch.full((32,) if kind == "tensor" else (), b).requires_grad_()

    return [(made(low), made(high)) for low, high in BOUNDS]


def run(model: Any, kind: str) -> list[torch.Tensor | None]:
    x = torch.tensor(NUMBERS * 4).requires_grad_()
    bounds = bounds_of(kind)
    y = model(x, bounds)
    y.backward(torch.arange(1.0, 1 + y.numel()).reshape(y.shape))
    leaves = [x, *(b for pair in bounds for b in pair if isinstance(b, torch.Tensor))]
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["number", "0-d", "tensor"])
def test_a_bound_that_is_nan_in_kernels(kind: str, tmp_path: Path) -> None:
    compiled = dt.optimize(Clamp(kind), cache=str(tmp_path))
    expected, result = run(Clamp(kind), kind), run(compiled, kind)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["number", "0-d", "tensor"])
def test_a_bound_that_is_nan_in_the_interpreter(kind: str) -> None:
    backend = Interpreting()
    x, bounds = torch.tensor(NUMBERS * 4).requires_grad_(), bounds_of(kind)
    result = torch.compile(Clamp(kind), backend=backend, fullgraph=True)(x, bounds)
    y = Clamp(kind)(x, bounds)
    y.sum().backward()
    np.testing.assert_array_equal(np.asarray(result.detach()), y.detach().numpy())
    np.testing.assert_array_equal(backend.gradients[id(x)], x.grad.numpy())


ACTIVATIONS: dict[str, Any] = {
    name: getattr(torch.nn.functional, name)
    for name in ("hardswish", "hardsigmoid", "hardtanh", "relu6", "elu", "celu", "selu", "softplus", "silu")
} | {
    "leaky": lambda x: torch.nn.functional.leaky_relu(x, math.nan),
    "elu of nan": lambda x: torch.nn.functional.elu(x, math.nan),
    "max": torch.max,
    "min": torch.min,
    "norm": lambda x: torch.linalg.vector_norm(x, math.inf),
    "smallest": lambda x: torch.linalg.vector_norm(x, -math.inf),
    "xlogy": lambda x: torch.xlogy(x, x),
    "logit": torch.logit,
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_special_values_in_the_interpreter(name: str) -> None:
    """As many numbers as fill PyTorch's vectors, whose gradient at NaN its other loops do not always have."""
    torch._dynamo.reset()
    backend = Interpreting()
    function = ACTIVATIONS[name]
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 0.25, 90.0] * 64).double()
    x.requires_grad_()
    result = torch.compile(lambda v: function(v), backend=backend, fullgraph=True)(x)
    y = function(x)
    y.sum().backward()
    keep = (
        ~x.isnan()
        if name in ("hardswish", "elu", "elu of nan", "celu", "selu")
        else torch.ones_like(x, dtype=torch.bool)
    )
    np.testing.assert_allclose(np.asarray(result.detach()), y.detach().numpy(), rtol=1e-13)
    ours, theirs = torch.as_tensor(backend.gradients[id(x)]), x.grad
    np.testing.assert_allclose(ours[keep].numpy(), theirs[keep].numpy(), rtol=1e-13)


SELECTED: dict[str, Any] = {
    "mask": lambda x: x * (x > 0).float(),
    "where": lambda x: x * torch.where(x > 0, 1.0, 0.0),
    "zero": lambda x: x * 0.0,
    "sum with zero": lambda x: x + 0.0,
    "difference of itself": lambda x: x - x,
    "quotient of itself": lambda x: x / x,
}


class Selected(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SELECTED[self.name](x)


@pytest.mark.compiled
@pytest.mark.parametrize("name", SELECTED)
def test_compilers_keep_what_arithmetic_does_with_special_values(name: str, tmp_path: Path) -> None:
    """No flag lets the compiler turn `x * (condition ? 1 : 0)` into a choice: NaN and infinity times zero are NaN."""
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -2.0, 3e-39] * 8, requires_grad=True)
    y = SELECTED[name](x)
    results = dt.optimize(Selected(name), cache=str(tmp_path))(x)
    torch.testing.assert_close(results, y, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(results[~results.isnan()]), torch.signbit(y[~y.isnan()]))
    (ours,), (theirs,) = (torch.autograd.grad(v.nansum(), x) for v in (results, y))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


FACTORS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "addmm": (torch.addmm, ((2, 3), (2, 4), (4, 3))),
    "baddbmm": (torch.baddbmm, ((5, 2, 3), (5, 2, 4), (5, 4, 3))),
    "addbmm": (torch.addbmm, ((2, 3), (5, 2, 4), (5, 4, 3))),
    "addmv": (torch.addmv, ((2,), (2, 4), (4,))),
    "addr": (torch.addr, ((2, 3), (2,), (3,))),
}


@pytest.mark.parametrize("beta", [0, 2])
@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_of_zero_ignores_what_it_multiplies(name: str, beta: int) -> None:
    """The first operand of `addmm` and its like may then be NaN; its gradient is zero, which is not none."""
    torch._dynamo.reset()
    function, (first, *others) = FACTORS[name]
    c = torch.full(first, math.nan if beta == 0 else 1.5, dtype=torch.float64, requires_grad=True)
    a, b = (torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in others)
    backend = Interpreting()
    result = torch.compile(lambda *v: function(*v, beta=beta, alpha=3), backend=backend, fullgraph=True)(c, a, b)
    y = function(c, a, b, beta=beta, alpha=3)
    y.sum().backward()
    np.testing.assert_allclose(np.asarray(result.detach()), y.detach().numpy(), rtol=1e-13)
    for operand in (c, a, b):
        np.testing.assert_allclose(backend.gradients[id(operand)], operand.grad.numpy(), rtol=1e-13)
