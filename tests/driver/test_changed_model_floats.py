"""Floats that a model holds, and dropout inside PyTorch's own functions, as a search changes them between steps."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.step import TrainingStep
from daceml_train.frontends.torch.dynamo import floats
from tests.driver.test_changed_scalars import Dropping, labelled

pytestmark = pytest.mark.compiled


class Scaled(nn.Module):
    """A model with numbers of its own, in two of its modules; one chooses what is computed, one is never changed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale, self.shift, self.mix, self.threshold = 1.5, 0.25, 0.5, 0.75
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.inner(x) * self.scale + self.shift)
        h = h * 2.0 if self.threshold > 0.9 else h
        return self.outer(self.mix * h + (1 - self.mix) * self.gate(h))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope, self.power = 0.1, 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, x * self.slope)


def against_eager(
    model: nn.Module, changes: list[Callable[[Any], Any]], tmp_path: Path, batches: Callable[[int], Any]
) -> TrainingStep:
    """A step of a model that is changed before each call, beside eager PyTorch in float64."""
    theirs = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
    step = dt.training_step(model, F.cross_entropy, optimizers[0], cache=tmp_path)
    for t, change in enumerate(changes):
        change(model), change(theirs)
        x, target = batches(t)
        found = step(x, target)
        optimizers[1].zero_grad()
        expected = F.cross_entropy(theirs(x), target)
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.state_dict(), theirs.state_dict(), rtol=1e-10, atol=1e-12)
    assert step.breaks == []
    return step


def test_all_floats_of_a_model_become_inputs_at_the_first_change(tmp_path: Path) -> None:
    """One program with constants, one with inputs, one for the other side of a branch; none for a further value."""

    def setting(**values: float) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            for name, value in values.items():
                owner = model.gate if name == "slope" else model
                setattr(owner, name, value)

        return change

    changes = [setting(), setting(mix=0.25), setting(scale=0.5), setting(slope=0.3), setting(shift=-0.1, mix=0.75)]
    batches = functools.partial(labelled, dtype=torch.float64)
    step = against_eager(Scaled().double(), changes, tmp_path / "some", batches)
    assert len(step.records) == 2
    changes += [setting(threshold=0.95), setting(scale=2.0), setting(threshold=0.8), setting(threshold=0.99)]
    step = against_eager(Scaled().double(), changes, tmp_path / "all", batches)
    assert len(step.records) == 3
    step = against_eager(Scaled().double(), changes, tmp_path / "all", batches)
    assert len(step.records) == 2  # those with inputs were captured before


class Sized(Scaled):
    """One number is a size: it cannot be an input."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x[:, : int(self.share * 8)].mean()


def test_a_float_that_is_a_size_leaves_the_others_their_chance(tmp_path: Path) -> None:
    changes: list[Callable[[Any], Any]] = [lambda m: None]
    changes += [lambda m, v=v: setattr(m, "scale", v) for v in (0.5, 0.7, 0.9, 1.1)]
    step = against_eager(Sized().double(), changes, tmp_path, functools.partial(labelled, dtype=torch.float64))
    assert len(step.records) == 2


class Attending(nn.Module):
    """Attention with dropout, as a function, as PyTorch's module with and without its weights."""

    def __init__(self, kind: str, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.p = kind, p
        self.inner = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True)
        self.outer = nn.Linear(8, 4)

    def set(self, p: float) -> None:
        self.p = self.inner.dropout = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(3, 2, 8)
        if self.kind == "function":
            heads = x.view(3, 2, 2, 4).transpose(1, 2)
            chance = self.p if self.training else 0.0
            y = F.scaled_dot_product_attention(heads, heads, heads * 2.0, dropout_p=chance)
            y = y.transpose(1, 2).reshape(3, 2, 8)
        else:
            y = self.inner(x, x, x, need_weights=self.kind == "weights")[0]
        return self.outer(y.reshape(6, 8))


class Recurrent(nn.Module):
    """A recurrent network with dropout between its layers."""

    def __init__(self, kind: str, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = getattr(nn, kind)(8, 8, num_layers=2, dropout=p, batch_first=True)
        self.outer = nn.Linear(8, 4)

    def set(self, p: float) -> None:
        self.inner.dropout = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x.view(3, 2, 8))[0].reshape(6, 8))


DROPPING: dict[str, Callable[[float], Any]] = {
    "attention": lambda p: Attending("function", p),
    "heads": lambda p: Attending("heads", p),
    "heads with weights": lambda p: Attending("weights", p),
    "lstm": lambda p: Recurrent("LSTM", p),
    "gru": lambda p: Recurrent("GRU", p),
}


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.wide), torch.float64])
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_inside_attention_and_recurrent_networks(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Values of the probability compile nothing, and train as programs with these constants do, mask by mask.

    An attention's own float is one of the model's: it is an input from its first change on.
    """
    values, found = [0.2, 0.5, 0.35, 0.8, 0.2], []
    model = DROPPING[name](values[0]).to(dtype)
    step = dt.training_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), cache=tmp_path)
    for t, p in enumerate(values):
        model.set(p)
        torch.manual_seed(t)
        found.append([step(*labelled(t, dtype)).clone(), *(w.detach().clone() for w in model.parameters())])
    assert step.breaks == [] and len(step.records) == (2 if name == "attention" else 1)
    constant = DROPPING[name](values[0]).to(dtype)
    for t, p in enumerate(values):
        constant.set(p)
        optimizer = torch.optim.SGD(constant.parameters(), lr=0.1)
        own = dt.training_step(constant, F.cross_entropy, optimizer, cache=tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(floats, "_hyperparameter", lambda builder, value: False)
            torch.compiler.reset()
            torch.manual_seed(t)
            loss = own(*labelled(t, dtype))
        assert own.breaks == []
        tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
        for ours, theirs in zip(found[t], [loss, *constant.parameters()], strict=True):
            torch.testing.assert_close(ours, theirs.detach(), **tolerance)
    assert not torch.equal(found[0][-1], found[-1][-1])


@pytest.mark.parametrize("name", DROPPING)
def test_next_to_nothing_dropped_against_pytorch(name: str, tmp_path: Path) -> None:
    """Values and gradients of the composed functions: the probability is so small that all masks are ones."""
    changes = [lambda m, p=p: m.set(p) for p in (1e-12, 2e-12, 0.0, 3e-12)]
    step = against_eager(
        DROPPING[name](1e-12).double(), changes, tmp_path, functools.partial(labelled, dtype=torch.float64)
    )
    assert len(step.records) <= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_of_16_bit_numbers(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What constants do, up to the rounding of a result that their kernel keeps in float32."""
    values = [0.1, 0.3333333, 0.7]

    def trained(constants: bool) -> list[torch.Tensor]:
        found = []
        with monkeypatch.context() as patch:
            if constants:
                patch.setattr(floats, "_hyperparameter", lambda builder, value: False)
            model = Dropping(values[0]).to(dtype)
            step = None
            for t, p in enumerate(values):
                model.drop.p = p
                if constants or step is None:
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                    step = dt.training_step(model, F.cross_entropy, optimizer, cache=tmp_path)
                torch.manual_seed(t)
                step(*labelled(t, dtype))
                found += [w.detach().clone() for w in model.parameters()]
            assert step is not None and step.breaks == [] and len(step.records) == 1
        return found

    for ours, theirs in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
