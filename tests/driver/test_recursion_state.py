"""What blocks of a recursion recorded is repeated only while what it depends on is as it was."""

import copy
import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

import daceml_train as dt
from daceml_train.frontends.torch.recursion.watches import CONTENTS, Contents
from tests.driver.test_forests import compare

TREES: list[Any] = [((1, 2), 3), (4, 5)]
SCALE = 1.0
SETTINGS = types.SimpleNamespace(scale=1.0)
SQUASH = nn.LeakyReLU(0.1)
Change = Callable[[Any], Any]


class Tree(nn.Module):
    """A recursion whose inner nodes call a method."""

    factor, table = 1.0, [1.0]

    def __init__(self) -> None:
        super().__init__()
        self.words, self.join = nn.Embedding(10, 4), nn.Linear(4, 4)
        self.act: nn.Module = nn.LeakyReLU(0.1)
        self.scale, self.scales = 1.0, [1.0]
        self.hidden = types.SimpleNamespace(act=nn.LeakyReLU(0.1))

    @property
    def gain(self) -> Tensor:
        """A tensor from a number."""
        return torch.full((4,), self.scale)

    def cell(self, h: Tensor) -> Tensor:
        """What a block calls."""
        return self.join(h).tanh()

    @dt.recursive
    def visit(self, t: Any) -> Tensor:
        """The state of a tree."""
        if isinstance(t, int):
            return self.words(torch.tensor([t]))
        h = torch.cat([self.visit(part) for part in t]).sum(0, keepdim=True)
        x = self.cell(h)
        return x

    def forward(self, trees: list[Any]) -> Tensor:
        """The states of roots."""
        return torch.cat([self.visit(t) for t in trees])


class Global(Tree):
    """A number of the file."""

    def cell(self, h: Tensor) -> Tensor:
        """Read in the method."""
        return self.join(h).tanh() * SCALE


class Object(Tree):
    """A number of an object of the file."""

    def cell(self, h: Tensor) -> Tensor:
        """Read in the method."""
        return self.join(h).tanh() * SETTINGS.scale


