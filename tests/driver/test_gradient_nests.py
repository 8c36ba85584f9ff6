"""Random nests of `torch.func`, `autograd.grad`, gradient modes and `autograd.Function`s against eager execution."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from tests.driver.conformity import losses_beside

Function = Callable[[Tensor], Tensor]


class Square(torch.autograd.Function):
    """A square with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x * 2.2


class Cube(torch.autograd.Function):
    """A function whose backward calls another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return Square.apply(x) * 3 * g


class Nest(nn.Module):
    """A function of a vector, made at random, over two layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.text: list[str] = []
        self.function = self.made(random.Random(seed), 3, False)

    def made(self, r: random.Random, depth: int, inside: bool) -> Function:
        """A function of a tensor to one of the same shape; `inside` a transformation."""
        if depth == 0:
            layer = r.choice([self.a, self.b])
            self.text.append("layer")
            return lambda x: layer(x).tanh()
        kind = r.choice(KINDS[: -COUNT_ALONE if inside else None])
        self.text.append(kind)
        within = inside or kind in ("grad", "vjp", "jacobian", "vmap")
        f = self.made(r, depth - 1, within)
        g = self.made(r, depth - 1, within) if kind in ("product", "absent", "mixed") else f
        return lambda x: COMBINED[kind](f, g, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) + x @ self.a.weight


def _without(f: Function, x: Tensor) -> Tensor:
    with torch.no_grad():
        return f(x)


def _inner(f: Function, x: Tensor, create: bool) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(f(x).square().sum() + x.sin().sum(), x, create_graph=create)
    return g if create else g.detach()


def _mixed(f: Function, g: Function, x: Tensor) -> Tensor:
    with torch.no_grad():
        k = f(x).square()
    return g(x) * k


COMBINED: dict[str, Callable[[Function, Function, Tensor], Tensor]] = {
    "product": lambda f, g, x: f(x) * g(x),
    "absent": lambda f, g, x: f(x) + g(x).detach(),
    "without": lambda f, _, x: x * _without(f, x),
    "mixed": _mixed,
    "grad": lambda f, _, x: torch.func.grad(lambda z: f(z).square().sum())(x),
    "vjp": lambda f, _, x: torch.func.vjp(f, x)[1](torch.cos(x))[0],
    "jacobian": lambda f, _, x: torch.func.jacrev(f)(x[:1]).sum((0, 1, 2)) * x,
    "vmap": lambda f, _, x: torch.func.vmap(lambda z: f(z[None])[0])(x),
    "inner": lambda f, _, x: _inner(f, x, True),
    "constant": lambda f, _, x: x * _inner(f, x, False),
    "dropout": lambda f, _, x: F.dropout(f(x), 0.4) + x,
    "noise": lambda f, _, x: f(x + torch.rand_like(x)),
    "in place": lambda f, _, x: F.leaky_relu(f(x) - 0.1, 0.2, inplace=True),
    "square": lambda f, _, x: Square.apply(f(x)),
    "cube": lambda f, _, x: Cube.apply(f(x)) * 0.1,
}
KINDS = list(COMBINED)
COUNT_ALONE = 7
"""How many kinds, the last ones, are not a part of what `torch.func` transforms."""
SEEDS = (*range(8), 21, 23, 40, 43, 54, 61, 77, 98, 119)


@pytest.mark.compiled
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore:daceml_train")
def test_nests(seed: int) -> None:
    eager, stepped = Nest(seed), Nest(seed)
    draws = {"dropout", "noise"} & {*eager.text}
    randomness = "eager" if draws else random.Random(seed).choice(["seeded", "eager"])
    optimized = dt.optimize(Nest(seed), random=randomness)
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (eager, optimized, stepped)]
    step = dt.training_step(stepped, lambda y: y.square().mean(), optimizers[2], random=randomness)
    for call in range(3):
        x = torch.randn(3, 4, dtype=torch.float64)
        expected, *losses = losses_beside((eager, optimized), optimizers[:2], step, x, call)
        for loss in losses:
            torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12, msg=str(eager.text))
        for p, *others in zip(eager.parameters(), optimized.parameters(), stepped.parameters(), strict=True):
            for q in others:
                torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-12, msg=f"{call} {eager.text}")


class Without(nn.Module):
    """A transformation without gradients, and one of a function without."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.transform = nn.Linear(4, 4).double(), TRANSFORMS[kind]

    def layer(self, x: Tensor) -> Tensor:
        return self.a(x).tanh()

    def half(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            k = self.layer(x)
        return self.layer(x) * k

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            k = self.transform(self.layer, x)
        return self.a(x) * k + self.transform(self.half, x) + self.transform(self.layer, x) * 0.1


def _with_jvp(f: Function, x: Tensor) -> Tensor:
    y, tangent = torch.func.jvp(f, (x,), (torch.cos(x),))
    return y * tangent


TRANSFORMS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    **{kind: lambda f, x, kind=kind: COMBINED[kind](f, f, x) for kind in ("grad", "vjp", "jacobian", "vmap")},  # type: ignore[misc]
    "jvp": _with_jvp,
    "hessian": lambda f, x: torch.func.hessian(lambda z: f(z).sum())(x).sum((2, 3)),
    "jvp of grad": lambda f, x: _with_jvp(torch.func.grad(lambda z: f(z).sum()), x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda z: f(z[None]).sum()))(x),
}


@pytest.mark.compiled
@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:daceml_train")
def test_modes_around_and_within(kind: str) -> None:
    eager, model = Without(kind), Without(kind)
    optimized = dt.optimize(model)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    for each in (eager, optimized):
        each(x).square().mean().backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)
