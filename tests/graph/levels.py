"""Graphs of recursions that several tests use, the structure of trees and DAGs as data, and the same in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse

TREE = """
graph tree(bounds: i64[levels, 2] input, x: f32[leaves, 3] input, left: i64[inner] input, right: i64[inner] input,
    w: f32[3, 4] parameter, u: f32[8, 4] parameter, b: f32[4] parameter) {
  %h = levels(%bounds, %x, %w, %left, %right, %u, %b, cells=[body(x, w) {
    %m = matmul(%x, %w)
    %h = tanh(%m)
    yield %h
  }, body(a, b, u, bias) {
    %c = concat(%a, %b, dim=1)
    %m = matmul(%c, %u)
    %s = add(%m, %bias)
    %h = tanh(%s)
    yield %h
  }], types=(f32[4],), counts=(leaves, inner), rows=((1,), ()), children=((), ((0, 3), (0, 4))),
  shared=((2,), (5, 6)), states=((0,), (0,)))
  return %h
}
"""
"""A recursive network over binary trees: kind 0 is a leaf, kind 1 an inner node."""
CHILD_SUM = """
graph child_sum(bounds: i64[levels, 3] input, x: f32[leaves, 3] input, only: i64[ones] input, a: i64[twos] input,
    b: i64[twos] input, w: f32[3, 8] parameter, u: f32[4, 8] parameter, f: f32[4, 4] parameter) {
  %h, %c, %seen = levels(%bounds, %x, %w, %only, %a, %b, %u, %f, cells=[body(x, w) {
    %m = matmul(%x, %w)
    %i = slice(%m, dim=1, start=0, stop=4)
    %o = slice(%m, dim=1, start=4, stop=8)
    %c = tanh(%i)
    %s = sigmoid(%o)
    %t = tanh(%c)
    %h = mul(%s, %t)
    yield %h, %c
  }, body(h0, c0, u, f) {
    %m = matmul(%h0, %u)
    %i = slice(%m, dim=1, start=0, stop=4)
    %o = slice(%m, dim=1, start=4, stop=8)
    %g = matmul(%h0, %f)
    %gate = sigmoid(%g)
    %kept = mul(%gate, %c0)
    %n = tanh(%i)
    %c = add(%n, %kept)
    %s = sigmoid(%o)
    %t = tanh(%c)
    %h = mul(%s, %t)
    yield %h, %c
  }, body(h0, h1, c0, c1, u, f) {
    %sum = add(%h0, %h1)
    %m = matmul(%sum, %u)
    %i = slice(%m, dim=1, start=0, stop=4)
    %o = slice(%m, dim=1, start=4, stop=8)
    %g0 = matmul(%h0, %f)
    %g1 = matmul(%h1, %f)
    %gate0 = sigmoid(%g0)
    %gate1 = sigmoid(%g1)
    %kept0 = mul(%gate0, %c0)
    %kept1 = mul(%gate1, %c1)
    %kept = add(%kept0, %kept1)
    %n = tanh(%i)
    %c = add(%n, %kept)
    %s = sigmoid(%o)
    %t = tanh(%c)
    %h = mul(%s, %t)
    yield %h, %c, %gate0
  }], types=(f32[4], f32[4]), counts=(leaves, ones, twos), rows=((1,), (), ()),
  children=((), ((0, 3), (1, 3)), ((0, 4), (0, 5), (1, 4), (1, 5))), shared=((2,), (6, 7), (6, 7)),
  states=((0, 1), (0, 1), (0, 1)))
  return %h, %c, %seen
}
"""
"""A child-sum TreeLSTM over DAGs of nodes with none, one or two children; the last kind has a result of its own."""


def tree() -> Graph:
    """A network over binary trees."""
    return parse(TREE)


def child_sum() -> Graph:
    """A TreeLSTM over DAGs."""
    return parse(CHILD_SUM)


@dataclass
class Node:
    """A node of a tree or DAG: its children, its kind, and the number of its call among those of its kind."""

    children: tuple[Node, ...] = ()
    level: int = 0
    kind: int = 0
    call: int = 0


@dataclass
class Forest:
    """Nodes by kind, in the order of levels, and the structure as `levels` takes it."""

    kinds: list[list[Node]]
    bounds: np.ndarray[Any, Any]
    counts: list[int]
    starts: list[int] = field(default_factory=list)

    def row(self, node: Node) -> int:
        """The row of a node in the states."""
        return self.starts[node.kind] + node.call

    def children(self, kind: int, position: int) -> np.ndarray[Any, Any]:
        """The rows of the children in one position of all nodes of a kind, with one unused row if there are none."""
        rows = [self.row(node.children[position]) for node in self.kinds[kind]]
        return np.array(rows + [0] * (self.counts[kind] - len(rows)), dtype=np.int64)


ARITIES = {"tree": (0, 2), "child_sum": (0, 1, 2)}
"""The number of children of each kind."""


def forest(name: str, roots: Sequence[Node]) -> Forest:
    """The structure of the nodes below `roots`, each once; kinds without nodes have one unused row."""
    kinds = len(ARITIES[name])
    order: dict[int, Node] = {}
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, done = stack.pop()
            if id(node) in order:
                continue
            if done:
                node.level = max((child.level + 1 for child in node.children), default=0)
                order[id(node)] = node
            else:
                stack += [(node, True), *((child, False) for child in node.children)]
    by_kind: list[list[Node]] = [[] for _ in range(kinds)]
    for node in sorted(order.values(), key=lambda n: n.level):
        node.kind = ARITIES[name].index(len(node.children))
        node.call = len(by_kind[node.kind])
        by_kind[node.kind].append(node)
    last = max((node.level for node in order.values()), default=-1)
    heights = [[node.level for node in nodes] for nodes in by_kind]  # which ascend
    bounds = np.stack([np.searchsorted(h, np.arange(last + 2)) for h in heights], axis=1).astype(np.int64)
    counts = [max(1, len(nodes)) for nodes in by_kind]
    return Forest(by_kind, bounds, counts, [sum(counts[:k]) for k in range(kinds)])


def random_tree(rng: np.random.Generator, leaves: int) -> Node:
    """A random binary tree."""
    if leaves == 1:
        return Node()
    left = int(rng.integers(1, leaves))
    return Node((random_tree(rng, left), random_tree(rng, leaves - left)))


def chain(length: int) -> Node:
    """A list as a tree: the left child of each inner node is a leaf."""
    node = Node()
    for _ in range(length):
        node = Node((Node(), node))
    return node


def random_dag(rng: np.random.Generator, count: int, kinds: int = 3) -> list[Node]:
    """Nodes with fewer than `kinds` children, each among earlier nodes, which several may share."""
    nodes = [Node()]
    for _ in range(count - 1):
        nodes.append(Node(tuple(nodes[int(i)] for i in rng.integers(len(nodes), size=int(rng.integers(kinds))))))
    return nodes


def inputs(name: str, result: Forest, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of the graph `tree` or `child_sum` for a forest."""
    normal = rng.normal
    leaves = {"bounds": result.bounds, "x": normal(size=(result.counts[0], 3))}
    if name == "tree":
        structure = {"left": result.children(1, 0), "right": result.children(1, 1)}
        return {**leaves, **structure, "w": normal(size=(3, 4)), "u": normal(size=(8, 4)), "b": normal(size=4)}
    structure = {"only": result.children(1, 0), "a": result.children(2, 0), "b": result.children(2, 1)}
    return {**leaves, **structure, "w": normal(size=(3, 8)), "u": normal(size=(4, 8)), "f": normal(size=(4, 4))}


