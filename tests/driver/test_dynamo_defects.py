"""What TorchDynamo does otherwise than Python, with any backend: attributes that a module does not register, generators
to which values are sent, cached functions, inference mode before a graph break, and what autograd knows of results
after one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt

pytestmark = pytest.mark.compiled


class Renewed(nn.Module):
    """A copy of a layer that is renewed in every third call; the copy breaks TorchDynamo's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4).double(), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.calls % 3 == 0:
            object.__setattr__(self, "copy", copy.deepcopy(self.layer).requires_grad_(False))
        self.calls += 1
        hidden = self.layer(x)
        return (hidden - self.copy(x)).square().mean() + hidden.mean()  # type: ignore[operator]


class Borrowed(nn.Module):
    """A layer of another module, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4).double() for _ in range(2)]
        self.first = self.layers[0]

    def forward(self, x: Tensor) -> Tensor:
        object.__setattr__(self, "last", self.layers[1])
        object.__setattr__(self, "scale", self.layers[1].bias)
        return (self.last(self.first(x)) * self.scale).mean()  # type: ignore[operator]


@pytest.mark.parametrize("way", ["optimize", "step"])
@pytest.mark.parametrize("kind", [Renewed, Borrowed])
def test_they_stay_hidden(kind: Callable[[], nn.Module], way: str) -> None:
    torch.manual_seed(0)
    theirs = kind()
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, ours)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimized = dt.optimize(ours)
        step = dt.training_step(ours, lambda loss: loss, optimizers[1])
        for number in range(9):
            x = torch.full((2, 4), float(number), dtype=torch.float64)
            optimizers[0].zero_grad()
            expected = theirs(x)
            expected.backward()
            optimizers[0].step()
            if way == "step":
                found = step(x)
            else:
                optimizers[1].zero_grad()
                found = optimized(x)
                found.backward()
                optimizers[1].step()
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
            assert ours.state_dict().keys() == theirs.state_dict().keys()
            assert vars(ours).keys() == vars(theirs).keys()


class Sending(nn.Module):
    """A generator that reads what is sent to it, across looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def stages(self, x: Tensor) -> Generator[Tensor, float, None]:
        for _ in range(3):
            x = self.layer(x).tanh()
            x = x * (yield x)

    def forward(self, x: Tensor) -> Tensor:
        stages = self.stages(x)
        y = next(stages)
        with contextlib.suppress(StopIteration):
            while True:
                y = stages.send(0.5 if y.norm().item() > 1 else 2.0)
        return y.sum()


class Judging(nn.Module):
    """Looks at what it has computed in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.notes = nn.Linear(4, 4).double(), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            confidence = self.layer(x).softmax(-1).amax(-1)
        self.notes.append(confidence.mean().item())
        return (self.layer(x) * confidence.clone()[:, None]).sum()


@functools.cache
def _projection(size: int) -> Tensor:
    return torch.randn(size, size).double()


@functools.cache
def _table(size: int) -> Tensor:
    return torch.arange(size).double().cos()


class Cached(nn.Module):
    """A projection that is drawn once, and a table that may be computed at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return ((self.layer(x) * _table(4)) @ _projection(4)).sum()


@pytest.mark.parametrize("kind", [Sending, Judging, Cached])
def test_modules(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    theirs = kind()
    ours = copy.deepcopy(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimized = dt.optimize(ours)
        for number in range(4):
            x = torch.full((2, 4), float(number), dtype=torch.float64)
            expected, found = theirs(x), optimized(x)
            expected.backward()
            found.backward()
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert torch.is_grad_enabled()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
    assert not any("internal error" in text for text in optimized._daceml_train.backend.breaks)


def _hook(model: Broken, h: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    h.register_hook(lambda g: g * 0.5)
    return loss


def _gradient(model: Broken, h: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    model.notes.append(torch.autograd.grad(loss, h, retain_graph=True)[0].sum().item())
    return loss


def _penalty(model: Broken, h: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, y, create_graph=True)
    return loss + gradient.square().sum()


def _retained(model: Broken, h: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    h.retain_grad()
    model.kept = h
    return loss


def _overwritten(model: Broken, h: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    y.mul_(2)
    return y.mean() + h.sum()


AFTER = (_hook, _gradient, _penalty, _retained, _overwritten)


class Broken(nn.Module):
    """Looks at a value, and uses results of before."""

    kept: Tensor | None = None

    def __init__(self, after: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.after, self.notes = (
            nn.Linear(4, 4).double(),
            nn.Linear(4, 3).double(),
            after,
            list[float](),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        y = self.b(F.dropout(h, 0.0))
        loss = y.square().mean()
        if loss.item() > 100:
            self.notes.append(0.0)
        return self.after(self, h, y, loss)


@pytest.mark.parametrize("after", AFTER)
def test_results_after_a_graph_break(after: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    theirs = Broken(after)
    ours = copy.deepcopy(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimized = dt.optimize(ours)
        for number in range(3):
            x = torch.full((2, 4), float(number), dtype=torch.float64)
            expected, found = theirs(x), optimized(x)
            expected.backward()
            found.backward()
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            if theirs.kept is not None and ours.kept is not None:
                torch.testing.assert_close(ours.kept.grad, theirs.kept.grad, rtol=1e-12, atol=1e-12)
    assert ours.notes == pytest.approx(theirs.notes, rel=1e-12)
    assert optimized._daceml_train.backend.graphs
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
