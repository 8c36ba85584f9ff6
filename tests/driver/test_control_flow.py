"""`torch.cond`, `scan`, `map` and `while_loop` inside compiled models: one graph, eager's values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as step_by_step
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of

pytestmark = pytest.mark.compiled


class Two(nn.Module):
    """Two layers and a function of them and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def shared_parameters(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: m.a(x).relu(), lambda x: m.a(m.b(x)).sin() + m.table, (x,)) * 2


def a_side_without_parameters(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.cond(x.sum() > 0, lambda x: m.a(x), lambda x: x.sin(), (x,)))


def nested_branches(m: Any, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.max() > 2, lambda x: m.a(x) * 3, lambda x: m.b(x).exp(), (x,))

    return torch.cond(x.sum() > 0, inner, lambda x: m.b(x).cos(), (x,))


def two_results(m: Any, x: Tensor) -> Tensor:
    y, z = torch.cond(x.sum() > 0, lambda x: (m.a(x), x.sum(1)), lambda x: (m.b(x).tanh(), x.mean(1)), (x,))
    return y + z[:, None]


def without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.cond(x.sum() > 0, lambda x: m.a(x), lambda x: m.b(x), (x,))
    return m.a(x) * y


def detached_inside(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: m.a(x).detach() * m.b(x), lambda x: m.a(x) * m.b(x).detach(), (x,))


def recurrence(m: Any, x: Tensor) -> Tensor:
    def step(c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        n = torch.tanh(m.a(c) + m.b(a))
        return n, n * a

    last, every = scan(step, x.new_zeros(1, 4) + x.mean(), x.view(-1, 1, 4))
    return last.sum() + every.square().sum(0)


def backward_recurrence(m: Any, x: Tensor) -> Tensor:
    def step(c: dict[str, Tensor], a: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        h = torch.sigmoid(m.a(c["h"]) + a)
        return {"h": h, "s": c["s"] * m.table + h}, c["s"] * 1.0

    last, every = scan(step, {"h": x[0] * 1.0, "s": x[1] * 1.0}, x, reverse=True)
    return last["s"] + every.sum(0)


def branch_in_a_loop(m: Any, x: Tensor) -> Tensor:
    def step(c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        n = torch.cond(a.sum() > 0, lambda c, a: m.a(c) + a, lambda c, a: m.b(a) * c, (c, a))
        return n, n.sin()

    return scan(step, x[0] * 1.0, x)[1]


def each_row(m: Any, x: Tensor) -> Tensor:
    return step_by_step(lambda row: m.a(row).tanh() * m.table, x)


def a_loop_on_data(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        steps, y = while_loop(
            lambda i, y: (i < 9) & (y.abs().sum() < 100), lambda i, y: (i + 1, m.b(y) * 2), (torch.tensor(0), x * 1.0)
        )
    return m.a(x) * y + steps


CASES = [
    shared_parameters,
    a_side_without_parameters,
    nested_branches,
    two_results,
    without_gradients,
    detached_inside,
    recurrence,
    backward_recurrence,
    branch_in_a_loop,
    each_row,
    a_loop_on_data,
]


def both_signs() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(5, 4) + 1, torch.randn(5, 4) - 1]


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_values_and_gradients_in_one_graph(function: Callable[[Any, Tensor], Tensor]) -> None:
    own = Two(function)
    other = copy.deepcopy(own)
    optimized = dt.optimize(other)
    for x in both_signs():
        results = []
        for module, owner in ((own, own), (optimized, other)):
            given = x.clone().requires_grad_()
            result = module(given)
            (result * torch.arange(1.0, 1 + result.numel()).view(result.shape)).sum().backward()
            results.append([result, given.grad, *(p.grad for p in owner.parameters())])
            owner.zero_grad()
        for expected, got in zip(*results, strict=True):
            if expected is None:
                assert got is None or not got.any()
            else:
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    state = state_of(optimized)
    assert state is not None and not state.backend.breaks and state.backend.graphs == 1


@pytest.mark.parametrize(
    "function", [shared_parameters, a_side_without_parameters, branch_in_a_loop], ids=lambda f: f.__name__
)
def test_training_steps(function: Callable[[Any, Tensor], Tensor]) -> None:
    own = Two(function)
    other = copy.deepcopy(own)
    eager, ours = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (own, other))
    step = dt.training_step(other, F.mse_loss, ours)
    for x in both_signs() * 2:
        target = x.cos()
        eager.zero_grad()
        loss = F.mse_loss(own(x), target)
        loss.backward()
        eager.step()
        torch.testing.assert_close(step(x, target), loss.detach(), rtol=1e-4, atol=1e-5)
    for p, q in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-4)
    assert not step.breaks


def test_dropout_in_a_branch() -> None:
    model = Two(lambda m, x: torch.cond(x.sum() > 0, lambda x: F.dropout(m.a(x), 0.5), lambda x: x * 1.0, (x,)))
    optimized = dt.optimize(model)
    x = torch.ones(50, 4)
    y = optimized(x)
    kept = y != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(y[kept], (2 * model.a(x))[kept])
    y.sum().backward()
    assert model.a.bias.grad is not None
    torch.testing.assert_close(model.a.bias.grad, 2 * kept.sum(0).float())  # the mask that the forward pass drew


def test_a_gradient_through_a_loop_on_data_is_refused_not_wrong() -> None:
    model = Two(
        lambda m, x: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, m.a(y)), (torch.tensor(0), x * 1.0))[1]
    )
    optimized = dt.optimize(copy.deepcopy(model))
    x = torch.randn(5, 4)
    with pytest.warns(UserWarning, match="whose number of steps depends on data"):
        result = optimized(x)
    torch.testing.assert_close(result, model.a(model.a(model.a(x))), rtol=1e-4, atol=1e-5)
