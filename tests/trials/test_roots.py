"""Roots: whatever changes the mathematics of a trial gives it another name, and nothing else does."""

from __future__ import annotations

import argparse
import functools
import itertools
import optparse
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import daceml_train as dt
from daceml_train.trials.fingerprints import fingerprint
from tests.trials.net import X, Y, data

ROOT = Path(__file__).parents[2]
TABLES = {1: torch.ones(3), 2: torch.ones(3) * 2}


@dataclass
class Config:
    scale: float


class Holder:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Holding(nn.Linear):
    def __init__(self, **held: Any) -> None:
        super().__init__(8, 4)
        vars(self).update(held)


class Weighted:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.weight * nn.functional.cross_entropy(output, target)


def scaled(factor: float) -> Any:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data -= factor * parameter.grad

    return Scaled


def new(
    model: nn.Module | None = None,
    loss: Any = nn.functional.cross_entropy,
    optimizer: Any = torch.optim.SGD,
    change: Callable[[Any], Any] = lambda step: None,
    lr: Any = 0.1,
    **options: Any,
) -> dt.Stages:
    torch.manual_seed(0)
    model = nn.Linear(8, 4) if model is None else model
    step = dt.training_step(model, loss, optimizer(model.parameters(), lr=lr))
    change(step)
    return dt.Stages(step, **{"data": data, "seed": 0} | options)


def held(**values: Any) -> dt.Stages:
    torch.manual_seed(0)
    return new(Holding(**values))


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(8, 4)


def evaluating(model: nn.Module) -> dt.Stages:
    return new(evaluate=lambda student: model(X).sum())


def in_parts(table: int) -> dt.Stages:
    names = {"TABLE": TABLES[table], "X": X, "Y": Y, "range": range}
    scope: dict[str, Any] = names
    exec("def data(step, settings):\n    def inner():\n        return X * TABLE.sum()\n    return inner(), Y", scope)
    return new(data=scope["data"])


def in_a_comprehension(table: int) -> dt.Stages:
    scope: dict[str, Any] = {"TABLE": TABLES[table], "X": X, "Y": Y}
    exec("def data(step, settings):\n    return sum(X * TABLE[i] for i in range(3)), Y", scope)
    return new(data=scope["data"])


def with_optimizer(**attributes: Any) -> dt.Stages:
    return new(change=lambda step: vars(step.optimizer).update(attributes))


def hooked(factor: float, gradient: bool) -> dt.Stages:
    def hook(step: Any) -> Any:
        if gradient:
            return step.model.weight.register_hook(lambda g: g * factor)
        return step.model.register_forward_hook(lambda module, inputs, output: output * factor)

    return new(change=hook)


def frozen(part: str) -> dt.Stages:
    return new(change=lambda step: getattr(step.model, part).requires_grad_(False))


def with_attribute(scale: float) -> dt.Stages:
    def own_data(step: int, settings: dict[str, Any]) -> Any:
        return X * own_data.scale, Y  # type: ignore[attr-defined]

    own_data.scale = scale  # type: ignore[attr-defined]
    return new(data=own_data)


def autocast(enabled: bool) -> dt.Stages:
    with torch.autocast("cpu", enabled=enabled):
        return new()


PAIRS: dict[str, tuple[Callable[..., dt.Stages], Any, Any]] = {
    "what is trained": (frozen, "weight", "bias"),
    "a function": (lambda f: held(act=f), torch.relu, torch.tanh),
    "a function of the user's": (lambda f: held(act=f), lambda x: x + 1, lambda x: x + 2),
    "a data class": (lambda s: held(config=Config(s)), 1.0, 2.0),
    "an object": (lambda s: held(config=Holder(s)), 1.0, 2.0),
    "a namespace": (lambda s: held(config=argparse.Namespace(scale=s)), 1.0, 2.0),
    "an object of a library": (lambda s: held(config=optparse.Values({"sizes": [s]})), 1.0, 2.0),
    "an attribute of a function": (with_attribute, 1.0, 2.0),
    "a private number": (lambda s: held(_scale=s), 1.0, 2.0),
    "an array": (lambda s: held(w=np.full(3, s)), 1.0, 2.0),
    "a range": (lambda n: held(r=range(n)), 2, 3),
    "a forward hook": (lambda f: hooked(f, False), 1.0, 2.0),
    "a gradient hook": (lambda f: hooked(f, True), 1.0, 2.0),
    "a closure of the optimizer": (lambda f: new(optimizer=scaled(f)), 0.1, 0.2),
    "an attribute of the optimizer": (lambda f: with_optimizer(factor=f), 0.1, 0.2),
    "a model of evaluate": (evaluating, linear(1), linear(2)),
    "a function within": (in_parts, 1, 2),
    "a comprehension": (in_a_comprehension, 1, 2),
    "a rate as a tensor": (lambda lr: new(lr=torch.tensor(lr)), 0.1, 0.10004),
    "autocast": (autocast, False, True),
    "a loss with attributes": (lambda w: new(loss=Weighted(w), name="named"), 1.0, 2.0),
}


@pytest.mark.parametrize("what", PAIRS)
def test_what_changes_the_mathematics_changes_the_root(what: str) -> None:
    make, first, second = PAIRS[what]
    one, same_again, other = make(first), make(first), make(second)
    assert (one.root, one.evaluation) == (same_again.root, same_again.evaluation)
    assert (one.root, one.evaluation) != (other.root, other.evaluation)


def test_modules_of_the_user_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for factor in (1, 2):
        own = "from argparse import Namespace\nOPTIONS = {}\nOPTIONS['again'] = SPACE = Namespace(options=OPTIONS)\n"
        (tmp_path / "own_batches.py").write_text(f"{own}SPACE.space = SPACE\ndef batch(x):\n    return x * {factor}\n")
        sys.modules.pop("own_batches", None)
        scope: dict[str, Any] = {}
        exec("import own_batches\ndef data(step, settings):\n    return own_batches.batch(step)", scope)
        for noise in (0.1, 0.2):
            scope["own_batches"].OPTIONS["noise"] = noise
            found.append(fingerprint(scope["data"], "data", None))
    assert len(set(found)) == 4


@pytest.mark.parametrize("loaded", [False, True])
def test_a_data_set_needs_a_name(loaded: bool) -> None:
    kept: Any = TensorDataset(X, Y)
    kept = DataLoader(kept, 4) if loaded else kept
    with pytest.raises(dt.Invalid, match=rf"data refers to a {type(kept).__name__}, whose content cannot be told"):
        new(data=lambda step, settings: kept[step])
    assert new(data=lambda step, settings: kept[step], name="digits").root


def test_what_libraries_and_decorators_hold_has_a_text() -> None:
    def made(factor: int) -> Any:
        @torch.no_grad()
        def inner(x: Any) -> Any:
            return x * factor

        @functools.cache
        def kept(step: int) -> Any:
            return random.Random(step).random()

        order = torch.Generator()
        return lambda step, settings: (inner(X), kept(step), order, Path("a"), itertools.chain)

    two, again, three = (fingerprint(made(factor), "data", None) for factor in (2, 2, 3))
    assert two == again != three


def test_sets_have_no_order() -> None:
    program = (
        "from daceml_train.trials.fingerprints import fingerprint as f; "
        "print(f(lambda s: s in {'a', 'b', 'c', ('d', 'e')} or (s, 'f') in {('g', 'h'), 'i'}, 'data', None))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and found != {b""}
