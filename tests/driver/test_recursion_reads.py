"""What blocks of a recursion read is read as often as in PyTorch, and functions that wrap others stay what they are."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from tests.driver.test_forests import compare

Function = Callable[..., Any]


class Node:
    """A node whose properties count how often they are read, and differ each time."""

    def __init__(self, word: int, *parts: "Node") -> None:
        self.word, self.parts = word, parts
        self.reads: list[str] = []
        self.state: Any = None

    @property
    def row(self) -> Tensor:
        """Another tensor at each read."""
        self.reads.append("row")
        return torch.full((1, 4), 0.1 * len(self.reads))

    @property
    def number(self) -> float:
        """Another number at each read."""
        self.reads.append("number")
        return float(len(self.reads))

    def __getattr__(self, name: str) -> Any:
        if name != "missing":
            raise AttributeError(name)
        self.reads.append("missing")
        return torch.full((1, 4), 0.2 * len(self.reads))


def nodes() -> list[Node]:
    """A few trees."""
    return [Node(1, Node(2), Node(3, Node(4))), Node(5), Node(6, Node(1), Node(0))]


def below(roots: Any) -> list[Any]:
    """All nodes."""
    return [each for n in roots for each in (n, *below(n.parts))]


class Model(nn.Module):
    """A recursion over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gate = nn.Embedding(10, 4), nn.Linear(4, 4)
        self.picks = 0
        self.calls: list[str] = []

    @property
    def picked(self) -> nn.Module:
        """A module that counts how often it is read."""
        self.picks += 1
        return self.gate

    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        raise NotImplementedError

    def forward(self, roots: list[Any]) -> Tensor:
        """The states of roots."""
        return torch.cat([self.visit(n) for n in roots])


class Rows(Model):
    """A property that is a tensor, read twice."""

    @dt.recursive
    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        x = self.gate(n.row) + self.gate(n.row).tanh()
        for part in n.parts:
            x = x + self.visit(part)
        return x


class Missing(Model):
    """A tensor by `__getattr__`, read twice."""

    @dt.recursive
    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        x = self.gate(n.missing) + self.gate(n.missing).tanh() * n.missing
        for part in n.parts:
            x = x + self.visit(part)
        return x


class Counts(Model):
    """A property that is a number, read twice, alone and in tensors."""

    @dt.recursive
    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        x = self.gate(torch.tensor([[n.number, n.number, 0.0, 1.0]])) * n.number
        y = self.gate(torch.tensor([[n.number, n.number, 0.0, 1.0]])) * n.number + x
        for part in n.parts:
            y = y + self.visit(part)
        return y


class Picked(Model):
    """A property of the model, called twice."""

    @dt.recursive
    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        x = self.picked(self.words(torch.tensor([n.word])))
        y = self.picked(x).tanh()
        for part in n.parts:
            y = y + self.visit(part)
        return y


class States(Model):
    """An attribute that is one value twice, or two values."""

    @dt.recursive
    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        x = self.words(torch.tensor([n.word]))
        for part in n.parts:
            x = x + self.visit(part)
        n.state = [x, x] if n.word % 2 else [x, x.tanh()]
        y = self.gate(n.state[0]) * n.state[1] + n.state[0]
        return y


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Rows, Missing, Counts, Picked, States])
def test_properties_are_read_as_often_as_in_pytorch(kind: type[Model]) -> None:
    torch.manual_seed(0)
    model = kind()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for _ in range(3):
        given, others = nodes(), nodes()
        found, expected = compiled(given), twin(others)
        torch.testing.assert_close(found, expected)
        model.zero_grad(), twin.zero_grad()
        found.square().sum().backward(), expected.square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
        assert [n.reads for n in below(given)] == [n.reads for n in below(others)]
        assert model.picks == twin.picks


@pytest.mark.compiled
def test_an_attribute_that_is_read_twice_is_still_a_block() -> None:
    compiled: Any = dt.optimize(States())
    compiled(nodes())
    structures = compiled._daceml_train.recursions["forward"].structures
    assert all(kept.failed == 0 and kept.known for memo in structures.memo.values() for kept in memo.values())


def noted(function: Function) -> Function:
    """A function that notes its calls, and doubles what it returns."""

    @functools.wraps(function)
    def called(self: Any, *given: Any) -> Any:
        self.calls.append(function.__name__)
        return function(self, *given) * 2

    return called


class Wrapped(Model):
    """A method that a block calls, and one that is the recursion, both within other functions."""

    @noted
    def cell(self, x: Tensor) -> Tensor:
        """What a block calls."""
        return self.gate(x).tanh()

    @dt.recursive
    @noted
    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        x = self.words(torch.tensor([n.word]))
        for part in n.parts:
            x = x + self.visit(part)
        y = self.cell(x)
        return y


