"""Data parallelism in the graph of a step: means of gradients over the ranks that train together.

Each gradient is summed over the ranks by an operator of its own (`all_reduce`), and so are the loss and the weight of
the rank's batch: the loss is multiplied by the weight before it is differentiated, and the sums are divided by the sum
of the weights. That division fuses with what reads a gradient. How the sums travel is for the passes of the level
`distribution` to say: in which messages, as which rows of a table, or as shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from daceml_train.analysis.embeddings import row_gradients
from daceml_train.errors import Unsupported
from daceml_train.graph.graph import Graph
from daceml_train.ops.collective import AllGather, AllReduce, ReduceScatter, shard_size
from daceml_train.ops.divided_tables import LookupRows, ReturnRows
from daceml_train.ops.elementwise import Full
from daceml_train.ops.operator import Value
from daceml_train.ops.reduction import wide_type
from daceml_train.tensor import DType, Tensor, same

WEIGHT = "weight"
"""The name of the input that is the weight of this rank's batch."""


@dataclass
class Exchange:
    """The collectives of one step of `ranks` processes, in the order in which all of them run them."""

    graph: Graph
    ranks: int
    weight: Value | None = None
    """The weight of this rank's batch; None if all ranks have the same."""
    idle: bool = False
    """Whether this rank has no data: what it adds to each sum is zero."""
    position: Iterator[int] = field(default_factory=itertools.count)
    total: Value | None = None
    """The sum of the weights, once it is known."""

    def means(self, values: Mapping[str, Value], rows: Mapping[str, int] | None = None) -> dict[str, Value]:
        """The mean of each value over the ranks, by what it is. `rows` has those that are gradients of tables, and how
        many rows of the table any rank reads.
        """
        rows = rows or {}
        exact = any(value.dtype is DType.float64 for value in values.values())
        share = self._share(DType.float64 if exact else DType.float32)
        order = {name: index for index, node in enumerate(self.graph.nodes) for name in node.outputs}
        named = sorted(values.items(), key=lambda pair: order.get(pair[1].name, -1))  # as the backward pass has them
        sums: dict[str, Value] = {}
        found: dict[str, Value] = {}
        for what, value in named:
            if value.name not in sums:
                own = self._own_rows(value) if what in rows else self._own(value)
                op = AllReduce(self.ranks, next(self.position), what, rows.get(what, 0))
                sums[value.name] = _scaled(own.apply(op), share)
            found[what] = sums[value.name]
        return {what: found[what] for what in values}

    def sum(self, scalar: Value) -> Value:
        """The sum of a 0-d value over the ranks."""
        return self.sum_all(scalar.view((1,))).view(())

    def sum_all(self, x: Value) -> Value:
        """The sum of an array over the ranks."""
        return x.apply(AllReduce(self.ranks, next(self.position)))

    def extreme(self, scalar: Value, kind: str) -> Value:
        """The `max` or `min` of a 0-d value over the ranks."""
        return scalar.view((1,)).apply(AllGather(self.ranks, next(self.position))).reduce(kind, (0,))

    def of_sum(self, total: Value) -> Value:
        """The mean whose sum over the ranks this rank has."""
        return _scaled(total, self._share())

    # ---- pieces -------------------------------------------------------------------------------------------------
    def _own(self, value: Value) -> Value:
        """What this rank adds to the sum of a value."""
        if not self.idle:
            return value
        (zero,) = self.graph.emit(Full(0.0, value.shape, value.dtype))
        return zero

    def _own_rows(self, value: Value) -> Value:
        """What this rank adds to the gradient of a table: without data, zeros to some row."""
        if not self.idle:
            return value
        total: Value | None = None
        for part in row_gradients(self.graph, [value])[value.name]:
            grad, indices = (self._own(self.graph.value(name)) for name in part.inputs)
            own = grad.apply(part.op, indices)
            total = own if total is None else total + own
        assert total is not None
        return total

    def _share(self, dtype: DType = DType.float32) -> Value | float:
        """The factor that makes sums means."""
        if self.weight is None:
            return 1.0 / self.ranks
        if self.total is None:
            weight = self.weight.cast(dtype).view((1,))
            self.total = weight.apply(AllReduce(self.ranks, next(self.position), "weight")).view(())
        return 1.0 / self.total


