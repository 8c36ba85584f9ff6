"""Synchronized batch norm: statistics of the batches of all ranks together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.collective import AllReduce
from daceml_train.ops.elementwise import Full
from daceml_train.ops.normalization import BatchNorm, affine
from daceml_train.ops.operator import Value, make
from daceml_train.ops.reduction import scalar, wide
from daceml_train.tensor import DType, product


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


def zeros(like: Value) -> Value:
    """An array of zeros."""
    (found,) = like.builder.emit(Full(0.0, like.shape, like.dtype))
    return found


def without_rows(graph: Graph) -> Value:
    """Change the graph of a rank without data, whose statistics are sums over the other ranks.

    What this rank adds to them, and to their derivatives, is zero, whatever its rows would have been. Of the buffers
    that are written those remain that do not depend on its rows, such as running statistics. Returns 0, computed from
    all the sums, so that none of them is dropped.
    """
    of_data = {name for name, entry in graph.inputs.items() if entry.role is Role.input}
    nodes, graph.nodes = graph.nodes, []
    for node in nodes:
        if isinstance(node.op, AllReduce):
            with graph.at(node.origin):
                node = replace(node, inputs=(zeros(graph.value(node.inputs[0])).name,))
        elif any(name in of_data for name in node.inputs):
            of_data.update(node.outputs)
        graph.nodes.append(node)
    graph.writes = {target: name for target, name in graph.writes.items() if name not in of_data}
    (none,) = graph.emit(Full(0.0, (), DType.float32))
    for node in [node for node in graph.nodes if isinstance(node.op, AllReduce)]:
        total = graph.value(node.outputs[0])
        total = total.sum(tuple(range(len(total.shape))))
        never = total.compare("ne", total).cast(total.dtype) * total.compare("eq", total).cast(total.dtype)
        none = none + never.cast(none.dtype)
    return none
