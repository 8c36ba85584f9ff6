"""Data parallelism in the graph of a step: means of gradients over the processes that train together.

Gradients are laid side by side in buckets, in the order in which the backward pass produces them, so that a step costs
few messages; the division by the number of processes is a factor that fuses with what reads a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from daceml_train.graph.graph import Graph
from daceml_train.ops.collective import AllReduce
from daceml_train.ops.operator import Value, make

BUCKET = 25 << 20
"""Bytes after which a bucket is full, as in PyTorch: collectives start before the backward pass ends, and the memory
of a bucket is free for the next one.
"""


def means(graph: Graph, values: Sequence[Value], ranks: int, limit: int = BUCKET) -> list[Value]:
    """The mean of each value over `ranks` processes."""
    found: dict[str, Value] = {}
    for position, bucket in enumerate(list(_buckets(graph, values, limit))):
        parts = [value.view((value.tensor.size,)) for value in bucket]
        whole = parts[0] if len(parts) == 1 else parts[0].apply(make("concat", dim=0), *parts[1:])
        mean = whole.apply(AllReduce(ranks, position)) * (1.0 / ranks)
        start = 0
        for value in bucket:
            stop = start + int(value.tensor.size)
            part = mean if len(bucket) == 1 else mean.slice(0, start, stop)
            found[value.name], start = part.view(value.shape), stop
    return [found[value.name] for value in values]


def _buckets(graph: Graph, values: Sequence[Value], limit: int) -> Iterator[list[Value]]:
    """The values in the order in which they are computed, in parts of one element type and at most `limit` bytes, or
    of a single value.
    """
    order = {name: index for index, node in enumerate(graph.nodes) for name in node.outputs}
    distinct = {value.name: value for value in values}
    filling: dict[str, list[Value]] = {}
    for value in sorted(distinct.values(), key=lambda value: order.get(value.name, -1)):
        bucket = filling.setdefault(value.dtype.name, [])
        if bucket and sum(int(v.tensor.bytes) for v in (*bucket, value)) > limit:
            yield bucket
            bucket = filling[value.dtype.name] = []
        bucket.append(value)
    yield from filling.values()
