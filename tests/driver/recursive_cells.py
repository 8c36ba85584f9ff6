"""Recursive programs: what they compute at a node, and what data are."""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.driver.recursive_programs import WIDTH, Node, Program


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


class Recurrent(Program):
    """Cells of recurrent networks, a batch norm in evaluation mode, NumPy's numbers, and what a loop carries along."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH, bias=False)
        self.plain, self.norm = nn.RNNCell(WIDTH, WIDTH, nonlinearity="relu"), nn.BatchNorm1d(WIDTH).eval()
        nn.init.uniform_(self.norm.running_var, 0.5, 1)

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.norm(self.leaf(node))
        before = x[:, 1:]
        for part in node.parts:
            below = self.visit(part)
            x = x + before.mean()
            before = self.plain(below)  # read by the next child alone
            x, cell = self.lstm(below, (x, before.detach()))
            x = np.float64(node.word / 10) * self.gru(below, x + cell)
        return x


class Averaged(Program):
    """A buffer, and an attribute, that are assigned in the recursion."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(1, WIDTH))
        self.last: Any = None

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.leaf(node) + self.average
        for part in node.parts:
            x = self.both(x, self.visit(part))
        self.average = 0.9 * self.average + 0.1 * x.detach()
        x = x if self.last is None else x + self.last
        self.last = x.detach()
        return x


class Handled(Program):
    """Errors of values that the recursion handles where they are raised."""

    def embedded(self, word: int) -> Tensor:
        """A row of the table, or another one."""
        try:
            return self.words(torch.tensor([word + 3]))
        except IndexError:
            self.visits += 1
            return self.gate.bias[None]

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.embedded(node.word)
        for part in node.parts:
            x = self.both(x, self.visit(part))
        return x


class Viewed(Program):
    """Views of values that are changed in place after a look, and what was computed with them before."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.leaf(node)
        for part in node.parts:
            below = self.visit(part)
            view, sums = below.view(-1)[1:3], x.detach()[:, :1]
            self.visits += bool(below.sum() > 0)
            below.mul_(0.5)
            x = self.both(x, below) + view.sum()
            self.visits += bool(sums.sum() > 0)
            kept = sums * 2
            sums += 1
            x = x + kept + sums
        return x * 0.9


class Made(Program):
    """Layers that are made when a node needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(WIDTH, WIDTH)})

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.leaf(node)
        for part in node.parts:
            name = str(part.word % 3)
            if name not in self.layers:
                self.layers[name] = nn.Linear(WIDTH, WIDTH)
            x = x + self.layers[name](self.visit(part))
        return x
