"""A number that Python took from a tensor and computes with is a constant for gradients, as in eager execution."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import daceml_train as dt
from tests.driver.imperative import Imperative, Pair, assert_alike, batches, loss_of


class Balanced(Imperative):
    """Divides by a running average of its own size."""

    size = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.size = 0.9 * self.size + 0.1 * h.abs().mean().item()
        return self.r(h / self.size)


class Normed(Imperative):
    """Divides by its norm, which Python computes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        return self.r(h * h.mean().item() / math.sqrt(float(h.square().sum())))


@pytest.mark.parametrize("model", [Balanced, Normed])
def test_steps(model: Callable[[], Imperative]) -> None:
    pair = Pair(model())
    pair.train(batches(4))
    assert not pair.step.breaks


@pytest.mark.parametrize("model", [Balanced, Normed])
def test_modules(model: Callable[[], Imperative]) -> None:
    theirs = model().double()
    ours = copy.deepcopy(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = dt.optimize(ours)
        for x in batches(3):
            for called in (compiled, theirs):
                called.zero_grad()
                loss_of(called(x), torch.ones_like(x)).backward()
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert_alike(a.grad, b.grad)