class WrappedCell(Wrapped):
    """The method alone within another function."""

    @dt.recursive
    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        x = self.words(torch.tensor([n.word]))
        for part in n.parts:
            x = x + self.visit(part)
        y = self.cell(x)
        return y


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Wrapped, WrappedCell])
def test_functions_that_wrap_others(kind: type[Model]) -> None:
    torch.manual_seed(0)
    model = kind()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for _ in range(3):
        compare(model, compiled, twin, (nodes(),), 1e-5)
        assert model.calls == twin.calls


class Replaced(WrappedCell):
    """A recursion whose code is replaced."""

    def cell(self, x: Tensor) -> Tensor:
        """What a block calls."""
        return self.gate(x)

    @dt.recursive
    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        x = self.words(torch.tensor([n.word]))
        for part in n.parts:
            x = x + self.visit(part)
        return self.cell(x)


@pytest.mark.compiled
def test_a_recursion_whose_code_is_replaced() -> None:
    torch.manual_seed(0)
    model = Replaced()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    compare(model, compiled, twin, (nodes(),), 1e-5)

    def other(self: Any, n: Any) -> Any:
        x = self.words(torch.tensor([n.word])) * 3
        for part in n.parts:
            x = x + self.visit(part)
        return self.cell(x).relu()

    before = Replaced.visit.__code__
    try:
        Replaced.visit.__code__ = other.__code__  # type: ignore[attr-defined]
        for _ in range(2):
            compare(model, compiled, twin, (nodes(),), 1e-5)
        assert Replaced.visit.__code__ is other.__code__
    finally:
        Replaced.visit.__code__ = before  # type: ignore[attr-defined]
    compare(model, compiled, twin, (nodes(),), 1e-5)


class Halved(torch.autograd.Function):
    """A function of autograd that users write."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Half of the value, and a weight."""
        ctx.save_for_backward(x)
        return x * 0.5 * weight.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Another gradient than the right one, and none of the weight."""
        (x,) = ctx.saved_tensors
        return gradients[0] * x, None


class Custom(Model):
    """A function of autograd, and hooks of a module."""

    @dt.recursive
    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        x = self.words(torch.tensor([n.word]))
        for part in n.parts:
            x = x + Halved.apply(self.gate(self.visit(part)), self.gate.weight)  # type: ignore[no-untyped-call]
        return x.tanh()


@pytest.mark.compiled
def test_functions_of_autograd() -> None:
    torch.manual_seed(0)
    model = Custom()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    before = torch.autograd.Function.apply
    for _ in range(3):
        compare(model, compiled, twin, (nodes(),), 1e-5)
    assert torch.autograd.Function.apply == before


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["backward_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = WrappedCell()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    compare(model, compiled, twin, (nodes(),), 1e-5)
    calls: tuple[list[int], list[int]] = ([], [])
    for m, own in zip((model, twin), calls, strict=True):
        getattr(m.gate, f"register_{name}")(lambda *_, own=own: own.append(1))
    for _ in range(2):
        compare(model, compiled, twin, (nodes(),), 1e-5)
        assert calls[0] == calls[1] and calls[1]


LEVEL = 1.0


class Ordered(Model):
    """A recursion that changes what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.total = 1.0, torch.zeros(1, 4)

    def forward(self, roots: list[Any]) -> Tensor:
        """The states of roots."""
        global LEVEL
        self.scale, self.total, LEVEL = 1.0, torch.zeros(1, 4), 1.0
        return super().forward(roots)

    def leaf(self, n: Any) -> Tensor:
        """The embedding of a node."""
        global LEVEL
        self.scale, self.total, LEVEL = self.scale + 0.5, self.total + 1, LEVEL + 0.5
        return self.words(torch.tensor([n.word]))

    def noted(self, x: Tensor) -> Tensor:
        """A method with an effect."""
        self.scale += 0.5
        return self.gate(x)


class Later(Ordered):
    """A number is read after a method has changed it."""

    @dt.recursive
    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        x = self.words(torch.tensor([n.word]))
        for part in n.parts:
            x = x + self.visit(part)
        a = self.noted(x)
        b = a.tanh() * self.scale
        return b


class Before(Ordered):
    """Numbers, tensors, and globals are read before calls that change them."""

    @dt.recursive
    def visit(self, n: Any) -> Tensor:
        """The state of a node."""
        if not n.parts:
            return self.leaf(n)
        x = self.gate(self.scale * self.visit(n.parts[0]))
        y = self.total.add(self.visit(n.parts[-1]))
        z = torch.mul(LEVEL, self.visit(n.parts[0]))
        return torch.cat([x, y, self.scale * self.visit(n.parts[0]) * self.scale, z]).sum(0, keepdim=True).tanh()


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Later, Before])
def test_reads_and_changes_are_in_order(kind: type[Ordered]) -> None:
    torch.manual_seed(0)
    model = kind()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for _ in range(3):
        compare(model, compiled, twin, (nodes(),), 1e-5)
        assert model.scale == twin.scale
