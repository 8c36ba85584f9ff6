"""Recursive networks as users write them, and the data that they call themselves over."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt

WORDS, CLASSES = 2000, 5
State = tuple[Tensor, Tensor]


@dataclass(eq=False)
class Node:
    """A node of a tree or a DAG."""

    word: int
    label: int
    children: list[Node] = field(default_factory=list)


def tree(r: random.Random, leaves: int) -> Node:
    """A random binary tree."""
    if leaves == 1:
        return Node(r.randrange(WORDS), r.randrange(CLASSES))
    left = r.randint(1, leaves - 1)
    return Node(0, r.randrange(CLASSES), [tree(r, left), tree(r, leaves - left)])


def trees(seed: int, count: int = 25) -> list[Node]:
    """Trees of 5 to 50 leaves."""
    r = random.Random(seed)
    return [tree(r, r.randint(5, 50)) for _ in range(count)]


def dags(seed: int, count: int = 10) -> list[Node]:
    """The last nodes of DAGs of 20 to 60 nodes, which have up to four neighbors among earlier ones."""
    r = random.Random(seed)
    roots = []
    for _ in range(count):
        results: list[Node] = []
        for _ in range(r.randint(20, 60)):
            below = r.sample(results, min(len(results), r.randrange(5)))
            results.append(Node(r.randrange(WORDS), r.randrange(CLASSES), below))
        roots.append(Node(0, r.randrange(CLASSES), results[-4:]))
    return roots


class TreeLSTM(nn.Module):
    """A binary TreeLSTM with a label at each node."""

    data = staticmethod(trees)

    def __init__(self, width: int = 300) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, width), nn.Linear(width, CLASSES)
        self.leaf, self.inner = nn.Linear(width, 3 * width), nn.Linear(2 * width, 5 * width)

    def leaves(self, x: Tensor) -> State:
        """The states of leaves."""
        i, o, u = self.leaf(x).chunk(3, -1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c

    def inners(self, x: Tensor, cl: Tensor, cr: Tensor) -> State:
        """The states of inner nodes."""
        i, fl, fr, o, u = self.inner(x).chunk(5, -1)
        c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c

    @dt.recursive
    def visit(self, t: Node, out: list[Any]) -> State:
        """The state of a node."""
        if not t.children:
            h, c = self.leaves(self.words(torch.tensor([t.word])))
        else:
            (hl, cl), (hr, cr) = self.visit(t.children[0], out), self.visit(t.children[1], out)
            h, c = self.inners(torch.cat([hl, hr], 1), cl, cr)
        out.append((h, t.label))
        return h, c

    def forward(self, roots: list[Node]) -> Tensor:
        """The loss at all nodes."""
        out: list[Any] = []
        for t in roots:
            self.visit(t, out)
        return F.cross_entropy(self.out(torch.cat([h for h, _ in out])), torch.tensor([label for _, label in out]))


class Unchanged(TreeLSTM):
    """The same, whose recursion has no name."""

    def visit(self, t: Node, out: list[Any]) -> State:
        """The state of a node."""
        if not t.children:
            h, c = self.leaves(self.words(torch.tensor([t.word])))
        else:
            (hl, cl), (hr, cr) = self.visit(t.children[0], out), self.visit(t.children[1], out)
            h, c = self.inners(torch.cat([hl, hr], 1), cl, cr)
        out.append((h, t.label))
        return h, c


class Dags(nn.Module):
    """A child-sum network over DAGs with any number of neighbors, each node once."""

    data = staticmethod(dags)

    def __init__(self, width: int = 200) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, width), nn.Linear(width, CLASSES)
        self.node, self.gate = nn.Linear(2 * width, width), nn.Linear(width, width)

    @dt.recursive
    def visit(self, t: Node, memo: dict[int, Tensor]) -> Tensor:
        """The state of a node."""
        if id(t) not in memo:
            x = self.words(torch.tensor([t.word]))
            total = torch.zeros_like(x)
            for child in t.children:
                below = self.visit(child, memo)
                total = total + self.gate(below).sigmoid() * below
            memo[id(t)] = self.node(torch.cat([x, total], 1)).tanh()
        return memo[id(t)]

    def forward(self, roots: list[Node]) -> Tensor:
        """The loss at the roots."""
        memo: dict[int, Tensor] = {}
        return F.cross_entropy(
            self.out(torch.cat([self.visit(t, memo) for t in roots])), torch.tensor([t.label for t in roots])
        )


class RNTN(nn.Module):
    """A recursive neural tensor network."""

    data = staticmethod(trees)

    def __init__(self, width: int = 30) -> None:
        super().__init__()
        self.width = width
        self.words, self.out = nn.Embedding(WORDS, width), nn.Linear(width, CLASSES)
        self.linear = nn.Linear(2 * width, width)
        self.tensor = nn.Parameter(torch.randn(2 * width, 2 * width * width) * 0.01)

    @dt.recursive
    def visit(self, t: Node) -> Tensor:
        """The state of a node."""
        if not t.children:
            return self.words(torch.tensor([t.word])).tanh()
        x = torch.cat([self.visit(child) for child in t.children], 1)
        bilinear = (x @ self.tensor).view(self.width, 2 * self.width) @ x[0]
        return (self.linear(x) + bilinear).tanh()

    def forward(self, roots: list[Node]) -> Tensor:
        """The loss at the roots."""
        h = torch.cat([self.visit(t) for t in roots])
        return F.cross_entropy(self.out(h), torch.tensor([t.label for t in roots]))


class Mutual(nn.Module):
    """Two functions that call each other: sums of terms, and terms that are words or sums."""

    data = staticmethod(trees)

    def __init__(self, width: int = 200) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, width), nn.Linear(width, CLASSES)
        self.add, self.mul = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    @dt.recursive
    def sum(self, t: Node) -> Tensor:
        """The state of a sum."""
        if not t.children:
            return self.words(torch.tensor([t.word]))
        return self.add(torch.cat([self.term(child) for child in t.children], 1)).tanh()

    @dt.recursive
    def term(self, t: Node) -> Tensor:
        """The state of a term."""
        if not t.children:
            return self.words(torch.tensor([t.word])).relu()
        return self.mul(torch.cat([self.sum(child) for child in t.children], 1)).sigmoid()

    def forward(self, roots: list[Node]) -> Tensor:
        """The loss at the roots."""
        h = torch.cat([self.sum(t) for t in roots])
        return F.cross_entropy(self.out(h), torch.tensor([t.label for t in roots]))


class Sums(nn.Module):
    """A narrow network over binary trees; a word of -1 is wider than others."""

    def __init__(self, width: int = 30) -> None:
        super().__init__()
        self.words, self.join = nn.Embedding(WORDS, width), nn.Linear(2 * width, width)
        self.wide = nn.Linear(width, width + 1)

    @dt.recursive
    def visit(self, t: Node) -> Tensor:
        """The state of a node."""
        if not t.children:
            if t.word < 0:
                return self.wide(self.words(torch.tensor([0])))
            return self.words(torch.tensor([t.word]))
        left, right = self.visit(t.children[0]), self.visit(t.children[1])
        return self.join(torch.cat([left, right], 1)).tanh()

    def forward(self, roots: list[Node]) -> Tensor:
        """The states of roots."""
        return torch.cat([self.visit(t) for t in roots])


class Sequential(Sums):
    """The same for lists as trees, in a loop."""

    def forward(self, words: list[int]) -> Tensor:  # type: ignore[override]
        """The state of the root."""
        rows = self.words(torch.tensor(words)).unbind()
        state = rows[0][None]
        for row in rows[1:]:
            state = self.join(torch.cat([state, row[None]], 1)).tanh()
        return state
