"""Models in other precisions, and autocast: as near to exact numbers as eager execution in the same precision.

The reference is the same model, from the same rounded parameters, in float64. In a 16-bit type each operator rounds
once, here as in eager execution, but fused operators keep float32 between them: errors are compared as a whole, by the
Euclidean norm. Ours may be twice eager's (two different sequences of roundings), plus one rounding of the result. For
float64 there is no better reference than eager itself: sums in another order may differ by some roundings.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.networks import Block, MixerBlock, ResNet, mlp

pytestmark = pytest.mark.compiled

FACTOR = 2.0
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(16, 8)),
    "attention": (lambda: Block(8, 2, before=True, fused=True, gelu="tanh"), lambda: torch.randn(4, 6, 8)),
    "resnet": (ResNet, lambda: torch.randn(4, 3, 16, 16)),
    "mixer": (lambda: MixerBlock(6, 8), lambda: torch.randn(4, 6, 8)),
}


def run(called: nn.Module, model: nn.Module, x: Tensor, context: Any = contextlib.nullcontext) -> dict[str, Tensor]:
    """Result, loss, and gradients of the parameters and of the input."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with context():
        result = called(x)
    loss = result.to(torch.float64).square().mean()
    loss.backward()
    assert x.grad is not None
    found = {"result": result.detach(), "input": x.grad}
    return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm())


def compare(
    ours: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], precision: torch.dtype
) -> None:
    """Each tensor has eager's type, and is about as near to the exact one."""
    assert ours.keys() == eager.keys() == exact.keys()
    largest = max(float(t.norm()) for t in exact.values())
    for name, value in exact.items():
        assert ours[name].dtype is eager[name].dtype, name
        roundings = 64 if precision is torch.float64 else 1
        rounding = roundings * torch.finfo(precision).eps * max(float(value.norm()), 1e-3 * largest)
        off, allowed = error(ours[name], value), FACTOR * error(eager[name], value) + rounding
        assert off <= allowed, f"{name}: {off:.1e} from exact, eager {error(eager[name], value):.1e}"


def compiled(model: nn.Module) -> nn.Module:
    return dt.optimize(model)


def assert_compiled(model: nn.Module) -> None:
    state = state_of(model)
    assert state is not None and state.backend.graphs > 0 and state.backend.breaks == []


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_in_other_precisions(name: str, precision: torch.dtype) -> None:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, x = make().to(precision), batch().to(precision)
    theirs, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    ours = compiled(model)
    found = run(ours, model, x)
    compare(found, run(theirs, theirs, x), run(wide, wide, x.double()), precision)
    assert_compiled(ours)


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str) -> None:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, x = make(), batch()
    theirs, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    ours = compiled(model)

    def lower() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    found = run(ours, model, x, lower)
    compare(found, run(theirs, theirs, x, lower), run(wide, wide, x.double()), torch.bfloat16)
    assert_compiled(ours)


def test_autocast_inside_a_model_and_mixed_parameters() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            kind = self.low.weight.dtype
            h = self.low(x.to(kind)).to(self.high.weight.dtype)
            if x.dtype is torch.float32:
                with torch.autocast("cpu", torch.bfloat16):
                    h = h + self.high(self.norm(h))
            else:
                h = h + self.high(self.norm(h))
            return F.gelu(h).float() if x.dtype is torch.float32 else F.gelu(h)

    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(16, 8)
    theirs, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    ours = compiled(model)
    found = run(ours, model, x)
    compare(found, run(theirs, theirs, x), run(wide, wide, x.double()), torch.bfloat16)
    assert_compiled(ours)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float64], ids=str)
def test_a_step_in_another_precision(precision: torch.dtype) -> None:
    """Three updates by SGD: parameters round after each, in the model's precision."""
    torch.manual_seed(0)
    model, x, y = mlp().to(precision), torch.randn(16, 8).to(precision), torch.randint(0, 4, (16,))
    theirs, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    step = dt.training_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    for other, given in ((theirs, x), (wide, x.double())):
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(other(given), y).backward()
            optimizer.step()
    for _ in range(3):
        step(x, y)
    assert step.breaks == []
    ours, eager, exact = ({n: p.detach() for n, p in m.named_parameters()} for m in (model, theirs, wide))
    compare(ours, eager, exact, precision)


class Rounding(nn.Module):
    """Conversions that are written to round: results are equal to eager's, to the last bit."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, w: Tensor) -> Any:
        a, b = x.to(self.kind), w.to(self.kind)
        narrow = (a * b).float() + 1
        return a.float() - x, narrow, x + (x - a.float()).to(self.kind).float(), (x > 0).to(self.kind).double(), a


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_conversions_round(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(7, 33), torch.randn(33)
    compiled = dt.optimize(Rounding(kind))
    for ours, eager in zip(compiled(x, w), Rounding(kind)(x, w), strict=True):
        assert torch.equal(ours, eager)
    state = state_of(compiled)
    assert state is not None and not state.backend.breaks


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Any:
        narrow = x.to(torch.int32)
        return narrow.cumsum(0, dtype=torch.int32), narrow.cumsum(0), x.cumsum(0), x.half().cumsum(0)


def test_running_sums_keep_the_type_that_is_asked_for() -> None:
    x = torch.tensor([1.0, 3.0, 2.0, 5.0])
    for ours, eager in zip(dt.optimize(Counts())(x), Counts()(x), strict=True):
        assert ours.dtype is eager.dtype and torch.equal(ours, eager)


class Shift(nn.Module):
    """Adds zeros that train."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def test_cross_entropy_of_large_logits() -> None:
    """The gradient of a bias is a sum that cancels; where logits are far from 0, rounding their logsumexp would show."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 10) + 300, torch.randint(10, (64,))
    gradients = []
    for called in (Shift(), Shift().double(), dt.optimize(Shift())):
        F.cross_entropy(called(x.to(called.bias.dtype)), y).backward()
        gradients.append(called.bias.grad)
    eager, exact, ours = gradients
    model = Shift()
    step = dt.training_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), keep_gradients=True)
    step(x, y)
    for found in (ours, model.bias.grad):
        assert error(found, exact) <= 3 * error(eager, exact) + 1e-7 * float(exact.norm())
