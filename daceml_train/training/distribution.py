"""Data parallelism in the graph of a step: means of gradients over the ranks that train together.

Gradients are laid side by side in buckets, in the order in which the backward pass produces them, so that a step costs
few messages. Each bucket has one more element, the weight of the rank's batch: the loss is multiplied by the weight
before it is differentiated, and the sums of gradients are divided by the sum of the weights. That division fuses with
what reads a gradient.

With a sharded optimizer (Rajbhandari et al., "ZeRO", 2020, stage 1), each rank has the sum of one shard of every
gradient, updates that shard of the parameter with that shard of the state, and gets the other shards from the other
ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from daceml_train.errors import Unsupported
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.collective import AllGather, AllReduce, OwnShards, ReduceScatter, SumRows, shard_size
from daceml_train.ops.divided_tables import LookupRows, ReturnRows
from daceml_train.ops.elementwise import Elementwise, Full
from daceml_train.ops.embedding import EmbeddingGrad
from daceml_train.ops.operator import Value, make
from daceml_train.ops.reduction import wide_type
from daceml_train.tensor import DType, Tensor, same

BUCKET = 25 << 20
"""Bytes after which a bucket is full, as in PyTorch: collectives start before the backward pass ends, and the memory
of a bucket is free for the next one.
"""
WEIGHT = "weight"
"""The name of the input that is the weight of this rank's batch."""


@dataclass
class Exchange:
    """The collectives of one step of `ranks` processes, in the order in which all of them run them."""

    graph: Graph
    ranks: int
    weight: Value | None = None
    """The weight of this rank's batch; None if all ranks have the same."""
    limit: int = BUCKET
    idle: bool = False
    """Whether this rank has no data: what it adds to each sum is zero."""
    position: Iterator[int] = field(default_factory=itertools.count)
    total: Value | None = None
    """The sum of the weights, once it is known."""

    # ---- all ranks have whole gradients -------------------------------------------------------------------------
    def means(self, values: Sequence[Value], tables: Mapping[str, Sequence[Node]] | None = None) -> list[Value]:
        """The mean of each value over the ranks. Of those in `tables` (see `row_gradients`), rows are exchanged."""
        found, tables = dict[str, Value](), tables or {}
        for bucket in list(_buckets(self.graph, [v for v in values if v.name not in tables], self.limit)):
            parts = [self._own(value).view((value.tensor.size,)) for value in bucket]
            columns = self._columns(bucket[0].dtype)
            whole = _concat([*parts, *(c.view((1,)) for c in columns)], 0)
            whole = whole.apply(AllReduce(self.ranks, next(self.position)))
            share = self._share(whole if columns else None)
            start = 0
            for value in bucket:
                stop = start + int(value.tensor.size)
                part = whole if stop - start == whole.tensor.size else whole.slice(0, start, stop)
                found[value.name], start = _scaled(part, share).view(value.shape), stop
        sums = self._summed_rows({v.name: tables[v.name] for v in values if v.name in tables})
        found |= {name: _scaled(total, self._share(None)) for name, total in sums.items()}
        return [found[value.name] for value in values]

    def _summed_rows(self, tables: Mapping[str, Sequence[Node]]) -> dict[str, Value]:
        """The sums over the ranks of gradients that are sums of embeddings' gradients, in a message per type."""
        sums: dict[str, Value] = {}
        parts = [(name, part) for name, of_table in tables.items() for part in of_table]
        types = [self.graph.tensors[part.inputs[0]].dtype for _, part in parts]
        for dtype in dict.fromkeys(types):
            group = [pair for pair, of_pair in zip(parts, types, strict=True) if of_pair is dtype]
            ops = [part.op for _, part in group if isinstance(part.op, EmbeddingGrad)]
            operands = [self._own(self.graph.value(name)) for _, part in group for name in part.inputs]
            rows, padding = tuple(int(op.rows) for op in ops), tuple(op.padding_idx for op in ops)
            whole = operands[0].apply(SumRows(self.ranks, next(self.position), rows, padding), *operands[1:])
            start = 0
            for name, part in group:
                shape = self.graph.tensors[part.outputs[0]].shape
                stop = start + math.prod(shape)
                table, start = whole.slice(0, start, stop).view(shape), stop
                sums[name] = sums[name] + table if name in sums else table
        return sums

    # ---- each rank has a shard of each gradient -----------------------------------------------------------------
    def shards(self, values: Sequence[Value], scalars: Sequence[Value] = ()) -> tuple[list[Value], list[Value]]:
        """This rank's shard of the mean of each value over the ranks, and the means of the 0-d `scalars`."""
        found = dict[str, Value]()
        for bucket in list(_buckets(self.graph, values, self.limit)):
            sizes = [shard_size(value.shape, self.ranks) for value in bucket]
            parts = [
                _padded(self._own(value), size * self.ranks).view((self.ranks, size))
                for value, size in zip(bucket, sizes, strict=True)
            ]
            columns = self._columns(bucket[0].dtype)
            parts += [c.view((1, 1)).expand((self.ranks, 1)) for c in columns]
            block = _concat(parts, 1).apply(ReduceScatter(self.ranks, next(self.position)))
            block = block.view((block.tensor.size,))
            share = self._share(block if columns else None)
            for start, size, value in zip(itertools.accumulate([0, *sizes]), sizes, bucket, strict=False):
                found[value.name] = _scaled(block.slice(0, start, start + size), share)
        return [found[value.name] for value in values], self.means(scalars)

    def own_shards(self, values: Sequence[Value]) -> list[Value]:
        """This rank's shard of each value, which all ranks have."""
        found: dict[str, Value] = {}
        for dtype in dict.fromkeys(value.dtype for value in values):
            group = [value for value in values if value.dtype is dtype]
            (whole,) = self.graph.emit(OwnShards(self.ranks, next(self.position)), *group)
            start = 0
            for value in group:
                stop = start + shard_size(value.shape, self.ranks)
                found[value.name], start = whole.slice(0, start, stop), stop
        return [found[value.name] for value in values]

    def gathered(self, shards: Sequence[Value], like: Sequence[Value]) -> list[Value]:
        """The whole of each value, of which every rank has a shard."""
        found: dict[str, Value] = {}
        shape_of = {shard.name: value.shape for shard, value in zip(shards, like, strict=True)}
        for bucket in list(_buckets(self.graph, shards, self.limit)):
            whole = _concat(bucket, 0).apply(AllGather(self.ranks, next(self.position)))
            whole, start = whole.view((self.ranks, sum(int(s.tensor.size) for s in bucket))), 0
            for shard in bucket:
                size, shape = int(shard.tensor.size), shape_of[shard.name]
                flat = whole.slice(1, start, start + size).view((self.ranks * size,))
                found[shard.name] = flat.slice(0, 0, math.prod(shape)).view(shape)
                start += size
        return [found[shard.name] for shard in shards]

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
        return _scaled(total, self._share(None))

    # ---- pieces -------------------------------------------------------------------------------------------------
    def _own(self, value: Value) -> Value:
        """What this rank adds to the sum of a value."""
        if not self.idle:
            return value
        (zero,) = self.graph.emit(Full(0.0, value.shape, value.dtype))
        return zero

    def _columns(self, dtype: DType) -> list[Value]:
        """The weight of this rank, as a further element of a bucket; 16-bit buckets could not add weights exactly."""
        if self.weight is None or wide_type(dtype) is not dtype:
            return []
        return [self.weight.cast(dtype)]

    def _share(self, bucket: Value | None) -> Value | float:
        """The factor that makes sums means, from the last element of a bucket if it has the sum of the weights."""
        if self.weight is None:
            return 1.0 / self.ranks
        if bucket is not None:
            length = int(bucket.tensor.size)
            total = bucket.slice(0, length - 1, length).view(())
            self.total = self.total or total
            return 1.0 / total
        if self.total is None:
            self.total = self.sum(self.weight.cast(DType.float32))
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


