"""Tables whose rows are divided among the ranks: of R rows on N ranks, row i is on rank i // S, S = ceil(R / N)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.ops.collective import Collective
from daceml_train.ops.operator import Array, Builder, Value
from daceml_train.tensor import Dim, DType, Tensor, same, simplify


def rows_on_rank(rows: int, ranks: int) -> int:
    """The rows of a table that each rank has. The last ranks may have some that no index reaches."""
    return -(-rows // ranks)


@dataclass(frozen=True)
class _OfTable(Collective):
    """Base of both: a table of `rows` rows in all."""

    rows: int = 0

    @property
    def length(self) -> int:
        """The rows on each rank."""
        return rows_on_rank(self.rows, self.ranks)

    def _of_others(self, indices: Tensor, row: Dim) -> Dim:
        """Bytes of the rows that a rank asks others for, `row` each, where no two of its indices are equal."""
        return simplify((self.ranks - 1) * indices.size * row // self.ranks)


@dataclass(frozen=True)
class LookupRows(_OfTable):
    """`whole[indices]` of a divided table: table [S, D], indices [...] in 0..R-1 of this rank, result [..., D].

    Each rank asks the others for its distinct indices, and receives their rows.
    """

    name = "lookup_rows"
    operands = ("table", "indices")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        table, indices = operands
        self._floats(table)
        if table.rank != 2 or table.shape[0] != self.length or indices.dtype is not DType.int64:
            expected = f"{self.length} of {self.rows} rows [S, D] and i64 indices"
            raise Invalid(f"lookup_rows expects {expected}, given {table}, {indices}")
        return (Tensor((*indices.shape, table.shape[1]), table.dtype),)

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        whole = np.concatenate([table for table, _ in operands])[: self.rows]
        return [whole[indices] for _, indices in operands]

    def vjp(self, b: Builder, table: Value, indices: Value, grad_y: Value) -> tuple[Value, None]:
        return grad_y.apply(ReturnRows(self.ranks, self.position, self.rows), indices), None

    def network_bytes(self, *operands: Tensor) -> Dim:
        """Bytes where no two indices are equal, and where each rank has equally many of them for every other."""
        table, indices = operands
        return self._of_others(indices, 8 + table.shape[1] * table.dtype.bytes)


@dataclass(frozen=True)
class ReturnRows(_OfTable):
    """The gradient of `lookup_rows` for this rank's rows: cotangents [..., D] and indices [...], result [S, D].

    Each rank adds up its cotangents of equal indices, and sends the sums to the ranks that have these rows.
    """

    name = "return_rows"
    operands = ("grad", "indices")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        grad, indices = operands
        self._floats(grad)
        if grad.rank != indices.rank + 1 or not all(map(same, grad.shape, indices.shape)):
            raise Invalid(f"return_rows expects a cotangent [*indices, D], given {grad} for indices {indices}")
        return (Tensor((self.length, grad.shape[-1]), grad.dtype),)

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        whole = np.zeros((self.length * self.ranks, operands[0][0].shape[-1]), operands[0][0].dtype)
        for grad, indices in operands:
            np.add.at(whole, indices, grad)
        return list(np.split(whole, self.ranks))

    def flops(self, *operands: Tensor) -> Dim:
        return operands[0].size

    def network_bytes(self, *operands: Tensor) -> Dim:
        grad, indices = operands
        return self._of_others(indices, grad.shape[-1] * grad.dtype.bytes)


__all__ = ["LookupRows", "ReturnRows", "rows_on_rank"]
