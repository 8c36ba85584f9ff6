"""Functions that call themselves without a name for it: found in the code, and run level by level."""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.frontends.torch.recursion.detect import cycles, over_data

TREES: list[Any] = [((1, 2), (3, (4, 5))), (6, (7, 8))]
OTHERS: list[Any] = [(((0, 1), 2), 3), 4, (5, 6)]


class Method(nn.Module):
    """A method that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.join = nn.Embedding(10, 6), nn.Linear(12, 6)

    def visit(self, tree: Any) -> Tensor:
        """The state of a tree."""
        if isinstance(tree, int):
            return self.words(torch.tensor([tree]))
        return self.join(torch.cat([self.visit(part) for part in tree], 1)).tanh()

    def forward(self, trees: list[Any]) -> Tensor:
        """The states of trees."""
        return torch.cat([self.visit(tree) for tree in trees])


class Derived(Method):
    """A method of the base class, by way of `super()`."""

    def forward(self, trees: list[Any]) -> Tensor:
        """Twice the states."""
        return super().forward(trees) * 2


class Module(Method):
    """A module that calls itself."""

    def forward(self, trees: Any) -> Tensor:
        """The states of trees, or of one."""
        if isinstance(trees, list):
            return torch.cat([self(tree) for tree in trees])
        if isinstance(trees, int):
            return self.words(torch.tensor([trees]))
        left, right = trees
        return self.join(torch.cat([self(left), self(right)], 1)).tanh()


class Short(Method):
    """Methods that name their object otherwise."""

    def visit(s, tree: Any) -> Tensor:
        """The state of a tree."""
        if isinstance(tree, int):
            return s.words(torch.tensor([tree]))
        return s.join(torch.cat([s.visit(part) for part in tree], 1)).tanh()


class ShortModule(Module):
    """A module that calls itself, and names itself otherwise."""

    def forward(this, trees: Any) -> Tensor:
        """The states of trees, or of one."""
        if isinstance(trees, list):
            return torch.cat([this(tree) for tree in trees])
        if isinstance(trees, int):
            return this.words(torch.tensor([trees]))
        left, right = trees
        return this.join(torch.cat([this(left), this(right)], 1)).tanh()


class ShortLocal(Method):
    """Two methods that call each other from functions in them, and name their object otherwise."""

    def visit(m, tree: Any) -> Tensor:
        """The state of a tree."""

        def parts() -> list[Tensor]:
            return [m.other(part) for part in tree]

        return m.words(torch.tensor([tree])) if isinstance(tree, int) else m.join(torch.cat(parts(), 1)).tanh()

    def other(m, tree: Any) -> Tensor:
        """Minus the state of a tree."""
        return -m.visit(tree)


class Local(Method):
    """A local function that calls itself."""

    def forward(self, trees: list[Any]) -> Tensor:
        """The states of trees."""

        def below(tree: Any) -> Tensor:
            if isinstance(tree, int):
                return self.words(torch.tensor([tree]))
            return self.join(torch.cat([below(part) for part in tree], 1)).tanh()

        return torch.cat([below(tree) for tree in trees])


def climb(net: Any, tree: Any) -> Tensor:
    """The state of a tree."""
    if isinstance(tree, int):
        return net.words(torch.tensor([tree]))  # type: ignore[no-any-return]
    return net.join(torch.cat([climb(net, part) for part in tree], 1)).tanh()  # type: ignore[no-any-return]


class Global(Method):
    """A function of the file that calls itself."""

    def forward(self, trees: list[Any]) -> Tensor:
        """The states of trees."""
        return torch.cat([climb(self, tree) for tree in trees])


class Straight(Method):
    """A method of the same name as one of the base class, and calls of other modules' `forward`: no recursion."""

    def visit(self, tree: Any) -> Tensor:
        """A state."""
        return self.join.forward(torch.zeros(1, 12)) + len(tree)

    def forward(self, trees: list[Any]) -> Tensor:
        """States."""
        return self.words.forward(torch.tensor([1])) + self.visit(trees)


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Method, Derived, Module, Short, ShortModule, ShortLocal, Local, Global])
def test_functions_that_call_themselves_are_found(kind: type[Method]) -> None:
    torch.manual_seed(0)
    model = kind()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for trees in (TREES, OTHERS):
        model.zero_grad(), twin.zero_grad()
        result, expected = compiled(trees), twin(trees)
        torch.testing.assert_close(result, expected)
        result.square().sum().backward(), expected.square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    recursion = compiled._daceml_train.recursions["forward"]
    assert recursion.structures.programs.compiled == 1
    assert not compiled._daceml_train.backend.graphs


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *((Method, 1), (Derived, 1), (Module, 1), (Local, 1), (Global, 1), (Straight, 0)),
        *((Short, 1), (ShortModule, 1), (ShortLocal, 2)),
    ],
)
def test_cycles_are_by_name(kind: type[Method], count: int) -> None:
    assert len(cycles(kind.forward, [kind, nn.Linear, nn.Embedding])) == count


