"""Python's numbers and lists in a model, where programs have others: exact integers, errors of divisions, windows of lists,
and effects that happen once although TorchDynamo stumbles.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt

pytestmark = pytest.mark.compiled


class Counting(nn.Module):
    """A layer, a list and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.calls = nn.Linear(4, 4).double(), list[Any](), 0


class Dividing(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x).mean() + 1 / (4 - self.calls)


class Overflowing(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 2**62
        return self.layer(x).mean() + self.calls % 3


class Hashing(Counting):
    """A linear congruential generator."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = (self.calls * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.layer(x).mean() + (self.calls >> 33) % 5


class Rounding(Counting):
    """Digits of an integer, a number of NumPy's type, a comparison, and a text that is a key."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 5
        names = {f"k{self.calls % 3}": 1, "k1": 2}
        y = self.layer(x).mean() * np.float32(self.calls * 0.1) + round(self.calls, -1) + len(names)
        return y + y.detach() * (self.calls % 3 == 0)


class Logarithm(Counting):
    """A logarithm that is undefined from the fourth call on, an exponential that overflows, and a root."""

    rate, scale = 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.rate -= 0.3
        self.scale *= 7
        small = 1 / math.exp(self.scale) if self.scale < 700 else 0.0
        try:
            return self.layer(x).mean() * (math.log(self.rate) + small)
        except ValueError:
            self.seen.append("undefined")
            return self.layer(x).mean() * math.sqrt(self.rate)


class Window(Counting):
    """A window of a list that is sorted, after a look at a value."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.layer(x + random.random())
        if h.mean().item() > 0:
            h = h * 2
        self.seen.append(self.calls * 3 % 5)
        self.seen.sort()
        self.seen[:] = self.seen[-3:]
        self.seen = self.seen[-2:]
        return h.mean() + sum(self.seen)


class Signs(Counting):
    """An integer that becomes negative: its absolute value, the larger of two, and truth values that are kept."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = 5 - len(self.seen) * 2
        k = self.calls
        y = F.dropout(self.layer(x).mean() * abs(k), 0.0, training=k > 2) + max(k, -k)
        self.seen.append((k > 0, k >= -3, abs(k - 1), min(k, -2), (k > -2) & (k < 2), -k // 2))
        return y + torch.full((2,), abs(k), dtype=x.dtype).sum(0, keepdim=k == 3).sum() * (k < 0)


class Remembering(Counting):
    """A list that the first call makes; later ones, which are equal otherwise, find it among the attributes."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.__dict__.setdefault("kept", [])
        kept.append(x.shape[0])
        self.seen = list(kept)
        return self.layer(x).mean() * len(kept)


def trained(model: Counting, way: str) -> list[Any]:
    """Losses or errors of eight steps, and what they leave."""
    random.seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = dt.training_step(model, lambda loss: loss, optimizer) if way == "step" else None
    called: Any = dt.optimize(model) if way == "optimize" else model
    found: list[Any] = []
    for _ in range(8):
        x = torch.ones(2, 4, dtype=torch.float64)
        try:
            if step is not None:
                loss = step(x)
            else:
                optimizer.zero_grad()
                loss = called(x)
                loss.backward()
                optimizer.step()
            found.append(loss.item())
        except (ZeroDivisionError, ValueError) as error:
            found.append(type(error).__name__)
    return [*found, model.calls, *model.seen, *model.layer.bias.tolist(), random.random()]


@pytest.mark.parametrize("way", ["optimize", "step"])
@pytest.mark.parametrize("kind", [Dividing, Overflowing, Hashing, Rounding, Logarithm, Window, Signs, Remembering])
def test_as_in_python(kind: Callable[[], Counting], way: str) -> None:
    torch.manual_seed(0)
    theirs = kind()
    ours = copy.deepcopy(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = trained(theirs, "eager"), trained(ours, way)
    for a, b in zip(found, expected, strict=True):
        assert a == (pytest.approx(b, rel=1e-12) if isinstance(b, float) else b)
        assert [*map(type, a if isinstance(a, tuple) else (a,))] == [*map(type, b if isinstance(b, tuple) else (b,))]


def test_a_stumble_after_a_graph_break_repeats_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done before the break is not done again, whatever fails in the trace of what follows."""
    from daceml_train.frontends.torch.dynamo import growing

    def fail(found: Any) -> None:
        raise KeyError("read")

    monkeypatch.setattr(growing, "_read", fail)
    torch.manual_seed(0)
    theirs = Window()
    ours = copy.deepcopy(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = trained(theirs, "eager"), trained(ours, "optimize")
    assert found == pytest.approx(expected, rel=1e-12)


CONSTANTS: dict[str, Callable[[], Tensor]] = {
    "single": lambda: torch.full((4,), 1.1).double(),
    "half": lambda: torch.full((4,), 70000.0).half().double(),
    "bfloat16": lambda: torch.ones(4, dtype=torch.bfloat16).mul(1.1).double(),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_narrow_types_are_rounded(name: str) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * CONSTANTS[name]()

    x = torch.linspace(-1, 2, 4, dtype=torch.float64)
    expected = x * CONSTANTS[name]()  # infinite times zero is NaN
    torch.testing.assert_close(dt.optimize(Scaled())(x), expected, rtol=1e-15, atol=0, equal_nan=True)
