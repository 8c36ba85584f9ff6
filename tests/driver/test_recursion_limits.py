"""Recursions as deep as their data, and bad data: an error names the path of the node."""

import copy
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt


@dataclass(eq=False)
class Node:
    """A node of a binary tree."""

    word: int = 0
    left: Any = None
    right: Any = None


class Sum(nn.Module):
    """A network over binary trees."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.words, self.join = nn.Embedding(10, width), nn.Linear(2 * width, width)

    @dt.recursive
    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        if node.left is None:
            return self.words(torch.tensor([node.word]))
        left, right = self.visit(node.left), self.visit(node.right)
        return self.join(torch.cat([left, right], 1)).tanh()

    def forward(self, roots: list[Node]) -> Tensor:
        """The states of roots."""
        return torch.cat([self.visit(root) for root in roots])


class Unmarked(Sum):
    """The same, whose function has no name for its recursion."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        if node.left is None:
            return self.words(torch.tensor([node.word]))
        parts = [self.visit(part) for part in (node.left, node.right)]
        return self.join(torch.cat(parts, 1)).tanh()


class Module(Sum):
    """A module that calls itself."""

    def forward(self, node: Any) -> Tensor:
        """The state of a node."""
        if node.left is None:
            return self.words(torch.tensor([node.word]))
        return self.join(torch.cat([self(node.left), self(node.right)], 1)).tanh()


class Iterative(Sum):
    """A list as a tree, without recursion."""

    def forward(self, words: list[int]) -> Tensor:  # type: ignore[override]
        """The state of the last node."""
        state, *rows = self.words(torch.tensor(words)).split(1)
        for row in rows:
            state = self.join(torch.cat([state, row], 1)).tanh()
        return state


def chain(words: list[int]) -> Node:
    """A list as a tree."""
    node = Node(words[0])
    for word in words[1:]:
        node = Node(0, node, Node(word))
    return node


def tree(r: random.Random, leaves: int) -> Node:
    """A random tree."""
    if leaves == 1:
        return Node(r.randrange(10))
    left = r.randint(1, leaves - 1)
    return Node(0, tree(r, left), tree(r, leaves - left))


def noted(error: BaseException) -> str:
    """What was added to an error."""
    return "\n".join(getattr(error, "__notes__", ()))


class Generated(Sum):
    """A function that calls itself in a generator."""

    @dt.recursive
    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        if node.left is None:
            return self.words(torch.tensor([node.word]))
        return self.join(torch.cat(tuple(self.visit(part) for part in (node.left, node.right)), 1)).tanh()


@contextmanager
def evaluated_by_dynamo() -> Iterator[None]:
    """Another thread is in code that TorchDynamo runs, so its evaluator runs the frames of all threads."""
    started, done = threading.Event(), threading.Event()

    def active() -> None:
        started.set()
        done.wait()

    thread = threading.Thread(target=torch._dynamo.run(active))
    thread.start()
    started.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.compiled
@pytest.mark.parametrize("state", [nullcontext, evaluated_by_dynamo])
@pytest.mark.parametrize("kind", [Sum, Unmarked, Module, Generated])
def test_a_list_of_10_000_as_a_tree(kind: type[Sum], state: Any) -> None:
    torch.manual_seed(0)
    model = kind()
    twin = Iterative()
    twin.load_state_dict(model.state_dict())
    compiled, limit = dt.optimize(model), sys.getrecursionlimit()
    words = [random.Random(0).randrange(10) for _ in range(10_000)]
    with state():
        result = compiled(chain(words) if kind is Module else [chain(words)])
    expected = twin(words)
    torch.testing.assert_close(result, expected)
    result.square().sum().backward(), expected.square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert sys.getrecursionlimit() == limit
    assert compiled._daceml_train.recursions["forward"].structures.programs.compiled == 1


@pytest.mark.compiled
def test_500_shapes_are_one_program() -> None:
    torch.manual_seed(0)
    model = Sum()
    twin, compiled, r = copy.deepcopy(model), dt.optimize(model), random.Random(0)
    for k in range(500):
        roots = [tree(r, r.randint(1, 20)) for _ in range(r.randint(1, 3))]
        result = compiled(roots)
        if k % 50 == 0:
            torch.testing.assert_close(result, twin(roots))
    programs = compiled._daceml_train.recursions["forward"].structures.programs
    assert programs.compiled <= 2 and len(programs.programs) == 1  # first batches may lack a kind


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Sum, Unmarked])
def test_a_cycle_names_its_path(kind: type[Sum]) -> None:
    compiled: Any = dt.optimize(kind())
    root = Node(0, Node(1), Node(0, Node(2), Node(3)))
    root.right.right = Node(0, root.right, Node(1))
    with pytest.raises(RecursionError) as error:
        compiled([Node(1), root])
    assert "a cycle: roots[1].right.right.left is roots[1].right again" in noted(error.value)
    assert compiled([Node(1)]).shape == (1, 4), "works after the error"


