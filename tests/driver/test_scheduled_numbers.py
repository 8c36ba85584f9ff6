"""Numbers that a schedule changes between steps, with eager execution's random numbers: one program reads them all."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of
from daceml_train.driver.step import TrainingStep

pytestmark = pytest.mark.compiled
STEPS = 7


class Scheduled(nn.Module):
    """A network whose inner function reads a number of the module's own."""

    def __init__(self, function: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function, self.number = nn.Linear(8, 8), nn.Linear(8, 4), function, 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x), self.number))


class Counted(nn.Module):
    """Dropout that falls with the calls, which the module counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.calls, self.unread = nn.Linear(8, 8), nn.Linear(8, 4), 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(F.dropout(self.first(x), 0.5 - 0.03 * self.calls))


class Channels(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Conv2d(1, 4, 3, padding=1), layer, nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x.view(-1, 1, 2, 4))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(4, 8, 2, dropout=0.5, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.view(-1, 2, 4))[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x[None], x[None], x[None], need_weights=False)[0][0])


class Reversed(torch.autograd.Function):
    """A reversed gradient, scaled by a number that is given and by one that is computed from it."""

    @staticmethod
    def forward(context: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        context.scale, context.other = scale, scale * 2 + 1
        context.save_for_backward(x)
        return x.view_as(x), x * scale

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = context.saved_tensors
        return -context.scale * gradients[0] + context.other * gradients[1] * x, None


def _reversed(h: Tensor, scale: float) -> Tensor:
    first, second = Reversed.apply(h, 2 / (1 + math.exp(-4 * scale)) - 1)
    return first + second


def _in_half(h: Tensor, p: float) -> Tensor:
    return F.dropout(h.bfloat16(), p).float()


def _attention(h: Tensor, p: float) -> Tensor:
    heads = h.view(1, 2, -1, 4)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p).reshape(-1, 8)


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)), "1.p"),
    "in_place": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5, True), nn.Linear(8, 4)), "1.p"),
    "channels": (lambda: Channels(nn.Dropout2d(0.5)), "layer.p"),
    "computed": (lambda: Scheduled(lambda h, v: F.dropout(h, math.cos(3 * v) / 4 + 0.5 / (v + 1))), "number"),
    "counted": (Counted, "unread"),
    "function": (lambda: Scheduled(_reversed), "number"),
    "half": (lambda: Scheduled(_in_half), "number"),
    "attention": (lambda: Scheduled(_attention), "number"),
    "heads": (Attending, "layer.dropout"),
    "recurrent": (Recurrent, "layer.dropout"),
    "statistics": (lambda: Channels(nn.BatchNorm2d(4)), "layer.momentum"),
}


def _set(model: nn.Module, path: str, value: float) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, value)


def _count(run: Any) -> int:
    if isinstance(run, TrainingStep):
        return len(run.records) + (state_of(run.pieces).backend.graphs if run.pieces is not None else 0)
    return state_of(run).backend.graphs


@pytest.mark.parametrize("way", ["step", "optimize"])
@pytest.mark.parametrize("case", CASES)
def test_every_value_is_as_in_eager_execution(case: str, way: str) -> None:
    torch.manual_seed(0)
    build, path = CASES[case]
    ours = build()
    theirs = copy.deepcopy(ours)
    optimizer, their_optimizer = (torch.optim.SGD(m.parameters(), 0.1) for m in (ours, theirs))
    step = way == "step"
    run: Any = (
        dt.training_step(ours, F.mse_loss, optimizer, random="eager") if step else dt.optimize(ours, random="eager")
    )
    for t in range(STEPS):
        number = 0.5 - 0.0625 * t
        _set(ours, path, number), _set(theirs, path, number)
        x, y = torch.randn(16, 8), torch.randn(16, 4)
        state = torch.get_rng_state()
        if step:
            loss = run(x, y)
        else:
            optimizer.zero_grad()
            (loss := F.mse_loss(run(x), y)).backward()
            optimizer.step()
        drawn = torch.get_rng_state()
        torch.set_rng_state(state)
        their_optimizer.zero_grad()
        (expected := F.mse_loss(theirs(x), y)).backward()
        their_optimizer.step()
        assert torch.equal(drawn, torch.get_rng_state())
        torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)  # float32, seven steps
    assert _count(run) <= 2  # a constant, and from the first change on an input


class Noting(nn.Module):
    """A network that notes numbers as people print them: rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.calls, self.rate, self.notes, self.norm = 0, 1.00245, list[Any](), dict[str, float]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.calls += 1
        self.rate -= 0.0125
        cosine = 1 - 0.1 * math.cos(math.pi * self.calls / 40)
        self.notes.append((round(cosine, 4), round(self.rate, 4), f"{round(self.rate, 2)} of {self.calls}"))
        self.norm = {"rate": round(self.rate * 10, 1), "cube": round(self.calls**3 / 7, -1)}
        if round(self.rate, 2) > 0.95:
            self.notes.append("warm")
        return self.last(h) * cosine