def test_data_to_recurse_over() -> None:
    x = torch.zeros(1)
    assert over_data([TREES]) and over_data([{"tree": SimpleNamespace()}]) and over_data([x, [[x], [1]]])
    assert not over_data([x, 1, None, "text", [x, x], {"x": x}, nn.Linear(1, 1)])


def test_data_that_is_deep_shared_or_within_itself() -> None:
    x = torch.ones(1)
    deep: Any = None
    shared: Any = x
    for _ in range(100_000):
        deep, shared = (x, deep), (shared, shared)
    cycle: list[Any] = [x]
    cycle.append(cycle)
    assert not over_data([deep, shared, cycle]) and over_data([(deep, [1])])


class Shapes(Method):
    """A function that calls itself and computes nothing."""

    def depth(self, tree: Any) -> int:
        """How deep a tree is."""
        return 0 if isinstance(tree, int) else 1 + max(self.depth(part) for part in tree)

    def forward(self, trees: list[Any]) -> Tensor:
        """A state per tree."""
        return self.words(torch.tensor([self.depth(tree) for tree in trees]))


@pytest.mark.compiled
def test_a_recursion_that_computes_nothing_is_compiled_as_before() -> None:
    model = Shapes()
    compiled = dt.optimize(model)
    for _ in range(2):
        torch.testing.assert_close(compiled(TREES), model.words(torch.tensor([3, 2])))
    assert compiled._daceml_train.backend.graphs == 1


class Pair(nn.Module):
    """Two modules with methods of equal names, each of which calls its own."""

    class First(nn.Module):
        """`inner` ends here."""

        def outer(self, x: Tensor) -> Tensor:
            """Calls `inner`."""
            return self.inner(x)

        def inner(self, x: Tensor) -> Tensor:
            """Calls nothing."""
            return x + 1

    class Second(nn.Module):
        """`outer` ends here."""

        def outer(self, x: Tensor) -> Tensor:
            """Calls nothing."""
            return x * 2

        def inner(self, x: Tensor) -> Tensor:
            """Calls `outer`."""
            return self.outer(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.First(), self.Second()

    def forward(self, data: Any) -> Tensor:
        """Both."""
        return self.second.inner(self.first.outer(data.x))


def test_methods_of_other_classes_are_no_cycle() -> None:
    assert not cycles(Pair.forward, [Pair, Pair.First, Pair.Second])


class Once(Method):
    """A function that could call itself and does not."""

    def visit(self, tree: Any) -> Tensor:
        """A state."""
        return self.visit(tree[0]) if len(tree) > 9 else self.join(torch.ones(1, 12)).tanh()


@pytest.mark.compiled
def test_a_function_that_never_calls_itself_is_compiled_as_before() -> None:
    model = Once()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for _ in range(6):
        torch.testing.assert_close(compiled(TREES), twin(TREES))
    assert not compiled._daceml_train.recursions["forward"].serves
    assert compiled._daceml_train.backend.graphs == 1


@pytest.mark.compiled
def test_training_steps_over_trees_of_unchanged_code() -> None:
    torch.manual_seed(0)
    model = Method()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, twin))
    step = dt.training_step(model, nn.functional.mse_loss, optimizer)
    deeper = [[functools.reduce(lambda tree, leaf: (tree, leaf), range(leaves)), leaves] for leaves in range(3, 10)]
    for trees in (TREES, OTHERS, TREES, *deeper):
        target = torch.ones(len(trees), 6)
        loss = nn.functional.mse_loss(twin(trees), target)
        other.zero_grad()
        loss.backward()
        other.step()
        torch.testing.assert_close(step((trees,), target), loss.detach())
    assert not step.paths, "a shape of trees has a program"
    assert "level by level" in step.breaks[0]
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