@pytest.mark.compiled
def test_a_cycle_of_modules_names_its_path() -> None:
    compiled: Any = dt.optimize(Module())
    assert compiled(chain([1, 2, 3])).shape == (1, 4)
    root = chain([1, 2, 3])
    root.left.right = root
    with pytest.raises(RecursionError) as error:
        compiled(root)
    assert "a cycle: node.left.right is node again" in noted(error.value)


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Sum, Unmarked])
def test_a_node_without_an_attribute_is_named(kind: type[Sum]) -> None:
    compiled: Any = dt.optimize(kind())
    root = Node(0, Node(0, Node(1), Node(2)), Node(3))
    del root.left.right.word
    root.left.right.__class__ = type("Other", (), {})
    with pytest.raises(AttributeError) as error:
        compiled([Node(4), root])
    assert noted(error.value).endswith("at roots[1].left.right")


class Wide(Sum):
    """Leaves of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(10, 5)

    @dt.recursive
    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        if node.left is None:
            return (self.words if node.word < 9 else self.wide)(torch.tensor([node.word]))
        left, right = self.visit(node.left), self.visit(node.right)
        return self.join(torch.cat([left, right], 1)).tanh()


class WideUnmarked(Wide):
    """The same, whose recursion has no name."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        if node.left is None:
            return (self.words if node.word < 9 else self.wide)(torch.tensor([node.word]))
        left, right = self.visit(node.left), self.visit(node.right)
        return self.join(torch.cat([left, right], 1)).tanh()


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Wide, WideUnmarked])
def test_children_of_different_widths_are_named(kind: type[Wide]) -> None:
    compiled: Any = dt.optimize(kind())
    good = Node(0, Node(1), Node(0, Node(2), Node(3)))
    assert compiled([good]).shape == (1, 4)
    with pytest.raises(RuntimeError, match="shapes") as error:
        compiled([good, Node(0, Node(1), Node(0, Node(2), Node(9)))])
    assert noted(error.value).endswith("at roots[1].right")


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Sum, Unmarked])
def test_an_empty_batch_is_named(kind: type[Sum]) -> None:
    compiled: Any = dt.optimize(kind())
    assert compiled([Node(1)]).shape == (1, 4)
    with pytest.raises(Exception, match="non-empty") as error:
        compiled([])
    assert "roots is empty" in noted(error.value)


class Growing(nn.Module):
    """A tree that grows by what the model says of each node, as in generation."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.split, self.score, self.join = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 1),
            nn.Linear(2 * width, width),
        )
        self.grown = 0

    @dt.recursive
    def grow(self, state: Tensor, depth: int) -> Tensor:
        """The state of a node, whose children depend on its score."""
        self.grown += 1
        if depth == 0 or self.score(state).item() < -0.2:
            return state.tanh()
        left, right = self.split(state).chunk(2, 1)
        below = [self.grow(left, depth - 1), self.grow(right, depth - 1)]
        return self.join(torch.cat(below, 1)).tanh()

    def forward(self, rows: Tensor) -> Tensor:
        """The states of roots."""
        return torch.cat([self.grow(row[None], 4) for row in rows])


@pytest.mark.compiled
def test_a_tree_that_grows_by_values_is_batched_between_looks() -> None:
    torch.manual_seed(1)
    model = Growing()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for seed in range(3):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        model.zero_grad(), twin.zero_grad()
        with pytest.warns(UserWarning, match="looks at values") if not seed else nullcontext():
            result = compiled(rows)
        expected = twin(rows)
        torch.testing.assert_close(result, expected)
        result.square().sum().backward(), expected.square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        assert model.grown == twin.grown and 4 * (seed + 1) < model.grown < 4 * 31 * (seed + 1)


@pytest.mark.compiled
def test_a_batch_without_inner_nodes_leaves_their_gradients_out() -> None:
    model = Sum()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for roots in ([Node(0, Node(1), Node(2))], [Node(1), Node(3)]):
        model.zero_grad(), twin.zero_grad()
        compiled(roots).sum().backward(), twin(roots).sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert model.join.weight.grad is None