def row_gradients(graph: Graph, values: Sequence[Value]) -> dict[str, tuple[Node, ...]]:
    """The values that are gradients of tables: sums of gradients of embeddings, by name, with those gradients."""
    producers = graph.producers()

    def parts(name: str) -> tuple[Node, ...] | None:
        node = producers.get(name)
        if node is None:
            return None
        if isinstance(node.op, EmbeddingGrad):
            return (node,)
        if isinstance(node.op, Elementwise) and node.op.kind == "add":
            both = [parts(operand) for operand in node.inputs]
            return None if None in both else tuple(part for found in both if found for part in found)
        return None

    return {value.name: found for value in values if (found := parts(value.name))}


def _concat(parts: Sequence[Value], dim: int) -> Value:
    first, *others = parts
    return first.apply(make("concat", dim=dim), *others) if others else first


def _padded(value: Value, size: int) -> Value:
    """The elements of a value in a row, and zeros up to `size`."""
    flat, missing = value.view((value.tensor.size,)), size - int(value.tensor.size)
    if not missing:
        return flat
    (zeros,) = value.builder.emit(Full(0.0, (missing,), value.dtype))
    return _concat([flat, zeros], 0)


def _buckets(graph: Graph, values: Sequence[Value], limit: int) -> Iterator[list[Value]]:
    """The values in the order in which they are computed, in parts of one element type and at most `limit` bytes, or
    of a single value.
    """
    order = {name: index for index, node in enumerate(graph.nodes) for name in node.outputs}
    distinct = {value.name: value for value in values}
    filling: dict[str, list[Value]] = {}
    filled: dict[str, int] = {}
    for value in sorted(distinct.values(), key=lambda value: order.get(value.name, -1)):
        kind, size = value.dtype.name, int(value.tensor.bytes)
        bucket = filling.setdefault(kind, [])
        if bucket and filled[kind] + size > limit:
            yield bucket
            bucket = filling[kind] = []
        filled[kind] = size + (filled[kind] if bucket else 0)
        bucket.append(value)
    yield from filling.values()
