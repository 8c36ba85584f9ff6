"""Windows of few elements: clamped and wrapped reads without scatters, extrema with ties and NaN, sums of functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import daceml_train as dt
from daceml_train.analysis.interpret import interpret
from daceml_train.autodiff.reverse import differentiate
from daceml_train.expressions import argmax, array, largest, log, logsumexp, product, size, tanh, total, where
from daceml_train.expressions.adjoint import derivative
from daceml_train.expressions.operator import Expression
from daceml_train.expressions.program import parsed
from daceml_train.frontends.torch import types
from daceml_train.graph.graph import Graph
from daceml_train.transformations.intra_operator.decompose import Decompose


@dt.expression
def smoothed(x: Any) -> Any:
    H, W = x.shape
    return array(
        total(tanh(x.clamp[h + r - 2, 2 * w + s - 1]) * (1 + r) for r in size(3) for s in size(3))
        for h in H
        for w in W // 2
    )


@dt.expression
def one(x: Any) -> Any:
    return array(x.clamp[i - 2, j - 1] * (1 + i) for i in size(5) for j in size(3))


@dt.expression
def pooled(x: Any) -> Any:
    H, W = x.shape
    return array(largest(x.clamp[h + r - 1, w + s - 1] for r in size(3) for s in size(3)) for h in H for w in W)


@dt.expression
def turning(x: Any) -> Any:
    (n,) = x.shape
    return array(product(x.wrap[i + 2 * k - 3] + 1 for k in size(4)) for i in n)


@dt.expression
def softened(x: Any) -> Any:
    B, T = x.shape
    return array(logsumexp(x[b, 3 * t + k] for k in size(5)) for b in B for t in (T - 5) // 3 + 1)


@dt.expression
def long_sum(x: Any) -> Any:
    B, T = x.shape
    return array(total(tanh(x.outside(0)[b, t + k - 1] * x[b, t]) for t in T for k in size(3)) for b in B)


@dt.expression
def place(x: Any) -> Any:
    return array(argmax(x[b, t + k] for k in size(4)) for b in x.shape[0] for t in x.shape[1] - 3)


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "smoothed": (smoothed, (5, 8)),
    "one": (one, (1, 2)),
    "pooled": (pooled, (5, 4)),
    "turning": (turning, (5,)),
    "softened": (softened, (3, 14)),
    "long_sum": (long_sum, (2, 7)),
}


def graph_of(function: Any, x: torch.Tensor) -> Graph:
    """The expression and, if it has one, its derivative, as operators."""
    graph = Graph()
    value = graph.input("x", types.tensor(x))
    (output,) = graph.emit(Expression(function.program(x).text), value)
    outputs: list[Any] = [output]
    if output.tensor.dtype.is_float:
        seed = graph.input("g", output.tensor)
        gradients = differentiate(graph, {output.name: seed}, [value.name])
        outputs.append(gradients[value.name])
    graph.output(*outputs)
    return graph


@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives(name: str) -> None:
    function, shape = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)
    y = function(x)
    seed = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, x, seed)
    found = interpret(graph_of(function, x), {"x": x.detach().numpy(), "g": seed.numpy()}).outputs
    for a, b in zip(found, (y, gradient), strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["smoothed", "one", "pooled"])
def test_the_gradient_of_a_clamped_read_is_no_scatter(name: str) -> None:
    function, shape = CASES[name]
    text, _ = derivative(function.program(torch.randn(shape)).text, (True,), (True,))  # type: ignore[attr-defined]
    assert not any(stage.scatters for stage in parsed(text).stages)


def test_a_clamped_read_far_outside_is_a_scatter() -> None:
    @dt.expression
    def far(x: Any) -> Any:
        return array(x.clamp[100 * i] for i in size(9))

    text, _ = derivative(far.program(torch.randn(3)).text, (True,), (True,))  # type: ignore[attr-defined]
    assert any(stage.scatters for stage in parsed(text).stages)


@pytest.mark.parametrize("name", ["pooled", "softened", "turning"])
def test_windows_are_no_loops(name: str) -> None:
    function, shape = CASES[name]
    nodes = Decompose().run(graph_of(function, torch.randn(shape))).nodes
    loops = ("reduce.max", "reduce.min", "reduce.prod", "index", "scatter")
    assert not any(node.op.label in loops for node in nodes)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, 0.5])
def test_extrema_that_are_special_or_tied(special: float) -> None:
    x = torch.zeros(2, 9, dtype=torch.float64)
    x[0, 2:4] = special
    x[1, 7] = special
    expected = x.unfold(1, 4, 1)
    (found,) = interpret(graph_of(place, x), {"x": x.numpy()}).outputs
    np.testing.assert_array_equal(found, expected.argmax(-1).numpy())
    np.testing.assert_array_equal(place(x).numpy(), found)
    values = interpret(graph_of(pooled, x), {"x": x.numpy(), "g": np.ones((2, 9))}).outputs
    np.testing.assert_array_equal(values[0], pooled(x).numpy())
    z = x.clone().requires_grad_()
    pooled(z).sum().backward()
    assert z.grad is not None
    np.testing.assert_array_equal(values[1], z.grad.numpy())
    values = interpret(graph_of(softened, x), {"x": x.numpy(), "g": np.ones((2, 2))}).outputs
    np.testing.assert_allclose(values[0], x.unfold(1, 5, 3).logsumexp(-1).numpy(), rtol=1e-12)


@pytest.mark.compiled
def test_compiled() -> None:
    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return pooled(x), smoothed(x), softened(x)

    torch.manual_seed(0)
    x = torch.randn(24, 40, requires_grad=True)
    module = dt.optimize(Both())
    wide = x.detach().double().requires_grad_()
    found, expected = module(x), Both()(wide)
    seeds = [torch.randn_like(y) for y in expected]
    (a,) = torch.autograd.grad(found, x, [s.float() for s in seeds])
    (b,) = torch.autograd.grad(expected, wide, seeds)
    for got, want in zip((*found, a), (*expected, b), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_branches_by_position_have_derivatives_of_their_own() -> None:
    """An infinite derivative of the branch that a position does not take is not a factor of zero."""

    @dt.expression
    def guarded(x: Any) -> Any:
        (n,) = x.shape
        return array(where(i >= 1, log(x[i]) * x[i], 2 * x[i]) for i in n)

    x = torch.tensor([0.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(guarded(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first.detach(), torch.tensor([2, 1 + math.log(2), 1 + math.log(3)], dtype=torch.float64))
    torch.testing.assert_close(second, torch.tensor([0, 1 / 2, 1 / 3], dtype=torch.float64))
