"""Bucket: gradients side by side in one message."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from daceml_train.analysis.links import Link
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.collective import AllGather, AllReduce, Collective, OwnShards, ReduceScatter
from daceml_train.ops.operator import Value
from daceml_train.tensor import product
from daceml_train.transformations.distribution.messages import (
    DistributionPass,
    Names,
    deferred,
    depths,
    joined,
    merged,
)

BUCKET = 25 << 20
"""Bytes after which a bucket is full, as in PyTorch: collectives start before the backward pass ends, and the memory
of a bucket is free for the next one.
"""


@dataclass(frozen=True)
class Bucket(DistributionPass):
    """Send sums of one element type in one message, in the order in which the backward pass computes them.

        g -> [all_reduce] -> a,  h -> [all_reduce] -> b     =>     g, h -> [concat] -> [all_reduce] -> [slice] a, b

    A bucket has at most `size` bytes, or a single sum. With a `bandwidth` in bytes per second and the latency `alpha`
    in seconds, it is the smallest one of which latency takes at most a tenth of the time; with `parts`, so many
    messages of equal size are sent. The bytes that are sent stay the same.
    """

    size: int = BUCKET
    alpha: float = 0.0
    bandwidth: float = 0.0
    parts: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.alpha < 0 or self.bandwidth < 0 or self.parts < 0:
            raise Invalid(f"bucket has a positive size, and no option below 0, given {self}")

    def limit(self, ranks: int, total: int) -> int:
        """The most bytes of a bucket, of `total` bytes that are sent in buckets."""
        if self.parts:
            return max(1, math.ceil(total / self.parts))
        return Link(self.alpha, self.bandwidth).bucket(ranks) if self.bandwidth else self.size

    def run(self, graph: Graph) -> Graph:
        groups = list(self._groups(graph))
        return merged(graph, groups, _emit) if any(len(group) > 1 for group in groups) else graph

    def _groups(self, graph: Graph) -> Iterator[list[Node]]:
        """The nodes of each bucket. None of them needs the result of another one."""
        nodes = deferred(graph)
        own = [(node, node.op) for node in graph.nodes if isinstance(node.op, OwnShards)]
        depth = depths(graph, [node for node, _ in (*nodes, *own)])
        bytes_of = {id(node): sum(int(graph.tensors[name].bytes) for name in node.inputs) for node, _ in (*nodes, *own)}
        sums = [node for node, op in nodes if isinstance(op, AllReduce | ReduceScatter)]
        limit = self.limit(nodes[0][1].ranks, sum(bytes_of[id(node)] for node in sums)) if nodes else 0
        filling: dict[tuple[object, ...], list[Node]] = {}
        filled: dict[tuple[object, ...], int] = {}
        for node, op in (*nodes, *own):
            key = (op.name, op.ranks, graph.tensors[node.inputs[0]].dtype, depth[id(node)])
            size = bytes_of[id(node)] if not isinstance(op, OwnShards) else 0
            bucket = filling.setdefault(key, [])
            if bucket and filled[key] + size > limit:
                yield bucket
                bucket = filling[key] = []
                filled[key] = 0
            filled[key] = filled.get(key, 0) + size
            bucket.append(node)
        yield from filling.values()


def _emit(graph: Graph, nodes: Sequence[Node], names: Names) -> list[Value]:
    operands = [[graph.value(names.get(name, name)) for name in node.inputs] for node in nodes]
    if len(nodes) == 1:
        return list(graph.emit(nodes[0].op, *operands[0]))
    ops = [node.op for node in nodes if isinstance(node.op, Collective)]
    first = min(ops, key=lambda op: op.position)
    if isinstance(first, AllReduce | ReduceScatter | AllGather):
        first = replace(first, of=f"{first.of} and {len(nodes) - 1} more")
    match first:
        case OwnShards():
            (whole,) = graph.emit(first, *(x for of_node in operands for x in of_node))
            sizes = [int(op.infer(*(x.tensor for x in xs))[0].size) for op, xs in zip(ops, operands, strict=True)]
            return [part.view((size,)) for part, size in zip(_cut(whole, sizes, 0), sizes, strict=True)]
        case AllReduce():
            sums = [x for (x,) in operands]
            sizes = [int(product(x.shape)) for x in sums]
            whole = joined([x.view((size,)) for x, size in zip(sums, sizes, strict=True)], 0).apply(first)
            return [part.view(x.shape) for part, x in zip(_cut(whole, sizes, 0), sums, strict=True)]
        case ReduceScatter():
            ranks, sums = first.ranks, [x for (x,) in operands]
            sizes = [int(product(x.shape)) // ranks for x in sums]
            whole = joined([x.view((ranks, size)) for x, size in zip(sums, sizes, strict=True)], 1).apply(first)
            shapes = [(x.shape[0] // ranks, *x.shape[1:]) for x in sums]
            return [part.view(shape) for part, shape in zip(_cut(whole, sizes, 1), shapes, strict=True)]
        case _:
            ranks, parts = first.ranks, [x for (x,) in operands]
            sizes = [int(product(x.shape)) for x in parts]
            whole = joined([x.view((size,)) for x, size in zip(parts, sizes, strict=True)], 0).apply(first)
            whole = whole.view((ranks, sum(sizes)))
            shapes = [(ranks * x.shape[0], *x.shape[1:]) for x in parts]
            return [part.view(shape) for part, shape in zip(_cut(whole, sizes, 1), shapes, strict=True)]


def _cut(whole: Value, sizes: Sequence[int], dim: int) -> list[Value]:
    """Pieces of these sizes along a dimension."""
    found, start = [], 0
    for size in sizes:
        found.append(whole.slice(dim, start, start + size))
        start += size
    return found


__all__ = ["BUCKET", "Bucket"]
