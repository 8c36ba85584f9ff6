"""`.item()` in a forward pass under a user's own loop: what only Python keeps is a result of the program, and what
decides, sizes or indexes breaks it; losses, gradients and effects are those of eager execution.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of

pytestmark = pytest.mark.compiled


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.r = nn.Linear(6, 6), nn.Linear(6, 6)
        self.seen: dict[str, Any] = {}


class Kept(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.seen["mean"], self.seen["both"] = h.mean().item(), [float(h.std()), 2 * h.detach().sum().item() + 1]
        return self.r(h)


class Branching(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.seen["mean"] = x.mean().item()
        return self.r(h) if self.seen["mean"] > 0 else self.r(2 * h)


class Scaling(Model):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max().item()
        return self.r(self.l(x / scale).tanh() * (1 + 1 / scale)).clamp(max=scale)


class Counting(Model):
    """Numbers that become a count, an index, and an integer."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        for _ in range(1 + int(x.abs().mean().item() > 0.7)):
            h = self.r(h).tanh()
        self.seen["index"] = h.argmax().item()
        return h * h.flatten()[self.seen["index"]] + int(x.abs().max().item())


class Listing(Model):
    """Integers of a whole list, which Python keeps and computes with."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        self.seen["positive"] = (x[:, 0] > 0).long().tolist()
        return self.r(h * (1 + sum(self.seen["positive"])))


class Inner(Model):
    """A number that decides within a function that is inlined."""

    def scaled(self, h: Tensor) -> Tensor:
        return h / 2 if h.abs().max().item() > 0.9 else h

    def forward(self, x: Tensor) -> Tensor:
        h = self.scaled(self.l(x).tanh())
        self.seen["mean"] = h.mean().item()
        return self.r(h)


@pytest.mark.parametrize("kind", [Kept, Branching, Scaling, Counting, Listing, Inner], ids=lambda kind: kind.__name__)
def test_numbers(kind: type[Model], tmp_path: Path) -> None:
    torch._dynamo.reset()
    ours = kind().double()  # so that no rounding adds up over the steps
    theirs = copy.deepcopy(ours)
    called = dt.optimize(ours, cache=tmp_path)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (ours, theirs)]
    for number in range(8):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).double() + (0.3 if number % 3 else -0.3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = [model(x).square().sum() for model in (called, theirs)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1])
        assert list(ours.seen) == list(theirs.seen)
        for name, value in theirs.seen.items():
            assert type(ours.seen[name]) is type(value)
            assert ours.seen[name] == pytest.approx(value, rel=1e-9, abs=1e-9)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    state = state_of(called)
    assert state is not None
    if kind is Kept:
        assert state.backend.graphs <= 2  # before the dict has its keys, and from then on
    if kind is not Counting:  # an index is compiled into the program that reads it
        assert not state.backend.breaks