class Default(Tree):
    """A number that is a default, and one that is a default by name."""

    def cell(self, h: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
        """Read in the method."""
        return self.join(h).tanh() * scale + shift


class Attributes(Tree):
    """Numbers of the model, in attributes, lists, the class, and a property."""

    def cell(self, h: Tensor) -> Tensor:
        """Read in the method."""
        return self.join(h).tanh() * self.scale * self.scales[0] * self.factor * self.table[0] * self.gain


class Renamed(Tree):
    """The model by another name."""

    def cell(self, h: Tensor) -> Tensor:
        """Read in the method."""
        this = self
        return self.join(h).tanh() * this.scale


class Activation(Tree):
    """A module with a number."""

    def cell(self, h: Tensor) -> Tensor:
        """Called in the method."""
        return self.act(self.join(h))


class Outside(Tree):
    """A module that is no part of the model."""

    def cell(self, h: Tensor) -> Tensor:
        """Called in the method."""
        return self.hidden.act(self.join(h))


class OutsideHere(Tree):
    """A module that is no part of the model, in the recursive function."""

    @dt.recursive
    def visit(self, t: Any) -> Tensor:
        """The state of a tree."""
        if isinstance(t, int):
            return self.words(torch.tensor([t]))
        h = torch.cat([self.visit(part) for part in t]).sum(0, keepdim=True)
        x = self.hidden.act(self.join(h))
        return x


class Shared(Tree):
    """A module at two places."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Tanh(), nn.Softplus()
        self.act = nn.Sequential(first, second, first)

    def cell(self, h: Tensor) -> Tensor:
        """Called in the method."""
        return self.act(self.join(h))


class Inner(Tree):
    """A method that another one calls."""

    def inner(self, h: Tensor) -> Tensor:
        """Called in the method."""
        return self.join(h).tanh()

    def cell(self, h: Tensor) -> Tensor:
        """Calls another method."""
        return self.inner(h) * 2


def _closing(kind: type[Tree]) -> Any:
    """A model whose method has a variable of its function's, and what sets it."""
    scale = 1.0

    class Closing(kind):  # type: ignore[valid-type,misc]
        def cell(self, h: Tensor) -> Tensor:
            return self.join(h).tanh() * scale

    def change(_: Any) -> None:
        nonlocal scale
        scale = 3.0

    return Closing, change


CLOSING, CLOSED = _closing(Tree)


def _set(name: str, value: Any) -> Change:
    """A change of an attribute of the model; the value is made from the model if it is a function."""

    def change(model: Any) -> None:
        *path, last = name.split(".")
        for each in path:
            model = getattr(model, each)
        setattr(model, last, value(model) if isinstance(value, types.FunctionType) else value)

    return change


def _of_class(name: str, value: Any) -> Change:
    return lambda model: setattr(type(model), name, value)


def _code(name: str, value: Callable[..., Any]) -> Change:
    return lambda model: setattr(getattr(type(model), name), "__code__", value.__code__)


def _in_file(name: str, value: Any) -> Change:
    return lambda _: globals().__setitem__(name, value)


CHANGES: list[tuple[Any, Change]] = [
    (Global, _in_file("SCALE", 3.0)),
    (Object, lambda _: setattr(SETTINGS, "scale", 3.0)),
    (CLOSING, CLOSED),
    (Default, lambda model: setattr(type(model).cell, "__defaults__", (3.0,))),
    (Default, lambda model: setattr(type(model).cell, "__kwdefaults__", {"shift": 3.0})),
    (Tree, _code("cell", lambda self, h: self.join(h).relu())),
    (Inner, _code("inner", lambda self, h: self.join(h).relu())),
    (Inner, _of_class("inner", lambda self, h: self.join(h).relu())),
    (Inner, _set("inner", lambda model: lambda h: model.join(h).relu())),
    (Inner, _set("cell", lambda model: lambda h: model.join(h).relu())),
    (Attributes, _set("scale", 3.0)),
    (Attributes, lambda model: model.scales.__setitem__(0, 3.0)),
    (Attributes, _of_class("factor", 3.0)),
    (Attributes, lambda model: model.table.__setitem__(0, 3.0)),
    (Renamed, _set("scale", 3.0)),
    (Activation, _set("act.negative_slope", 0.7)),
    (Activation, _set("act", lambda _: nn.Softplus())),
    (Activation, _set("act.__class__", nn.ReLU)),
    (Activation, _set("act.forward", lambda _: torch.square)),
    (Outside, lambda model: setattr(model.hidden.act, "negative_slope", 0.7)),
    (OutsideHere, lambda model: setattr(model.hidden.act, "negative_slope", 0.7)),
    (Shared, lambda model: model.act.__setitem__(2, model.act[1])),
    (Tree, _set("join.forward", lambda model: lambda h: model.weight.sum() * h)),
    (Tree, _set("join.weight", lambda model: nn.Parameter(model.weight.detach() * 2))),
    (Tree, lambda model: model.join.weight.requires_grad_(False)),
    (Tree, _set("join.bias", None)),
    (Tree, _set("join", lambda _: nn.Linear(4, 4, bias=False))),
]


@contextmanager
def _restored(kind: Any) -> Iterator[None]:
    """Undo what a change did to the file and to classes."""
    found, classes = (SCALE, SETTINGS.scale), [c for c in kind.__mro__ if issubclass(c, Tree)]
    before = [dict(vars(c)) for c in classes]
    functions = {
        f: (f.__code__, f.__defaults__, f.__kwdefaults__)
        for own in before
        for f in own.values()
        if callable(f) and isinstance(f, types.FunctionType)
    }
    try:
        yield
    finally:
        globals()["SCALE"], SETTINGS.scale = found
        for c, own in zip(classes, before, strict=True):
            for name, value in own.items():
                if vars(c)[name] is not value:
                    setattr(c, name, value)
        for f, (code, defaults, by_name) in functions.items():
            f.__code__, f.__defaults__, f.__kwdefaults__ = code, defaults, by_name
        Tree.table[0] = 1.0


@pytest.mark.compiled
@pytest.mark.parametrize(("kind", "change"), CHANGES, ids=[f"{k.__name__}-{n}" for n, (k, _) in enumerate(CHANGES)])
def test_changes_between_calls(kind: Any, change: Change) -> None:
    torch.manual_seed(0)
    with _restored(kind):
        model = kind()
        twin, compiled = copy.deepcopy(model), dt.optimize(model)
        for _ in range(2):
            compare(model, compiled, twin, (TREES,), 1e-5)
        for m in (model, twin):
            torch.manual_seed(1)
            change(m)
        for _ in range(2):
            compare(model, compiled, twin, (TREES,), 1e-5)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "register",
    [
        hooks.register_module_forward_hook,
        hooks.register_module_forward_pre_hook,
        hooks.register_module_full_backward_hook,
        hooks.register_module_full_backward_pre_hook,
    ],
)
def test_hooks_of_all_modules(register: Any) -> None:
    torch.manual_seed(0)
    model = Tree()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for _ in range(2):
        compare(model, compiled, twin, (TREES,), 1e-5)
    counts = []
    for run in (compiled, twin):
        calls: list[str] = []
        handle = register(lambda module, *_, calls=calls: calls.append(type(module).__name__))
        try:
            run(TREES).sum().backward()
        finally:
            handle.remove()
        counts.append({name: calls.count(name) for name in ("Linear", "Embedding")})
    assert counts[0] == counts[1] and counts[1]["Linear"]
    compare(model, compiled, twin, (TREES,), 1e-5)


@pytest.mark.compiled
def test_hooks_of_all_modules_that_change_results() -> None:
    torch.manual_seed(0)
    model = Tree()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for _ in range(2):
        compare(model, compiled, twin, (TREES,), 1e-5)
    handle = hooks.register_module_forward_hook(lambda m, _, y: y * 3 if isinstance(m, nn.Linear) else None)
    try:
        compare(model, compiled, twin, (TREES,), 1e-5)
    finally:
        handle.remove()
    compare(model, compiled, twin, (TREES,), 1e-5)


@pytest.mark.compiled
def test_records_are_kept_while_nothing_changes() -> None:
    model = Inner()
    model.extra = [object()]  # type: ignore[assignment]
    compiled: Any = dt.optimize(model)
    for count in itertools.repeat(2, 3):
        compiled(TREES)
        structures = compiled._daceml_train.recursions["forward"].structures
        model.scale += count
    assert len(structures.memo) == 1, "a number that no block reads"
    assert len(next(iter(structures.last.values()))) == 2


def test_contents_of_pytorch_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program replaces a function of PyTorch in every call, what was there before is not kept for good."""
    contents, functions = Contents(), [lambda x, k=k: k for k in range(CONTENTS + 5)]
    first = contents.of(())
    with monkeypatch.context() as change:
        numbers = []
        for function in functions:
            change.setattr(torch, "relu", function)
            numbers.append(contents.of(()))
        assert len({first, *numbers}) == len(functions) + 1
        assert len(contents.seen) == CONTENTS
        change.setattr(torch, "relu", functions[-2])
        assert contents.of(()) == numbers[-2]
    assert contents.of(()) not in (first, *numbers)
