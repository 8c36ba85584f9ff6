"""Embedding: rows of a table selected by indices, sums of such rows, and the addition of cotangents to rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import sympy

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Array, Builder, Operator, Value
from daceml_train.tensor import Dim, DType, Tensor, same, simplify


def _check_indices(label: str, indices: Tensor) -> None:
    if indices.dtype not in (DType.int64, DType.int32):
        raise Invalid(f"{label} expects i64 or i32 indices, given {indices}")


@dataclass(frozen=True)
class Embedding(Operator):
    """`weight[indices]`: weight [R, D], indices [...] in 0..R-1, result [..., D].

    The row `padding_idx` (-1: none) gets no gradient. `sparse` applies to the gradient; see `EmbeddingGrad`.
    """

    name = "embedding"
    operands = ("weight", "indices")
    vendor = True
    may_raise = True
    padding_idx: int = -1
    sparse: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        weight, indices = operands
        _check_indices("embedding", indices)
        if weight.rank != 2:
            raise Invalid(f"embedding expects a table [R, D], given {weight}")
        return (Tensor((*indices.shape, weight.shape[1]), weight.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        weight, indices = operands
        return (weight[indices],)

    def vjp(self, b: Builder, weight: Value, indices: Value, grad_y: Value) -> tuple[Value, None]:
        return grad_y.apply(EmbeddingGrad(weight.shape[0], self.padding_idx, self.sparse), indices), None

    def flops(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True)
class EmbeddingGrad(Operator):
    """The gradient of `embedding` for its table of `rows` rows: cotangents with equal index are added.

    `sparse` notes that PyTorch keeps this gradient as a sparse tensor; here it is a dense array, or none at all where
    an update adds the rows directly to the table. With more than one of `chunks`, it never exists as a whole: see
    `analysis.chunks`.
    """

    name = "embedding_grad"
    operands = ("grad", "indices")
    vendor = True
    may_raise = True
    rows: Dim
    padding_idx: int = -1
    sparse: bool = False
    chunks: int = 1

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        grad, indices = operands
        _check_indices("embedding_grad", indices)
        fits = grad.rank == indices.rank + 1 and all(map(same, grad.shape, indices.shape))
        if not fits:
            raise Invalid(f"embedding_grad expects a cotangent [*indices, D], given {grad} for indices {indices}")
        return (Tensor((self.rows, grad.shape[-1]), grad.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        grad, indices = operands
        table = np.zeros((int(self.rows), grad.shape[-1]), grad.dtype)
        np.add.at(table, indices, np.where((indices == self.padding_idx)[..., None], 0, grad))
        return (table,)

    def vjp(self, b: Builder, indices: Value, grad_y: Value) -> tuple[Value, None]:
        rows = grad_y.apply(Embedding(), indices)
        if self.padding_idx < 0:
            return rows, None
        return indices.compare("eq", self.padding_idx).view((*indices.shape, 1)).where(0.0, rows), None

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(operands[0].size)


@dataclass(frozen=True)
class EmbeddingBag(Operator):
    """Sums of equally many rows: weight [R, D], indices [B * n], offsets [B] that are 0, n, 2n, ...; result [B, D].

    The library requires the offsets; the caller guarantees that they are uniform.
    """

    name = "embedding_bag"
    operands = ("weight", "indices", "offsets")
    vendor = True
    may_raise = True
    sparse: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        weight, indices, offsets = operands
        _check_indices("embedding_bag", indices)
        if weight.rank != 2 or indices.rank != 1 or offsets.rank != 1 or offsets.dtype is not indices.dtype:
            raise Invalid(
                f"embedding_bag expects [R, D], indices [N] and offsets [B], given {weight}, {indices}, {offsets}"
            )
        return (Tensor((offsets.shape[0], weight.shape[1]), weight.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        weight, indices, offsets = operands
        return (weight[indices].reshape(len(offsets), -1, weight.shape[1]).sum(1),)

    def vjp(self, b: Builder, weight: Value, indices: Value, offsets: Value, grad_y: Value) -> tuple[Value, None, None]:
        (bags,), width = offsets.shape, weight.shape[1]
        each = _quotient(indices.shape[0], bags)
        spread = grad_y.view((bags, 1, width)).expand((bags, each, width))
        gradient = EmbeddingGrad(weight.shape[0], sparse=self.sparse)
        return spread.apply(gradient, indices.view((bags, each))), None, None

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(operands[1].size * operands[0].shape[1])


def _quotient(count: Dim, parts: Dim) -> Dim:
    return (
        count // parts if isinstance(count, int) and isinstance(parts, int) else simplify(sympy.sympify(count) / parts)
    )


@dataclass(frozen=True)
class AddRows(Operator):
    """A table [R, D] after `table[indices] += rows` (index_add), where equal indices accumulate; rows [*indices, D].

    `in_place` stores the result over the table.
    """

    name = "add_rows"
    operands = ("table", "indices", "rows")
    vendor = True
    may_raise = True
    in_place: bool = False

    @property
    def updates(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]
        """The table, if the operator works in place."""
        return ((0, 0),) if self.in_place else ()

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        table, indices, rows = operands
        _check_indices("add_rows", indices)
        expected = (*indices.shape, *table.shape[1:])
        if table.rank != 2 or rows.rank != len(expected) or not all(map(same, rows.shape, expected)):
            raise Invalid(
                f"add_rows expects a table [R, D] and rows [*indices, D], given {table}, {indices} and {rows}"
            )
        return (table,)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        table, indices, rows = operands
        result = table.copy()
        np.add.at(result, indices, rows)
        return (result,)

    def vjp(self, b: Builder, indices: Value, grad_y: Value) -> tuple[Value, None, Value]:
        return grad_y, None, grad_y.apply(Embedding(), indices)

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(operands[2].size)
