"""Recursive programs of many styles beside PyTorch: results, gradients, and what Python is left with."""

import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.forests import Forests

WIDTH = 6


class Node:
    """A node with any number of children, which are a property."""

    def __init__(self, word: int, *parts: "Node") -> None:
        self.word, self._parts, self.state = word, parts, None

    @property
    def parts(self) -> list["Node"]:
        """A new list each time."""
        return list(self._parts)


def tree(r: random.Random, size: int, most: int = 3) -> Node:
    """A random tree."""
    if size <= 1:
        return Node(r.randrange(10))
    count = r.randint(1, most)
    return Node(r.randrange(10), *(tree(r, (size - 1) // count, most) for _ in range(count)))


def trees(seed: int) -> list[Node]:
    """A few random trees."""
    r = random.Random(seed)
    return [tree(r, r.randint(1, 12)) for _ in range(3)]


class Program(nn.Module):
    """What all programs have."""

    data: Callable[[int], Any] = staticmethod(trees)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.join = nn.Embedding(10, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.visits = 0

    def leaf(self, node: Node) -> Tensor:
        """The embedding of a node."""
        return self.words(torch.tensor([node.word]))

    def both(self, x: Tensor, y: Tensor) -> Tensor:
        """A state from two."""
        return self.join(torch.cat([x, y], 1)).tanh()

    def forward(self, roots: Any) -> Tensor:
        """The states of roots."""
        return torch.cat([self.visit(root) for root in roots])

    def visit(self, node: Any) -> Tensor:
        """The state of a node."""
        raise NotImplementedError


class Generators(Program):
    """Children by a generator, and a sum of a generator."""

    def below(self, node: Node) -> Iterator[Node]:
        """The children."""
        yield from node.parts

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        total = sum((self.gate(self.visit(part)) for part in self.below(node)), torch.zeros(1, WIDTH))
        return self.both(self.leaf(node), total)


class Early(Program):
    """Early returns at several places."""

    @dt.recursive
    def visit(self, node: Node, depth: int = 0) -> Tensor:
        """The state of a node."""
        if depth > 3:
            return torch.zeros(1, WIDTH)
        if node.word == 3:
            return self.leaf(node)
        if not node.parts:
            return self.leaf(node).relu()
        first, *others = node.parts
        state = self.visit(first, depth + 1)
        for other in others:
            if other.word == 5:
                break
            state = self.both(state, self.visit(other, depth + 1))
        else:
            return state * 2
        return state


class Dicts(Program):
    """Dicts of children, with a module per name of an edge."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.ModuleDict({"left": nn.Linear(WIDTH, WIDTH), "right": nn.Linear(WIDTH, WIDTH, bias=False)})

    @staticmethod
    def data(seed: int) -> Any:
        """Nested dicts."""
        r = random.Random(seed)

        def some(depth: int) -> dict[str, Any]:
            names = [name for name in ("left", "right") if depth and r.random() < 0.8]
            return {"word": r.randrange(10), "parts": {name: some(depth - 1) for name in names}}

        return [some(4) for _ in range(3)]

    def visit(self, node: dict[str, Any]) -> Tensor:
        """The state of a node."""
        x = self.words(torch.tensor([node["word"]]))
        for name, part in node["parts"].items():
            x = x + self.edges[name](self.visit(part))
        return x.tanh()


class Memo(Program):
    """A memo table by identity, over a DAG."""

    @staticmethod
    def data(seed: int) -> Any:
        """DAGs."""
        r = random.Random(seed)
        nodes = [Node(r.randrange(10))]
        for _ in range(9):
            nodes.append(Node(r.randrange(10), *r.sample(nodes, min(len(nodes), 2))))
        return nodes[-2:]

    def forward(self, roots: Any) -> Tensor:
        """The states of roots."""
        memo: dict[int, Tensor] = {}
        return torch.cat([self.visit(root, memo) for root in roots])

    def visit(self, node: Node, memo: dict[int, Tensor] | None = None) -> Tensor:
        """The state of a node."""
        assert memo is not None
        try:
            return memo[id(node)]
        except KeyError:
            self.visits += 1
        states = [self.visit(part, memo) for part in node.parts]
        memo[id(node)] = self.both(self.leaf(node), torch.stack(states).sum(0)) if states else self.leaf(node)
        return memo[id(node)]


class Stack(Program):
    """A list that calls share and change."""

    def forward(self, roots: Any) -> Tensor:
        """All states, and the sum of those that stay on the stack."""
        stack: list[Tensor] = []
        everything: list[Tensor] = []
        for root in roots:
            self.visit(root, stack, everything)
        everything.reverse()
        return torch.cat([*everything, functools.reduce(torch.add, stack)])

    def visit(self, node: Node, stack: Any = None, everything: Any = None) -> Tensor:  # type: ignore[override]
        """Replaces the states of the children on the stack by that of the node."""
        for part in node.parts:
            self.visit(part, stack, everything)
        state = self.leaf(node)
        for _ in node.parts:
            state = self.both(state, stack.pop())
        stack.append(state)
        everything += [state]
        everything[-1] = everything[-1] * 2
        return state


class Keywords(Program):
    """Keyword-only arguments, options, and a mutable default."""

    def visit(self, node: Node, *marks: float, scale: float = 1.0, seen: list[int] = [], **options: Any) -> Tensor:  # noqa: B006
        """The state of a node."""
        seen.append(node.word)
        self.visits += len(seen) > 0
        x = self.leaf(node) * scale + sum(marks)
        for part in node.parts:
            x = self.both(x, self.visit(part, *marks, 0.5, scale=scale * 0.5, **options))
        return x if options.get("plain", True) else -x


class Closure(Program):
    """A local function with a counter of its caller's."""

    def forward(self, roots: Any) -> Tensor:
        """The states of roots."""
        count = 0

        def walk(node: Node) -> Tensor:
            nonlocal count
            count += 1
            states = [walk(part) for part in node.parts]
            x = self.leaf(node) + count
            return self.both(x, torch.cat(states).amax(0, keepdim=True)) if states else x

        result = torch.cat([walk(root) for root in roots])
        self.visits += count
        return result


class Static(Program):
    """Static and class methods."""

    @staticmethod
    def walk(model: "Static", node: Node) -> Tensor:
        """The state of a node."""
        x = model.leaf(node)
        for part in node.parts:
            x = model.both(x, Static.other(model, part))
        return x

    @classmethod
    def other(cls, model: "Static", node: Node) -> Tensor:
        """Minus the state of a node."""
        return -cls.walk(model, node)

    def forward(self, roots: Any) -> Tensor:
        """The states of roots."""
        return torch.cat([self.walk(self, root) for root in roots])


class UpAndDown(Program):
    """Two recursions: states of subtrees, then states of nodes from their parents'."""

    def forward(self, roots: Any) -> Tensor:
        """The last states of all nodes."""
        results: list[Tensor] = []
        for root in roots:
            self.up(root)
            self.down(root, torch.ones(1, WIDTH), results)
        return torch.cat(results)

    def up(self, node: Node) -> Tensor:
        """Leaves a state at each node."""
        node.state = self.leaf(node)
        for part in node.parts:
            node.state = self.both(node.state, self.up(part))
        return node.state

    def down(self, node: Node, above: Tensor, results: list[Tensor]) -> None:
        """The parent's state comes from above."""
        state = self.gate(above) * node.state
        results.append(state)
        for part in node.parts:
            self.down(part, state, results)


class Depths(Program):
    """A module of a list per depth."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH), nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU())])

    def forward(self, roots: Any) -> Tensor:
        """The states of roots."""
        return torch.cat([self.visit(root, 0) for root in roots])

    def visit(self, node: Node, depth: int = 0) -> Tensor:
        """The state of a node."""
        x = self.leaf(node)
        for part in node.parts:
            x = self.cells[depth % 2](torch.cat([x, self.visit(part, depth + 1)], 1))
        return x


class Lambda(Program):
    """A lambda that calls itself by way of its caller's name."""

    def forward(self, roots: Any) -> Tensor:
        """The states of roots."""
        walk: Any = lambda node: (  # noqa: E731
            self.both(self.leaf(node), sum(map(walk, node.parts))) if node.parts else self.leaf(node)
        )
        return torch.cat([walk(root) for root in roots])


class Arrays(Program):
    """Index arrays of NumPy."""

    @staticmethod
    def data(seed: int) -> Any:
        """Left and right children, or -1, and words."""
        r = np.random.default_rng(seed)
        size = int(r.integers(5, 12))
        left = np.array([-1, -1] + [int(r.integers(0, k)) for k in range(2, size)])
        right = np.array([-1, -1] + [int(r.integers(0, k)) for k in range(2, size)])
        return left, right, r.integers(0, 10, size)

    def forward(self, roots: Any) -> Tensor:
        """The state of the last node."""
        left, right, words = roots
        return self.walk(len(words) - 1, left, right, words)

    def walk(self, k: int, left: Any, right: Any, words: Any) -> Tensor:
        """The state of node k."""
        if left[k] < 0:
            return self.words(torch.tensor([words[k]]))
        return self.both(self.walk(left[k], left, right, words), self.walk(right[k], left, right, words))


class State(NamedTuple):
    """What a node has."""

    hidden: Tensor
    cell: Tensor


class Tuples(Program):
    """Named tuples and dicts of tensors as results."""

    def forward(self, roots: Any) -> Any:
        """Dicts of results."""
        found = [self.visit(root) for root in roots]
        return {"hidden": torch.cat([f["state"].hidden for f in found]), "cells": [f["state"].cell for f in found]}

    def visit(self, node: Node) -> Any:
        """The state of a node, and how many nodes there are."""
        below = [self.visit(part) for part in node.parts]
        x = self.leaf(node)
        cell = x
        for one in below:
            cell = cell + one["state"].cell * self.gate(one["state"].hidden).sigmoid()
        return {"state": State(cell.tanh() * x, cell), "count": 1 + sum(one["count"] for one in below)}


class Dropout(Program):
    """Dropout in a cell."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.leaf(node)
        for part in node.parts:
            x = self.both(F.dropout(x, 0.5, self.training), self.visit(part))
        return x


class Caught(Program):
    """Exceptions midway, which a caller handles."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        if node.word == 7:
            raise LookupError(node.word)
        x = self.leaf(node)
        for part in node.parts:
            try:
                x = self.both(x, self.visit(part))
            except LookupError:
                x = self.gate(x)
                self.visits += 1
        return x

    def forward(self, roots: Any) -> Tensor:
        """The states of roots that have one."""
        found = []
        for root in roots:
            try:
                found.append(self.visit(root))
            except LookupError as error:
                found.append(torch.full((1, WIDTH), float(error.args[0])))
        return torch.cat(found)


class Attention(Program):
    """Attention over any number of children."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.leaf(node)
        if not node.parts:
            return x
        rows = torch.cat([self.visit(part) for part in node.parts])
        scores = torch.softmax(x @ self.gate(rows).t(), 1)
        return self.both(x, scores @ rows)


class Values(Program):
    """A branch on a value."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.leaf(node)
        for part in node.parts:
            below = self.visit(part)
            x = self.both(x, below) if below.sum() > 0 else x - below
        return x


class InPlace(Program):
    """Tensors that are changed in place."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.leaf(node) * 1.5
        for part in node.parts:
            x += self.gate(self.visit(part))
            x[:, 0] = 0.25
            x.mul_(0.5)
        return x


class Constants(Program):
    """Parts without a gradient: constants, detached states, and a block without gradients."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        if not node.parts:
            return torch.full((1, WIDTH), float(node.word))
        x = self.leaf(node)
        for part in node.parts:
            below = self.visit(part)
            with torch.no_grad():
                norm = below.abs().sum(1, keepdim=True) + 1
            x = self.both(x, below / norm) + below.detach()
        return x


class Losses(Program):
    """Losses that are added up in the recursion."""

    def forward(self, roots: Any) -> Tensor:
        """The loss."""
        return torch.stack([self.visit(root)[1] for root in roots]).mean()

    def visit(self, node: Node) -> Any:
        """The state of a node, and the loss below it."""
        x = self.leaf(node)
        loss = torch.zeros(())
        for part in node.parts:
            below, more = self.visit(part)
            x, loss = self.both(x, below), loss + more
        return x, loss + F.cross_entropy(x, torch.tensor([node.word % WIDTH]))


class Types(Program):
    """Several element types, and shapes without a batch."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        hot = F.one_hot(torch.tensor(node.word % WIDTH), WIDTH)
        x = hot.float() + self.words.weight[node.word]
        for part in node.parts:
            below = self.visit(part)[0]
            x = torch.where(below > 0, x, below.double().exp().float()) + self.gate.weight @ below
        return x[None]


class Mapped(Program):
    """`map`, `zip`, partial functions."""

    def visit(self, node: Node, factor: float = 1.0) -> Tensor:
        """The state of a node."""
        again = functools.partial(self.visit, factor=factor / 2)
        states = list(map(again, node.parts))
        x = self.leaf(node) * factor
        for k, (state, part) in enumerate(zip(states, node.parts, strict=True)):
            x = self.both(x, state * (k + part.word))
        return x


class Effects(Program):
    """Effects on the model and on nodes; an attribute that changes from call to call."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        self.visits += 1
        x = self.leaf(node) * (1 + self.visits % 3)
        for part in node.parts:
            x = self.both(x, self.visit(part))
        node.state = x
        return x


class Reused(Program):
    """States that are used twice, or not at all."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.leaf(node)
        for k, part in enumerate(node.parts):
            below = self.visit(part)
            if k != 1:
                x = self.both(below, x) + (below * below).tanh()
        return x


PROGRAMS = [
    *(Generators, Early, Dicts, Memo, Stack, Keywords, Closure, Static, UpAndDown, Depths, Lambda, Arrays, Tuples),
    *(Dropout, Caught, Attention, Values, InPlace, Constants, Losses, Types, Mapped, Effects, Reused),
]


def leaves(found: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor)]


IN_PYTORCH = {Static: "not found by name", Lambda: "not found by name", InPlace: "PyTorch runs the forward pass"}
"""Programs of which no levels are compiled."""


def check(kind: type[Program]) -> Any:
    """Compare results, gradients, and counts with PyTorch's, batch by batch; returns the compiled model."""
    torch.manual_seed(0)
    model = kind()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for seed in range(4):
        model.zero_grad(set_to_none=True)
        twin.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        found = leaves(compiled(kind.data(seed)))
        torch.manual_seed(seed)
        expected = leaves(twin(kind.data(seed)))
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        if expected[0].requires_grad:
            for results in (found, expected):
                torch.autograd.backward(results, [torch.linspace(-1, 2, t.numel()).view(t.shape) for t in results])
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
        assert model.visits == twin.visits
    return compiled


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:daceml_train")
@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
def test_programs(kind: type[Program]) -> None:
    recursion = check(kind)._daceml_train.recursions.get("forward")
    programs = None if recursion is None else recursion.structures.programs
    compiled = programs is not None and programs.compiled > 0 and not programs.refused
    assert compiled == (kind not in IN_PYTORCH)


@pytest.mark.filterwarnings("ignore:daceml_train")
@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
def test_programs_whose_levels_pytorch_runs(kind: type[Program], monkeypatch: Any) -> None:
    monkeypatch.setattr(Forests, "run", lambda self, structures, runs: None)
    check(kind)


class Plain(Program):
    """A plain recursion."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.leaf(node)
        for part in node.parts:
            x = self.both(x, self.visit(part))
        node.state = x
        return x


class Inputs(Program):
    """Data with gradients of their own."""

    def forward(self, roots: Any) -> Tensor:
        """The states of roots, for rows of data."""
        nodes, rows = roots
        return torch.cat([self.walk(node, rows) for node in nodes])

    def walk(self, node: Node, rows: Tensor) -> Tensor:
        """The state of a node."""
        x = rows[node.word : node.word + 1] * rows[0]
        for part in node.parts:
            x = self.both(x, self.walk(part, rows))
        return x


def pair(kind: type[Program]) -> tuple[Any, Any]:
    """A compiled model that has run once, and its twin."""
    torch.manual_seed(0)
    model = kind()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    return compiled, twin


def same_gradients(compiled: Any, twin: Any) -> None:
    """Compare gradients of all parameters."""
    for p, q in zip(compiled.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.compiled
def test_without_gradients_and_in_evaluation_mode() -> None:
    compiled, twin = pair(Plain)
    for around in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
        with around():
            found, expected = compiled(trees(1)), twin(trees(1))
        torch.testing.assert_close(found, expected)
        assert (found.requires_grad, found.is_inference()) == (expected.requires_grad, expected.is_inference())
    compiled.eval(), twin.eval()
    torch.testing.assert_close(compiled(trees(2)), twin(trees(2)))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:daceml_train")
def test_autocast() -> None:
    compiled, twin = pair(Plain)
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found, expected = compiled(trees(3)), twin(trees(3))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
        compiled.zero_grad(), twin.zero_grad()
        found.float().square().sum().backward(), expected.float().square().sum().backward()
        same_gradients(compiled, twin)


@pytest.mark.compiled
def test_a_second_derivative_is_refused() -> None:
    compiled, _ = pair(Plain)
    (gradient,) = torch.autograd.grad(
        compiled(trees(3)).square().sum(), [compiled.gate.weight, compiled.join.weight][1:], create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiat|grad"):
        gradient.square().sum().backward()


@pytest.mark.compiled
def test_two_backward_passes_and_states_that_nodes_keep() -> None:
    compiled, twin = pair(Plain)
    ours, theirs = trees(4), trees(4)
    found, expected = compiled(ours), twin(theirs)
    found.sum().backward(retain_graph=True), expected.sum().backward(retain_graph=True)
    found.square().sum().backward(), expected.square().sum().backward()
    same_gradients(compiled, twin)
    with pytest.raises(RuntimeError, match="second|freed"):
        found.sum().backward()
    found, expected = compiled(ours), twin(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert isinstance(a.state, Tensor)
        torch.testing.assert_close(a.state * 2, b.state * 2)
    compiled.zero_grad(), twin.zero_grad()
    torch.cat([node.state for node in ours]).exp().sum().backward()
    torch.cat([node.state for node in theirs]).exp().sum().backward()
    same_gradients(compiled, twin)


@pytest.mark.compiled
def test_gradients_of_data() -> None:
    compiled, twin = pair(Inputs)
    for seed in range(3):
        rows = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(seed))
        ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
        compiled.zero_grad(), twin.zero_grad()
        compiled((trees(seed), ours)).square().sum().backward()
        twin((trees(seed), theirs)).square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
        same_gradients(compiled, twin)


@pytest.mark.compiled
def test_a_model_that_changes_between_calls() -> None:
    compiled, twin = pair(Plain)
    counts = {"ours": 0, "theirs": 0}

    def counted(name: str) -> Any:
        def hook(module: Any, given: Any, result: Tensor) -> Tensor:
            counts[name] += 1
            return result * 0.5

        return hook

    def compare(seed: int) -> None:
        compiled.zero_grad(), twin.zero_grad()
        found, expected = compiled(trees(seed)), twin(trees(seed))
        torch.testing.assert_close(found, expected)
        if expected.requires_grad:
            found.sum().backward(), expected.sum().backward()
        same_gradients(compiled, twin)

    compare(1)
    for model in (compiled, twin):
        with torch.no_grad():
            model.join.weight.mul_(0.5)
    compare(2)
    for model in (compiled, twin):
        model.words.requires_grad_(False)
    compare(3)
    for model in (compiled, twin):
        model.words.requires_grad_(True)
        model.join = copy.deepcopy(twin.join).requires_grad_()
        model.join.bias = None
    compare(4)
    hooks = [compiled.join.register_forward_hook(counted("ours")), twin.join.register_forward_hook(counted("theirs"))]
    compare(5)
    assert counts["ours"] == counts["theirs"] > 0
    for hook in hooks:
        hook.remove()
    compare(6)
