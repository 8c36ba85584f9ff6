"""Cells of levels as programs: what the executor gathers from states, and adds to them, without a launch for it.

Forward, a concatenation of children is an argument whose rows are gathered part by part, and a result that consists of
gathered rows is where they are gathered. In reverse, what is added to the cotangents of children is read where it lies:
a slice of a matmul's rows needs no copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from daceml_train.analysis.reachability import required
from daceml_train.graph.graph import Graph, Node
from daceml_train.lowering.program import Added, Gather
from daceml_train.ops.levels import ROWS, Levels
from daceml_train.ops.movement import Concat, Slice, View
from daceml_train.tensor import Tensor


@dataclass(frozen=True)
class CellProgram:
    """The graph that computes a cell, and what the executor does around it.

    Its arguments are the cell's rows, `gathers`, the rows of states in reverse, and what is shared. Its outputs are
    rows of states, or in reverse what `added` reads, and then the own results in `written`.
    """

    graph: Graph
    gathers: tuple[Gather, ...]
    added: tuple[Added, ...]
    written: tuple[int, ...]


def cell_program(op: Levels, kind: int, body: Graph) -> CellProgram:
    """The program of a cell; `body` has its arguments and results as `ops.levels` defines them."""
    first = len(op.placed(kind))
    return _reverse(op, kind, body, first) if op.reverse else _forward(op, kind, body, first)


# ---- forward --------------------------------------------------------------------------------------------------------
def _forward(op: Levels, kind: int, body: Graph, first: int) -> CellProgram:
    names = list(body.inputs)
    rows, count = len(op.rows[kind]), len(op.children[kind])
    children = names[rows : rows + count]
    arguments: list[tuple[str, tuple[int, ...]]] = [(name, (k,)) for k, name in enumerate(children)]
    nodes = list(body.nodes)
    for node in body.nodes:
        if _joins(body, node, children):
            parts = tuple(children.index(name) for name in node.inputs)
            at = next(i for i, (_, own) in enumerate(arguments) if own == (parts[0],))
            arguments[at] = (node.outputs[0], parts)
            arguments = [a for a in arguments if a[1] == parts or not set(a[1]) <= set(parts)]
            nodes.remove(node)
    outputs, own = list(body.outputs[:first]), list(body.outputs[first:])
    gathers, direct = [], set[int]()
    for name, parts in arguments:
        result = own.index(name) if name in own and len(outputs) + len(own) - len(direct) > 1 else -1
        direct |= {result} - {-1}
        gathers.append(Gather(parts, result))
    written = tuple(k for k in range(len(own)) if k not in direct)
    graph = Graph(body.name)
    for name in (*names[:rows], *(name for name, _ in arguments), *names[rows + count :]):
        graph.input(name, body.tensors[name])
    _fill(graph, nodes, [*outputs, *(own[k] for k in written)])
    return CellProgram(graph, tuple(gathers), (), written)


def _joins(body: Graph, node: Node, children: list[str]) -> bool:
    """Whether a node concatenates children that nothing else reads, so that a row of its result is one of each."""
    if not isinstance(node.op, Concat) or not set(node.inputs) <= set(children):
        return False
    others = [name for other in body.nodes if other is not node for name in other.inputs] + list(body.outputs)
    once = len(set(node.inputs)) == len(node.inputs) and set(node.inputs).isdisjoint(others)
    return once and all(_contiguous(body.tensors[name], node.op.dim) for name in node.inputs)


def _contiguous(t: Tensor, dim: int) -> bool:
    """Whether a slice of the rows of an array along a dimension is one stretch of each row."""
    inner = t.shape[1:]
    known = all(isinstance(size, int) for size in inner)
    return known and t.order is None and dim > 0 and math.prod(int(n) for n in t.shape[1:dim]) == 1


# ---- reverse --------------------------------------------------------------------------------------------------------
def _reverse(op: Levels, kind: int, body: Graph, first: int) -> CellProgram:
    producers = {name: node for node in body.nodes for name in node.outputs}
    bases: list[str] = []
    added = []
    for name in body.outputs[:first]:
        base, start = _base(body, producers, name)
        if base not in bases:
            bases.append(base)
        added.append(Added(bases.index(base), start))
    graph = Graph(body.name)
    for name in body.inputs:
        graph.input(name, body.tensors[name])
    own = body.outputs[first:]
    _fill(graph, body.nodes, [*bases, *own])
    return CellProgram(graph, (), tuple(added), tuple(range(len(own))))


def _base(body: Graph, producers: dict[str, Node], name: str) -> tuple[str, int]:
    """The array whose rows contain the rows of a value, and the element of them where these begin."""
    found, start, at = (name, 0), 0, name
    while (node := producers.get(at)) is not None and isinstance(node.op, View | Slice):
        source = body.tensors[node.inputs[0]]
        if source.shape[:1] != (ROWS,) or body.tensors[at].shape[:1] != (ROWS,) or source.order is not None:
            break
        if isinstance(node.op, Slice):
            if node.op.step != 1 or not isinstance(node.op.start, int) or not _contiguous(source, node.op.dim):
                break
            start += node.op.start * math.prod(int(n) for n in source.shape[node.op.dim + 1 :])
        elif not all(isinstance(n, int) for n in source.shape[1:]):
            break
        at = node.inputs[0]
        if at in producers:
            found = at, start
    return found


def _fill(graph: Graph, nodes: list[Node], outputs: list[str]) -> None:
    for node in required(nodes, outputs)[0]:
        graph.append(node.op, node.inputs, node.outputs)
    graph.outputs = outputs