@pytest.mark.parametrize("way", ["step", "optimize"])
def test_rounded_numbers_are_pythons(way: str) -> None:
    torch.manual_seed(0)
    ours = Noting()
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    run: Any = dt.training_step(ours, F.mse_loss, optimizer) if way == "step" else dt.optimize(ours)
    for _ in range(8):
        x, y = torch.randn(16, 8), torch.randn(16, 4)
        if way == "step":
            run(x, y)
        else:
            run(x)
        theirs(x)
        assert (ours.notes, ours.norm) == (theirs.notes, theirs.norm)
    assert _count(run) <= 4  # constants, numbers, and the other side of the branch


class Statistics:
    """Running statistics in NumPy, as agents normalize what they observe."""

    def __init__(self) -> None:
        self.mean, self.variance, self.count, self.bound = np.zeros(8), np.ones(8), 0, 4.0

    def update(self, x: Any) -> None:
        rows, self.bound = x.shape[0], self.bound * 0.9
        shift = x.mean(0) - self.mean
        self.mean = self.mean + shift * rows / (self.count + rows)
        self.variance = (self.variance * self.count + x.var(0) * rows) / max(self.count + rows, 1)
        self.count += rows
        self.clipped = np.clip(self.mean, -self.bound, self.bound) + np.full(8, self.bound > 2)
        self.level, self.spread = self.mean.mean(), np.sqrt(self.variance).max().astype(np.float32)
        self.kept, self.first = np.squeeze(self.mean[:1]), f"{x[0, 0]:.3f} {self.level:.3f}"
        self.ranks = np.arange(8) // self.count + np.maximum(self.mean.astype(np.float32), self.count)


class Normalizing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.statistics, self.layer = Statistics(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.statistics.update(x.numpy())
        mean, deviation = (torch.as_tensor(a).float() for a in (self.statistics.mean, self.statistics.variance**0.5))
        return self.layer((x - mean) / (deviation + 1e-4))


@pytest.mark.parametrize("way", ["step", "optimize"])
def test_a_counter_beside_arrays_of_numpy_is_an_input(way: str) -> None:
    torch.manual_seed(0)
    ours = Normalizing()
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(ours.parameters(), 0.0)  # parameters stay, so that the other model needs no training
    run: Any = dt.training_step(ours, F.mse_loss, optimizer) if way == "step" else dt.optimize(ours)
    for t in range(6):
        x, y = torch.randn(16, 8), torch.zeros(16, 4)
        if way == "step":
            torch.testing.assert_close(run(x, y), F.mse_loss(theirs(x), y))
        else:
            torch.testing.assert_close(run(x), theirs(x))
        if t == 3:  # by the user, in place and another array
            for model in (ours, theirs):
                model.statistics.mean[0], model.statistics.variance = 0.5, np.full(8, 2.0)
        found, expected = (vars(m.statistics) for m in (ours, theirs))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert type(found[name]) is type(value), name
            assert np.asarray(found[name]).dtype == np.asarray(value).dtype, name
            if not isinstance(value, str):
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
    assert _count(run) <= 3  # constants, numbers, and the other answer to `bound > 2`
    assert not (run.breaks if way == "step" else state_of(run).backend.breaks)
