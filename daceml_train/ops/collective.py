"""Collectives: operators by which the processes that run one program, its *ranks*, exchange arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Array, Builder, Operator, Value, make
from daceml_train.tensor import Dim, DType, Shape, Tensor, product, same, simplify


@dataclass(frozen=True)
class Collective(Operator):
    """Base of the operators whose result on one rank depends on the operands of all `ranks`.

    `position` counts the collectives of a program: all ranks run them in one order, and no two are equal.
    """

    vendor = True
    ranks: int
    position: int = 0

    @property
    def deferred(self) -> bool:
        """Whether nothing needs the result before the update, so that it may be sent together with others."""
        return bool(getattr(self, "of", ""))

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        """The result on each rank, from the operands on each rank: the reference."""
        raise NotImplementedError(f"{self.label} has no reference")

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        """The result on rank 0 where all ranks have the same operands."""
        return (self.exchange([operands] * self.ranks)[0],)

    def flops(self, *operands: Tensor) -> Dim:
        return 0

    def network_bytes(self, *operands: Tensor) -> Dim:
        """Bytes that each rank sends."""
        raise NotImplementedError(f"{self.label} does not count its bytes")

    def _floats(self, x: Tensor) -> None:
        if self.ranks < 1 or not x.dtype.is_float:
            raise Invalid(f"{self.label} expects floating-point arrays on at least 1 rank, given {x} on {self.ranks}")

    def _blocks(self, x: Tensor) -> Dim:
        """The length of the blocks of `x`, one per rank, along its first dimension."""
        self._floats(x)
        length = x.shape[0] if x.rank else 0
        if x.rank == 0 or (isinstance(length, int) and length % self.ranks):
            raise Invalid(f"{self.label} cuts its operand into {self.ranks} equal blocks, given {x}")
        return length // self.ranks if isinstance(length, int) else simplify(length / self.ranks)

    def _to_others(self, x: Tensor) -> Dim:
        """The bytes of `x` but for this rank's block."""
        return simplify((self.ranks - 1) * x.bytes // self.ranks)


@dataclass(frozen=True)
class AllReduce(Collective):
    """The sum of `x` over all ranks, each of which gets the same bits.

    `of` says what is added up between the backward pass and the update: a gradient, the loss, a norm. `rows` is the
    number of rows of a table that any rank reads, if `x` is the table's gradient and all other rows are zero.
    """

    name = "all_reduce"
    of: str = ""
    rows: int = 0

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        self._floats(x)
        return (Tensor(x.shape, x.dtype),)

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        return [np.sum([x for (x,) in operands], axis=0)] * self.ranks

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(AllReduce(self.ranks, self.position))

    def flops(self, *operands: Tensor) -> Dim:
        return operands[0].size

    def network_bytes(self, *operands: Tensor) -> Dim:
        """Bytes that each rank sends if the sum is computed in a ring, which is the least possible."""
        return simplify(2 * (self.ranks - 1) * operands[0].bytes // self.ranks)


@dataclass(frozen=True)
class ReduceScatter(Collective):
    """Block r of the sum of `x` over all ranks, on rank r: x [ranks S, ...], result [S, ...]; `of` as of AllReduce."""

    name = "reduce_scatter"
    of: str = ""

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        length = self._blocks(x)
        return (Tensor((length, *x.shape[1:]), x.dtype),)

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        return list(np.split(np.sum([x for (x,) in operands], axis=0), self.ranks))

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(AllGather(self.ranks, self.position))

    def flops(self, *operands: Tensor) -> Dim:
        return operands[0].size

    def network_bytes(self, *operands: Tensor) -> Dim:
        return self._to_others(operands[0])


@dataclass(frozen=True)
class AllGather(Collective):
    """The `x` of all ranks, one after the other: x [S, ...], result [ranks S, ...]. For `of` see AllReduce."""

    name = "all_gather"
    of: str = ""

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        self._floats(x)
        if not x.rank:
            raise Invalid(f"all_gather joins arrays along their first dimension, given {x}")
        return (Tensor((simplify(self.ranks * x.shape[0]), *x.shape[1:]), x.dtype),)

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        return [np.concatenate([x for (x,) in operands])] * self.ranks

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(ReduceScatter(self.ranks, self.position))

    def network_bytes(self, *operands: Tensor) -> Dim:
        return simplify((self.ranks - 1) * operands[0].bytes)


@dataclass(frozen=True)
class AllToAll(Collective):
    """Block s of rank r becomes block r of rank s: x [ranks S, ...], result of the same shape."""

    name = "all_to_all"

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        self._blocks(x)
        return (Tensor(x.shape, x.dtype),)

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        blocks = [np.split(x, self.ranks) for (x,) in operands]
        return [np.concatenate(column) for column in zip(*blocks, strict=True)]

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(AllToAll(self.ranks, self.position))

    def network_bytes(self, *operands: Tensor) -> Dim:
        return self._to_others(operands[0])


@dataclass(frozen=True)
class Broadcast(Collective):
    """The `x` of rank `root`, on all ranks."""

    name = "broadcast"
    root: int = 0

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        self._floats(x)
        if not 0 <= self.root < self.ranks:
            raise Invalid(f"{self.label} has no rank {self.root} among {self.ranks}")
        return (Tensor(x.shape, x.dtype),)

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        return [operands[self.root][0]] * self.ranks

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(ReduceTo(self.ranks, self.position, self.root))

    def network_bytes(self, *operands: Tensor) -> Dim:
        """The mean over the ranks: all but one of them receive the array once."""
        return self._to_others(operands[0])


@dataclass(frozen=True)
class ReduceTo(Broadcast):
    """The sum of `x` over all ranks on rank `root`, zeros on the others."""

    name = "reduce_to"

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        total = np.sum([x for (x,) in operands], axis=0)
        return [total if rank == self.root else np.zeros_like(total) for rank in range(self.ranks)]

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(Broadcast(self.ranks, self.position, self.root))

    def flops(self, *operands: Tensor) -> Dim:
        return operands[0].size


@dataclass(frozen=True)
class OwnShards(Collective):
    """This rank's shard of each array, one after the other: shard r of n elements is [r S, (r + 1) S), S = ceil(n / N).

    What a shard has beyond the end of its array is zero. Nothing is sent.
    """

    name = "own_shards"
    operands = ("*arrays",)

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        for x in operands:
            self._floats(x)
        if len({x.dtype for x in operands}) != 1:
            raise Invalid("own_shards expects arrays of one element type")
        return (Tensor((sum(shard_size(x.shape, self.ranks) for x in operands),), operands[0].dtype),)

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        results = []
        for rank, arrays in enumerate(operands):
            sizes = [shard_size(x.shape, self.ranks) for x in arrays]
            padded = [np.pad(x.reshape(-1), (0, s * self.ranks - x.size)) for x, s in zip(arrays, sizes, strict=True)]
            results.append(np.concatenate([x[rank * s : (rank + 1) * s] for x, s in zip(padded, sizes, strict=True)]))
        return results

    def network_bytes(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True)
class SumRows(Collective):
    """The sums over all ranks of gradients of tables, each given as rows [..., D] and indices [...] (`EmbeddingGrad`).

    The result has the tables, of `rows[i]` rows each, one after the other. The row `padding[i]` (-1: none) gets
    nothing. A rank may have any number of rows; it sends its own to every other rank, equal indices added up before.
    """

    name = "sum_rows"
    operands = ("*parts",)
    rows: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        grads, indices = operands[::2], operands[1::2]
        for grad, index in zip(grads, indices, strict=False):
            self._floats(grad)
            fits = grad.rank == index.rank + 1 and all(map(same, grad.shape, index.shape))
            if not fits or index.dtype not in (DType.int64, DType.int32):
                raise Invalid(f"sum_rows expects a cotangent [*indices, D], given {grad} for indices {index}")
        counts = {len(grads), len(indices), len(self.rows), len(self.padding)}
        if len(counts) != 1 or not grads or len({grad.dtype for grad in grads}) != 1:
            raise Invalid("sum_rows expects rows and indices of each table, of one element type")
        size = sum(rows * grad.shape[-1] for rows, grad in zip(self.rows, grads, strict=True))
        return (Tensor((simplify(size),), grads[0].dtype),)

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        tables = []
        for number, (rows, padding) in enumerate(zip(self.rows, self.padding, strict=True)):
            pairs = [(of_rank[2 * number], of_rank[2 * number + 1]) for of_rank in operands]
            table = np.zeros((rows, pairs[0][0].shape[-1]), pairs[0][0].dtype)
            for grad, indices in pairs:
                np.add.at(table, indices, np.where((indices == padding)[..., None], 0, grad))
            tables.append(table.reshape(-1))
        return [np.concatenate(tables)] * self.ranks

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(self.ranks * sum((grad.size for grad in operands[::2]), start=0))

    def network_bytes(self, *operands: Tensor) -> Dim:
        """Bytes where no two of a rank's indices are equal; equal ones are sent once."""
        pairs = zip(operands[::2], operands[1::2], strict=True)
        return simplify((self.ranks - 1) * sum((grad.bytes + 8 * index.size for grad, index in pairs), start=0))


STARTED = ("all_reduce", "reduce_scatter", "all_gather")
"""Collectives that may be started before their results are needed."""


@dataclass(frozen=True)
class Start(Collective):
    """Begin the collective `kind`, whose result `Await` completes; until then, nothing may read it."""

    name = "start"
    kind: str = "all_reduce"

    @property
    def whole(self) -> Collective:
        """The collective that this and `Await` are together."""
        found = make(self.kind, ranks=self.ranks, position=self.position)
        assert isinstance(found, Collective)
        return found

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        if self.kind not in STARTED:
            raise Invalid(f"start begins one of {', '.join(STARTED)}, given {self.kind}")
        return self.whole.infer(*operands)

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        return self.whole.exchange(operands)

    def flops(self, *operands: Tensor) -> Dim:
        return self.whole.flops(*operands)

    def network_bytes(self, *operands: Tensor) -> Dim:
        return self.whole.network_bytes(*operands)


@dataclass(frozen=True)
class Await(Operator):
    """The result of the collective that `Start` with the same `position` began, in the memory of its operand."""

    name = "await"
    vendor = True
    updates = ((0, 0),)
    position: int = 0

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return operands

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        return operands

    def flops(self, *operands: Tensor) -> Dim:
        return 0


def shard_size(shape: Shape, ranks: int) -> int:
    """Elements of each rank's shard of an array."""
    size = product(shape)
    if not isinstance(size, int):
        raise Invalid(f"an array of symbolic size {size} has no shards")
    return -(-size // ranks)
