"""`register_hook` in a forward pass: hooks that compute stay in one graph, others are registered by PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of


class Hooked(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 2), function
        self.scale = 3.0
        self.log: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _of_globals(g: Tensor) -> Tensor:
    return g * 4


def plain(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    h.register_hook(lambda g: g * 2 + 1)
    return m.b(h) + h[:, :2]


def module_function(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(_of_globals)
    return m.b(h)


def that_reads(m: Any, x: Tensor) -> Tensor:
    h, mask, factor = m.a(x).tanh(), (x > 0).float(), 2.0
    h.register_hook(lambda g: g * mask * factor)
    return m.b(h)


def without_a_result(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: None)
    return m.b(h)


def two_in_order(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: g * 2)
    h.register_hook(lambda g: g + 1)
    return m.b(h)


def before_a_change_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: g * 2 + 1)
    h.mul_(3.0)
    return m.b(h)


def clipped(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: g.clamp(-0.1, 0.1) / (g.norm() + 1e-3))
    return m.b(h.relu())


def after_a_use(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    y = m.b(h)
    h.register_hook(lambda g: g * 2)
    return y + h[:, :2]


def of_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    v = h[0]
    v.register_hook(lambda g: g * 2)
    v.add_(1.0)
    return m.b(h) + v.sum()


def an_attribute_assigned_later(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: g * m.scale)
    m.scale = m.scale + 1.0
    return m.b(h)


def a_variable_assigned_later(m: Any, x: Tensor) -> Tensor:
    factor = 2.0
    h = m.a(x)
    h.register_hook(lambda g: g * factor)
    factor = 5.0
    return m.b(h)


def the_variable_of_a_loop(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    for factor in (2.0, 3.0):
        h.register_hook(lambda g: g * factor + 1)  # noqa: B023
    return m.b(h)


def a_tensor_changed_later(m: Any, x: Tensor) -> Tensor:
    h, factor = m.a(x), x * 1
    h.register_hook(lambda g: g * factor)
    factor.add_(1.0)
    return m.b(h)


def that_appends(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: m.log.append(1))
    return m.b(h)


ONE_GRAPH = [plain, module_function, that_reads, without_a_result, two_in_order, before_a_change_in_place, clipped]
AS_PYTORCH = [
    after_a_use,
    of_a_view,
    an_attribute_assigned_later,
    a_variable_assigned_later,
    the_variable_of_a_loop,
    a_tensor_changed_later,
    that_appends,
]


def trained(function: Callable[[Any, Tensor], Tensor], way: str) -> tuple[list[Any], Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches = Hooked(function), [torch.randn(3, 4) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda y: (y * torch.linspace(-1, 2, 6).view(3, 2)).sum()  # noqa: E731
    called = dt.optimize(model) if way == "optimize" else model
    step = dt.training_step(model, loss, optimizer)
    for batch in batches:
        if way == "step":
            step(batch)
            continue
        optimizer.zero_grad()
        loss(called(batch)).backward()
        optimizer.step()
    state = state_of(called)
    breaks = step.breaks if way == "step" else [] if state is None else state.backend.breaks
    graphs = 0 if state is None else state.backend.graphs
    return [*(p.detach() for p in model.parameters()), torch.tensor(len(model.log))], (breaks, graphs)


@pytest.mark.compiled
@pytest.mark.parametrize("way", ["optimize", "step"])
@pytest.mark.parametrize("function", [*ONE_GRAPH, *AS_PYTORCH], ids=lambda f: f.__name__)
def test_hooks_see_the_gradients_of_eager_execution(function: Callable[[Any, Tensor], Tensor], way: str) -> None:
    """Hooks that compute with their argument are in the graph; what a hook reads late is never read early."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, _ = trained(function, "eager")
        found, (breaks, graphs) = trained(function, way)
    torch.testing.assert_close(found, expected)
    if function in ONE_GRAPH:
        assert breaks == [] and graphs <= 1
    elif way == "step":
        assert breaks
