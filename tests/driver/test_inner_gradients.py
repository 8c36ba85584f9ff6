"""`torch.autograd.grad` in a model's code is a part of its graph: first and second derivatives, and through updates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.conformity import assert_compiled, distance

pytestmark = pytest.mark.compiled
grad = torch.autograd.grad

Body = Callable[[nn.Linear, nn.Linear, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.body = nn.Linear(4, 8), nn.Linear(8, 1), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.a, self.b, x)


def penalty(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
    y = b(torch.tanh(a(x)))
    (slope,) = grad(y.sum(), x, create_graph=True)
    return y.mean() + (slope.norm(dim=-1) - 1).square().mean()


def without_graph(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
    y = b(torch.tanh(a(x)))
    return y.mean() * grad(y.sum(), x, retain_graph=True)[0].norm()


def second(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
    h = a(x)
    u = b(torch.tanh(h) + h.detach().sin())
    (slope,) = grad(u, x, torch.ones_like(u), create_graph=True)
    (curve,) = grad(slope[:, 0].sum(), x, create_graph=True)
    return (curve[:, 0] + slope[:, 1] * u[:, 0]).square().mean()


def adapted(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
    weight, rest = a.weight, [b.bias, a.bias]
    for _ in range(2):
        loss = F.softplus(x @ weight.t()).mean()
        step, none = grad(loss, [weight, rest[0]], create_graph=True, allow_unused=True)
        assert none is None
        weight = weight - 0.5 * step
    return b(F.relu(x @ weight.t() + a.bias)).square().mean()


def partly_off(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
    h = a(x)
    with torch.no_grad():
        scale = h.abs().mean() + x.square()
    return grad((b(h) * scale.sum()).sum(), x, create_graph=True)[0].square().mean()


def measured(body: Body, called: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    model = Net(body)
    module = called(model)
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    loss = module(x)
    loss.backward()
    results = {name: p.grad for name, p in [*model.named_parameters(), ("x", x)] if p.grad is not None}
    return module, {"loss": loss.detach(), **results}


@pytest.mark.parametrize("body", [penalty, without_graph, second, adapted, partly_off])
def test_values_and_gradients(body: Body) -> None:
    _, expected = measured(body, lambda model: model)
    compiled, found = measured(body, dt.optimize)
    assert_compiled(compiled, 1)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert distance(found[name], tensor) < 1e-5, name


@pytest.mark.parametrize("body", [second])
def test_a_training_step_is_one_program(body: Body) -> None:
    runs = []
    for compiled in (False, True):
        model = Net(lambda a, b, x, body=body: body(a, b, x + 0 * a.weight.sum()))  # type: ignore[misc]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 12).view(3, 4)
        losses = []
        step = dt.training_step(model, lambda y: y, optimizer) if compiled else None
        for _ in range(3):
            if step is None:
                optimizer.zero_grad()
                loss = model(x)
                loss.backward()
                optimizer.step()
            else:
                loss = step(x)
            losses.append(float(loss))
        assert step is None or step.breaks == []
        runs.append((losses, [p.detach().clone() for p in model.parameters()]))
    (expected, theirs), (found, ours) = runs
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(distance(a, b) < 1e-5 for a, b in zip(ours, theirs, strict=True))


def in_place(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
    h = a(x).tanh() * 1
    h[:, 0] = 2
    y = b(h)
    return grad(y.sum(), x, create_graph=True)[0].square().mean()


def unsteady(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
    y = b(F.rrelu(a(x), training=True))
    return grad(y.sum(), x, create_graph=True)[0].square().mean()


@pytest.mark.parametrize(
    ("body", "reason"), [(in_place, "changes tensors in place"), (unsteady, "draws random numbers")]
)
def test_what_torch_func_sees_otherwise_runs_as_pytorch(body: Body, reason: str) -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=reason):
        compiled, found = measured(body, dt.optimize)
    torch.manual_seed(0)
    _, expected = measured(body, lambda model: model)
    state = state_of(compiled)
    assert state is not None and reason in state.backend.breaks[0]
    if body is not unsteady:  # which draws where it is captured, too
        assert all(distance(found[name], tensor) < 1e-5 for name, tensor in expected.items())


class Backward(nn.Module):
    """A forward pass that adds to the gradients of the step that it is a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3, dtype=torch.float64)
        self.rounds = 0

    def forward(self, x: Tensor) -> Tensor:
        self.a(x).sum().backward()
        return self.a(x) + self.a.bias


class BackwardLater(Backward):
    """The same, after a decision on a value."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.sum() > -100:
            self.rounds += 1
            y.square().mean().backward(retain_graph=True)
        return y


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", [Backward, BackwardLater])
@pytest.mark.filterwarnings("ignore:daceml_train runs a")
def test_a_forward_pass_may_call_backward(kind: type[Backward], kept: bool) -> None:
    torch.manual_seed(0)
    model = kind()
    twin, optimized = copy.deepcopy(model), dt.optimize(copy.deepcopy(model))
    step = dt.training_step(
        model, lambda y: y.square().mean(), torch.optim.SGD(model.parameters(), 0.1), keep_gradients=kept
    )
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (twin, optimized)]
    for _ in range(4):
        x = torch.randn(5, 4, dtype=torch.float64)
        loss = step(x)
        if not kept:
            model.a.bias.grad = torch.ones(3, dtype=torch.float64)  # dropped
        for each, optimizer in zip((twin, optimized), optimizers, strict=True):
            optimizer.zero_grad()
            expected = each(x).square().mean()
            expected.backward()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-11, atol=1e-12)
            optimizer.step()
        for p, q, r in zip(model.parameters(), twin.parameters(), optimized.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(r, q, rtol=1e-11, atol=1e-12)
            assert not kept or torch.allclose(p.grad, q.grad)
    assert model.rounds == twin.rounds == optimized.rounds


class Residual(nn.Module):
    """Pieces whose inputs are computed from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh()
        torch._dynamo.graph_break()
        return y * self.b(x).sin() + self.b(y) * x


@pytest.mark.filterwarnings("ignore:daceml_train")
def test_second_derivatives_through_pieces() -> None:
    torch.manual_seed(0)
    model = Residual()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for each in (model, dt.optimize(copy.deepcopy(model))):
        (slope,) = grad(each(x).square().sum(), x, create_graph=True)
        (slope.norm() + slope[0, 0]).backward()
        found.append([slope, *(p.grad for p in each.parameters())])
        x.grad = None
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)


def test_second_derivatives_through_hooks() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h.register_hook(lambda g: g.clamp(-0.05, 0.05))
            return h * h

    x = torch.ones(3, 4, requires_grad=True)
    model = Hooked()
    module = dt.optimize(copy.deepcopy(model))
    with pytest.raises(RuntimeError, match="a gradient of a gradient, .* through a hook"):
        grad(module(x * 1).sum(), x, create_graph=True)
    found = []
    for called in (model, module):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch runs a call of a leaf
            (slope,) = grad(called(x).sum(), x, create_graph=True)
        found.append((slope.detach(), grad(slope.square().sum(), x)))
    torch.testing.assert_close(found[1], found[0])