def eager(name: str, result: Forest, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results of the graph `tree` or `child_sum`, by recursion over nodes in PyTorch."""
    done: dict[int, list[torch.Tensor]] = {}
    order = sorted((node for nodes in result.kinds for node in nodes), key=lambda node: node.level)
    width = {"tree": (1, 0), "child_sum": (2, 1)}[name]
    states = [[given["x"].new_zeros(4)] * sum(result.counts) for _ in range(width[0])]
    own = [[given["x"].new_zeros(4)] * result.counts[-1] for _ in range(width[1])]
    for node in order:
        below = [done[id(child)] for child in node.children]
        values = (_tree if name == "tree" else _child_sum)(node, below, given)
        done[id(node)] = values
        for state, value in zip(states, values, strict=False):
            state[result.row(node)] = value
        for stack, value in zip(own, values[width[0] :], strict=False):
            stack[node.call] = value
    return [torch.stack(rows) for rows in (*states, *own)]


def _tree(node: Node, below: list[list[torch.Tensor]], given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    if not below:
        return [torch.tanh(given["x"][node.call] @ given["w"])]
    return [torch.tanh(torch.cat([h for (h,) in below]) @ given["u"] + given["b"])]


def _child_sum(node: Node, below: list[list[torch.Tensor]], given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    if not below:
        i, o = (given["x"][node.call] @ given["w"]).chunk(2)
        c = torch.tanh(i)
        return [o.sigmoid() * c.tanh(), c]
    i, o = (sum(v[0] for v in below) @ given["u"]).chunk(2)  # type: ignore[operator]
    gates = [(v[0] @ given["f"]).sigmoid() for v in below]
    c = torch.tanh(i) + sum(gate * v[1] for gate, v in zip(gates, below, strict=True))
    return [o.sigmoid() * c.tanh(), c, *gates[:1][: len(below) - 1]]
