"""Functions written in DaCe inside models: values, derivatives against finite differences, and errors by name."""

from __future__ import annotations

import copy
from typing import Any

import dace
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt

pytestmark = pytest.mark.compiled
N, M = dace.symbol("N"), dace.symbol("M")


@dace.program
def gate(x: dace.float64[N, M], w: dace.float64[M]):
    h = np.tanh(x * w)
    return x + h * np.reshape(np.sum(h, axis=1), [N, 1])


@dace.program
def gate32(x: dace.float32[N, M], w: dace.float32[M]):
    return np.tanh(x * w) + x


@dace.program
def recurrence(x: dace.float64[N], out: dace.float64[N]):
    out[0] = x[0]
    for i in range(1, N):
        out[i] = out[i - 1] * 0.5 + x[i] * x[i]


@dace.program
def mapped(x: dace.float64[N, M], w: dace.float64[M], out: dace.float64[N, M]):
    for i, j in dace.map[0:N, 0:M]:
        out[i, j] = np.tanh(x[i, j] * w[j]) + x[i, j]


@dace.program
def matmul(a: dace.float64[N, M], b: dace.float64[M, N]):
    return a @ b


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def theirs(x: Tensor, w: Tensor) -> Tensor:
    h = (x * w).tanh()
    return x + h * h.sum(1, keepdim=True)


@pytest.mark.parametrize(
    "program, operands, results",
    [
        (gate, [(3, 4), (4,)], ()),
        (recurrence, [(6,)], ("out",)),
        (mapped, [(3, 4), (4,)], ()),
        (matmul, [(3, 4), (4, 3)], ()),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_gradients_against_finite_differences(program: Any, operands: Any, results: Any) -> None:
    function = dt.dace_operator(program, results=results)
    given = [double(*shape) for shape in operands]
    assert torch.autograd.gradcheck(function, given)


def test_values_and_gradients_are_those_of_the_formula() -> None:
    from daceml_train.codegen.cpu import schedule  # noqa: F401  -- DaCe compiles beside our kernels' generators
    from daceml_train.codegen.cuda import schedule as _  # noqa: F401

    function = dt.dace_operator(gate)
    x, w = double(3, 4), double(4)
    torch.testing.assert_close(function(x, w), theirs(x, w))
    ours = torch.autograd.grad(function(x, w).square().sum(), (x, w))
    torch.testing.assert_close(ours, torch.autograd.grad(theirs(x, w).square().sum(), (x, w)))
    turned = double(4, 3)
    torch.testing.assert_close(function(turned.T, w), theirs(turned.T, w))


GATE = dt.dace_operator(gate32)


class Net(nn.Module):
    """A program of DaCe's as `h + op(h)`, between layers; `ours` says by whom it is computed."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 2)
        self.w = nn.Parameter(torch.linspace(-1, 1, 8))
        self.ours = ours

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        result = GATE(h, self.w) if self.ours else (h * self.w).tanh() + h
        return self.last(h + result)


@pytest.fixture
def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    ours, other = Net(True), Net(False)
    other.load_state_dict(ours.state_dict())
    return ours, other


def test_a_training_step(nets: tuple[nn.Module, nn.Module]) -> None:
    ours, other = nets
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in nets]
    step = dt.training_step(ours, F.mse_loss, optimizers[0])
    for _ in range(3):
        x, y = torch.randn(6, 5), torch.randn(6, 2)
        optimizers[1].zero_grad()
        loss = F.mse_loss(other(x), y)
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(x, y), loss.detach())
    for a, b in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert step.breaks == []


def test_an_optimized_module(nets: tuple[nn.Module, nn.Module]) -> None:
    ours, other = nets
    compiled = dt.optimize(copy.deepcopy(ours))
    for size in (6, 4):
        x = torch.randn(size, 5)
        for m in (compiled, other):
            m.zero_grad()
            m(x).square().sum().backward()
        torch.testing.assert_close(compiled(x), other(x))
        for a, b in zip(compiled.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), other(x))


# ---- derivatives of the user's --------------------------------------------------------------------------------------
@dace.program
def square_twice(x: dace.float64[N]):
    return np.sin(x), x * x


@dace.program
def its_derivative(x: dace.float64[N], g: dace.float64[N], h: dace.float64[N]):
    return np.cos(x) * g + 2.0 * x * h


@dace.program
def a_wrong_one(x: dace.float64[N], g: dace.float64[N], h: dace.float64[N]):
    return np.cos(x) * g + 3.0 * x * h


@dace.program
def too_few(x: dace.float64[N], g: dace.float64[N]):
    return x * g


def test_a_derivative_of_the_user_s() -> None:
    function = dt.dace_operator(square_twice, backward=its_derivative)
    assert torch.autograd.gradcheck(function, (double(5),))
    x = double(5)
    torch.testing.assert_close(torch.autograd.grad(function(x)[1].sum(), x)[0], 2 * x)


def test_a_wrong_derivative_is_found() -> None:
    function = dt.dace_operator(square_twice, backward=a_wrong_one)
    x = double(5)
    with pytest.raises(dt.Invalid, match="derivative of .*square_twice by x is .* central differences say"):
        function(x)[1].sum().backward()
    dt.dace_operator(square_twice, backward=a_wrong_one, check=False)(x)[1].sum().backward()
    torch.testing.assert_close(x.grad, 3 * x)
    with pytest.raises(dt.Invalid, match="backward of .*square_twice takes .*expected"):
        dt.dace_operator(square_twice, backward=too_few)


# ---- what cannot be -------------------------------------------------------------------------------------------------
@dace.program
def in_place(x: dace.float64[N]):
    x[:] = x * 2.0


def test_errors_name_what_cannot_be() -> None:
    with pytest.raises(dt.Invalid, match=r"takes a function under @dace.program or an SDFG, given function"):
        dt.dace_operator(lambda x: x)
    with pytest.raises(dt.Unsupported, match="in_place reads and writes its argument x"):
        dt.dace_operator(in_place)
    function = dt.dace_operator(gate)
    with pytest.raises(dt.Invalid, match="x of .*gate is float64, given float32"):
        function(torch.randn(3, 4), torch.randn(4))
    with pytest.raises(dt.Invalid, match=r"w of .*gate is \[M\], given \[5\] where N=3, M=4"):
        function(double(3, 4), double(5))
    with pytest.raises(dt.Invalid, match=r"w of .*gate has 1 dimensions, given \[2, 2\]"):
        function(double(3, 4), double(2, 2))
    twice = dt.dace_operator(square_twice)
    assert torch.equal(twice(double(5).detach())[1] > 0, torch.ones(5, dtype=torch.bool))
    with pytest.raises(dt.Unsupported, match="dace.autodiff does not differentiate .*square_twice: .*backward="):
        twice(double(5))
