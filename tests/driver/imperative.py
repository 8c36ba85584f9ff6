"""A model in Python trained by PyTorch and by `training_step`, each with random streams of its own, compared each step."""

from __future__ import annotations

import copy
import random
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import is_dataclass
from io import StringIO
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.paths import Paths
from daceml_train.driver.step import TrainingStep

SIZE, BATCH = 6, 4


class Imperative(nn.Module):
    """Two layers, what a model keeps, and a script that says what each call does."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.r = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.notes: list[Any] = []
        self.calls = 0


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return (output - target).square().mean()


class Streams:
    """The states of PyTorch's, Python's and NumPy's random streams."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.leave()

    def enter(self) -> None:
        """Continue from here."""
        torch.set_rng_state(self.states[0])
        random.setstate(self.states[1])
        np.random.set_state(self.states[2])

    def leave(self) -> None:
        """Remember where the streams are."""
        self.states: Any = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def assert_equal(self, other: Streams) -> None:
        """Both are at the same place."""
        assert torch.equal(self.states[0], other.states[0]), "PyTorch's stream"
        assert self.states[1] == other.states[1], "Python's stream"
        a, b = self.states[2], other.states[2]
        assert a[0] == b[0] and np.array_equal(a[1], b[1]) and a[2:] == b[2:], "NumPy's stream"


def assert_alike(ours: Any, theirs: Any, where: str = "") -> None:
    """Two Python values are equal, but for rounding."""
    assert type(ours) is type(theirs), f"{where}: {type(ours)} instead of {type(theirs)}"
    if isinstance(theirs, Tensor):
        assert ours.requires_grad == theirs.requires_grad and ours.stride() == theirs.stride(), where
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-8, msg=lambda m: f"{where}: {m}")
    elif isinstance(theirs, np.ndarray):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8, err_msg=where)
    elif isinstance(theirs, float):
        assert ours == theirs or abs(ours - theirs) <= 1e-6 * max(1.0, abs(theirs)), f"{where}: {ours}, {theirs}"
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_alike(ours[key], theirs[key], f"{where}.{key}")
    elif is_dataclass(theirs) and not isinstance(theirs, type):
        assert_alike(vars(ours), vars(theirs), where)
    elif isinstance(theirs, list | tuple | deque):
        assert len(ours) == len(theirs), where
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(a, b, f"{where}[{number}]")
    else:
        assert ours == theirs, f"{where}: {ours!r} instead of {theirs!r}"


def kept(model: nn.Module) -> dict[str, Any]:
    """What a model keeps besides its parameters."""
    own = {k: v for k, v in vars(model).items() if not k.startswith("_")}
    return own | dict(model.named_buffers())


class Pair:
    """A model and its copy: one trained by PyTorch, one by `training_step`."""

    def __init__(self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        self.theirs, self.ours = model.double(), copy.deepcopy(model).double()
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9))
        self.optimizers = make(self.ours.parameters()), make(self.theirs.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.step: TrainingStep = dt.training_step(self.ours, loss_of, self.optimizers[0], random="eager")
        self.step.along.compiled = True  # whether that is faster for so few elements or not
        self.streams = Streams(7), Streams(7)

    @property
    def paths(self) -> Paths:
        """The paths of the step's only kind of arguments."""
        (paths,) = self.step.paths.values()
        return paths

    def train(self, batches: Sequence[Any]) -> list[Tensor]:
        """Train both on these inputs, and compare after each step; the losses."""
        return [self.one(batch) for batch in batches]

    def one(self, x: Any) -> Tensor:
        """One step of both, compared."""
        target = torch.ones(BATCH, SIZE, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            printed = StringIO(), StringIO()
            self.streams[0].enter()
            with redirect_stdout(printed[0]):
                loss = self.step(x, target)
            self.streams[0].leave()
            self.streams[1].enter()
            with redirect_stdout(printed[1]):
                expected = loss_of(self.theirs(x), target)
            self.optimizers[1].zero_grad()
            expected.backward()
            self.optimizers[1].step()
            self.streams[1].leave()
        assert_alike(loss, expected.detach(), "loss")
        self.compare()
        assert printed[0].getvalue() == printed[1].getvalue()
        self.streams[0].assert_equal(self.streams[1])
        return loss

    def compare(self) -> None:
        """Parameters, optimizers' states, and what the models keep."""
        expected = dict(self.theirs.named_parameters())
        for name, parameter in self.ours.named_parameters():
            assert_alike(parameter, expected[name], name)
            pairs = zip(self.optimizers, (parameter, expected[name]), strict=True)
            state, other = (optimizer.state.get(p, {}) for optimizer, p in pairs)
            assert_alike(dict(state), dict(other), f"state of {name}")
        assert_alike(kept(self.ours), kept(self.theirs))


def batches(count: int, shift: float = 0.0) -> list[Tensor]:
    """Batches of normal numbers around `shift`."""
    drawn = (torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(n)) for n in range(count))
    return [shift + x.double() for x in drawn]