def _scaled(value: Value, share: Value | float) -> Value:
    """A value times a scalar, which is rounded to its element type after the multiplication."""
    if isinstance(share, float) or share.dtype is value.dtype:
        return value * share
    wide = wide_type(value.dtype)
    return (value.cast(wide) * share.cast(wide)).cast(value.dtype)


def lookups(graph: Graph, ranks: int) -> set[str]:
    """The inputs that are tables divided among the ranks. Raises `Unsupported` where their gradients are not to be had
    as rows: each rank has those of its own part alone.
    """
    found = {node.inputs[0] for node in graph.nodes if isinstance(node.op, LookupRows)}
    readers = graph.readers() if found else {}
    for name in found:
        if ranks == 1:
            raise Unsupported("a ShardedEmbedding in a step of one process", advice="pass mesh=, with its ranks")
        whole = name in graph.inputs and name not in graph.outputs and name not in graph.writes
        ops = (node.op for node in readers[name])
        if not whole or not all(isinstance(op, LookupRows) and op.ranks == ranks for op in ops):
            raise Unsupported(f"the table {name} of a ShardedEmbedding, which is not read by its rows alone")
    return found


def gathered(graph: Graph, names: Collection[str], ranks: int, position: Iterator[int]) -> Graph:
    """The graph in which each rank has S = ceil(n / N) rows of these inputs, and gathers all n before the first reader.

    x [n, ...]  =>  x [S, ...] -> [all_gather] -> [slice 0 .. n]
    """
    if not names:
        return graph
    other = Graph(graph.name, applied=graph.applied)
    for name, entry in graph.inputs.items():
        length, *rest = entry.tensor.shape or (0,)
        own = Tensor((shard_size((length,), ranks), *rest), entry.tensor.dtype) if name in names else entry.tensor
        other.input(name, own, entry.role, entry.path)
    whole: dict[str, str] = {}
    for node in graph.nodes:
        for name in node.inputs:
            if name in names and name not in whole:
                value, length = other.value(name).apply(AllGather(ranks, next(position))), graph.tensors[name].shape[0]
                whole[name] = (value if same(value.shape[0], length) else value.slice(0, 0, length)).name
        inputs = tuple(whole.get(name, name) for name in node.inputs)
        results = other.append(node.op, inputs, [other.fresh(n) for n in node.outputs], node.origin)
        whole |= {old: new.name for old, new in zip(node.outputs, results, strict=True)}
    return graph.finish(other, whole)


def without_requests(graph: Graph, gradients: Mapping[str, Value]) -> dict[str, Value]:
    """The gradients of divided tables and parameters for a rank without data: it answers the others, and adds up what
    they send.

    table, indices -> [lookup_rows] ... grad, indices -> [return_rows] -> g
    =>  table, none -> [lookup_rows] -> rows, rows, none -> [return_rows] -> g
    """
    (none,) = graph.emit(Full(0, (0,), DType.int64))
    requests = {
        node.op.position: (node.inputs[0], graph.value(node.inputs[0]).apply(node.op, none))
        for node in tuple(graph.nodes)
        if isinstance(node.op, LookupRows)
    }
    sums: dict[str, Value] = {}
    gathers = {node.op.position: node for node in graph.nodes if isinstance(node.op, AllGather)}
    for node in tuple(graph.nodes):
        if isinstance(node.op, ReturnRows):
            name, rows = requests[node.op.position]
            grad = rows.apply(node.op, none)
        elif isinstance(node.op, ReduceScatter):
            gather = gathers[node.op.position]
            name, rows = gather.inputs[0], graph.value(gather.outputs[0])
            grad = (rows * 0.0).apply(node.op)
        else:
            continue
        sums[name] = sums[name] + grad if name in sums else grad
    frozen = [node for node in gathers.values() if node.inputs[0] not in sums]
    for name in [*sums][:1] if frozen else ():  # gathered by the others, too
        unread = (graph.value(node.outputs[0]) * 0.0 for node in frozen)
        for value in unread:
            total = value.sum(tuple(range(len(value.shape)))).cast(sums[name].dtype)
            sums[name] = sums[name] + total
    return {name: sums[name] for name in gradients}
