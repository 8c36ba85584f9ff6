"""What changes between two nodes of one recursion: modules, functions of PyTorch, names of the file, and classes."""

import copy
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.forests import Forests
from tests.driver.test_forests import compare

pytestmark = pytest.mark.filterwarnings("ignore:daceml_train")
TREES: list[Any] = [((1, 2), (3, (4, 5))), (4, ((5, 6), 7)), (8, 9)]
HERE = sys.modules[__name__]


def squashed(h: Tensor) -> Tensor:
    """A function of the file."""
    return torch.sigmoid(h) * 2


class Tree(nn.Module):
    """A recursion in which something is changed below nodes of odd depth, and changed back."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.join, self.other = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.act: nn.Module = nn.LeakyReLU(0.1)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.visits = 0

    def changed(self) -> Any:
        """A context in which something is another."""
        raise NotImplementedError

    def inner(self, h: Tensor) -> Tensor:
        """What a method calls."""
        return self.join(h)

    def cell(self, h: Tensor) -> Tensor:
        """What a block calls."""
        return torch.tanh(self.inner(h))

    def leaf(self, word: int) -> Tensor:
        """The state of a leaf."""
        x = self.words(torch.tensor([word]))
        return F.relu(x) + x.sigmoid() * torch.ones(1, 4).to(x.dtype) * torch.tensor([0.1]).sqrt().float()

    @dt.recursive
    def visit(self, t: Any, depth: int) -> Tensor:
        """The state of a tree."""
        self.visits += 1
        if isinstance(t, int):
            return self.leaf(t)
        if depth % 2:
            with self.changed():
                parts = [self.visit(part, depth + 1) for part in t]
        else:
            parts = [self.visit(part, depth + 1) for part in t]
        h = torch.cat(parts).sum(0, keepdim=True)
        y = self.act(self.cell(h))
        return y

    def forward(self, trees: list[Any]) -> Tensor:
        """The states of roots."""
        return torch.cat([self.visit(t, 0) for t in trees])


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute that is another."""
    before, inherited = getattr(owner, name), isinstance(owner, type) and name not in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def overridden(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object in front of that of its class."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def hooked(module: nn.Module) -> Iterator[None]:
    """A hook that doubles what a module returns."""
    handle = module.register_forward_hook(lambda _, given, result: result * 2)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def hooked_everywhere() -> Iterator[None]:
    """A hook of all modules that doubles what linear ones return."""
    hooks = nn.modules.module
    handle = hooks.register_module_forward_hook(lambda m, _, y: y * 3 if isinstance(m, nn.Linear) else None)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def frozen(parameter: Tensor) -> Iterator[None]:
    """A parameter without a gradient."""
    parameter.requires_grad_(False)
    try:
        yield
    finally:
        parameter.requires_grad_(True)


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Another type of new tensors."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def sigmoid_of(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """What takes the place of another function."""
    return torch.sigmoid(x)


def code_of(function: Any) -> Any:
    """The code of a method, which becomes that of another."""
    return replaced(function, "__code__", (lambda self, h: self.other(h) * 2).__code__)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a function of torch": lambda m: replaced(torch, "tanh", torch.sigmoid),
    "a function of Python in place of one of torch": lambda m: replaced(torch, "tanh", sigmoid_of),
    "a function of functional": lambda m: replaced(F, "relu", F.elu),
    "what a module of torch calls": lambda m: replaced(F, "leaky_relu", sigmoid_of),
    "what a module of torch computes with": lambda m: replaced(F, "linear", lambda x, w, b: x @ w),
    "a method of tensors": lambda m: replaced(Tensor, "sigmoid", Tensor.tanh),
    "a number of a module": lambda m: replaced(m.act, "negative_slope", 0.9),
    "a module": lambda m: replaced(m, "join", m.other),
    "a parameter": lambda m: replaced(m.join, "weight", m.other.weight),
    "a bias": lambda m: replaced(m.join, "bias", None),
    "the forward of an object": lambda m: overridden(m.join, "forward", lambda h: h * 2),
    "the forward of a class": lambda m: replaced(nn.Linear, "forward", lambda self, h: h @ self.weight),
    "the forward of an activation": lambda m: replaced(nn.LeakyReLU, "forward", lambda self, h: h * 2),
    "an inner method of an object": lambda m: overridden(m, "inner", lambda h: m.other(h)),
    "an inner method of a class": lambda m: replaced(original(m), "inner", lambda self, h: self.other(h)),
    "a method of a class": lambda m: replaced(original(m), "cell", lambda self, h: self.other(h)),
    "the code of a method": lambda m: code_of(original(m).inner),
    "the defaults of a method": lambda m: replaced(original(m).scaled, "__defaults__", (3.0,)),
    "a hook": lambda m: hooked(m.join),
    "a hook of all modules": lambda m: hooked_everywhere(),
    "a name of the file": lambda m: replaced(HERE, "F", types.SimpleNamespace(relu=torch.tanh)),
    "a function of the file": lambda m: replaced(HERE, "squashed", torch.tanh),
    "a parameter without gradient": lambda m: frozen(m.join.weight),
    "no gradients": lambda m: torch.no_grad(),
    "another default type": lambda m: default_type(torch.float64),
    "autocast": lambda m: torch.autocast("cpu", torch.bfloat16),
}


def original(m: Any) -> Any:
    """The class that the models of the test are derived from."""
    return Scaled


class Scaled(Tree):
    """A method with a default, and a function of the file."""

    def scaled(self, h: Tensor, scale: float = 1.0) -> Tensor:
        """Read in a method."""
        return self.join(h) * scale

    def inner(self, h: Tensor) -> Tensor:
        """What a method calls."""
        return self.scaled(h)

    def leaf(self, word: int) -> Tensor:
        """The state of a leaf."""
        return squashed(super().leaf(word))


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forests, "run", lambda self, structures, runs: None)  # what is recorded matters alone
    torch.manual_seed(0)

    class Changing(Scaled):
        def changed(self) -> Any:
            return CHANGES[name](self)

    model = Changing()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for _ in range(3):
        compare(model, compiled, twin, (TREES,), 1e-5)
        assert model.visits == twin.visits
