"""Recursive programs: how they reach their children, and what they keep on the way."""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import daceml_train as dt

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
