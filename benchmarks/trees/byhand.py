"""Level batching by hand in PyTorch, as libraries for graphs do it, and the matmuls alone: for the TreeLSTM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.trees.networks import Node, TreeLSTM


@dataclass
class Linear:
    """Nodes by height, children before parents."""

    words: Tensor
    labels: Tensor
    left: Tensor
    right: Tensor
    bounds: list[int]


def linearized(roots: Sequence[Node]) -> Linear:
    """The nodes of trees in the order of levels."""
    levels: list[list[Node]] = []

    def height(t: Node) -> int:
        h = 1 + max(map(height, t.children)) if t.children else 0
        while len(levels) <= h:
            levels.append([])
        levels[h].append(t)
        return h

    for root in roots:
        height(root)
    number = {id(t): k for k, t in enumerate(t for level in levels for t in level)}
    bounds = [0]
    for level in levels:
        bounds.append(bounds[-1] + len(level))
    inner = [t for level in levels[1:] for t in level]
    left, right = (torch.tensor([number[id(t.children[side])] for t in inner]) for side in (0, 1))
    words = torch.tensor([t.word for t in levels[0]])
    return Linear(words, torch.tensor([t.label for level in levels for t in level]), left, right, bounds)


def by_lists(net: TreeLSTM, data: Linear) -> Tensor:
    """Levels' states in lists, which are concatenated where children are gathered."""
    h, c = net.leaves(net.words(data.words))
    hs, cs, first = [h], [c], data.bounds[1]
    for a, b in zip(data.bounds[1:-1], data.bounds[2:], strict=True):
        left, right = data.left[a - first : b - first], data.right[a - first : b - first]
        states, cells = torch.cat(hs), torch.cat(cs)
        h, c = net.inners(torch.cat([states[left], states[right]], 1), cells[left], cells[right])
        hs.append(h)
        cs.append(c)
    return F.cross_entropy(net.out(torch.cat(hs)), data.labels)


def by_copies(net: TreeLSTM, data: Linear) -> Tensor:
    """Levels' states copied into one buffer, as DGL does."""
    h, c = net.leaves(net.words(data.words))
    first, width = data.bounds[1], h.shape[1]
    states, cells = h.new_zeros(data.bounds[-1], width), h.new_zeros(data.bounds[-1], width)
    at = torch.arange(first)
    states, cells = states.index_copy(0, at, h), cells.index_copy(0, at, c)
    for a, b in zip(data.bounds[1:-1], data.bounds[2:], strict=True):
        left, right = data.left[a - first : b - first], data.right[a - first : b - first]
        h, c = net.inners(torch.cat([states[left], states[right]], 1), cells[left], cells[right])
        at = torch.arange(a, b)
        states, cells = states.index_copy(0, at, h), cells.index_copy(0, at, c)
    return F.cross_entropy(net.out(states), data.labels)


def matmuls(net: TreeLSTM, data: Linear, by_level: bool = False) -> Callable[[], Any]:
    """The six large matmuls alone, each on all nodes at once.

    With `by_level`, the two that levels wait for, states and their gradients of inner nodes, are a matmul per level.
    """
    width = net.out.in_features
    x, z = torch.randn(len(data.words), width), torch.randn(len(data.left), 2 * width)
    w, u = net.leaf.weight.detach().T.contiguous(), net.inner.weight.detach().T.contiguous()
    gx, gz = torch.randn(len(x), 3 * width), torch.randn(len(z), 5 * width)
    sizes = [b - a for a, b in zip(data.bounds[1:-1], data.bounds[2:], strict=True)] if by_level else [len(z)]

    def run() -> Any:
        with torch.no_grad():
            states = [rows @ u for rows in z.split(sizes)]
            gradients = [rows @ u.T for rows in gz.split(sizes)[::-1]]
            return x @ w, states, gx @ w.T, gradients, x.T @ gx, z.T @ gz

    return run
