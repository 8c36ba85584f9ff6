"""Synchronized batch norm: statistics of the batches of all ranks together."""

from __future__ import annotations

from collections.abc import Iterator

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.collective import AllReduce
from daceml_train.ops.normalization import BatchNorm, affine
from daceml_train.ops.operator import Value, make
from daceml_train.ops.reduction import scalar, wide
from daceml_train.tensor import product


def synchronized(graph: Graph, ranks: int, position: Iterator[int]) -> Graph:
    """The graph, in which each batch norm adds up its sums over all ranks: one message for means, one for variances.

    What is computed from them, running statistics and gradients too, is that of one process with the whole batch.
    """
    other, names = graph.empty(), dict[str, str]()
    for node in graph.nodes:
        inputs = tuple(names.get(name, name) for name in node.inputs)
        if isinstance(node.op, BatchNorm):
            with other.at(node.origin.of("batch_norm")):
                results = _normalized(other, node, inputs, ranks, position)
        else:
            results = other.append(node.op, inputs, origin=node.origin)
        names |= {old: new.name for old, new in zip(node.outputs, results, strict=True)}
    return graph.finish(other, names)


def _normalized(
    graph: Graph, node: Node, inputs: tuple[str, ...], ranks: int, position: Iterator[int]
) -> tuple[Value, ...]:
    """Result, mean, reciprocal deviation and variance of a batch norm over all ranks."""
    assert isinstance(node.op, BatchNorm)
    given, *weight_bias = (graph.value(name) for name in inputs)
    x, channels = wide(given), given.shape[1]
    dims = (0, *range(2, len(x.shape)))
    row = (1, channels, *(1 for _ in x.shape[2:]))
    own = scalar(graph, product(x.shape[d] for d in dims), x.dtype)
    message = x.sum(dims).apply(make("concat", dim=0), own.view((1,)))
    total = message.apply(AllReduce(ranks, next(position)))
    count = total.slice(0, channels, channels + 1).view(())
    mean = total.slice(0, 0, channels) / count
    centered = x - mean.view(row)
    squares = centered.unary("square").sum(dims).apply(AllReduce(ranks, next(position)))
    variance = squares / count
    rstd = (variance + node.op.eps).unary("rsqrt")
    y = affine(centered * rstd.view(row), weight_bias, row).cast(given.dtype)
    # what reads the variance multiplies it by n / (n - 1) with this rank's n: the running variance is unbiased
    corrected = variance * ((own - 1.0) / own) * (count / (count - 1.0))
    return y, mean, rstd, corrected
