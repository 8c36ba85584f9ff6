"""Embedding: rows of a table chosen by indices, and the sum of cotangents into the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Array, Builder, Operator, Value
from daceml_train.tensor import Dim, DType, Tensor, same, simplify


def _check_indices(label: str, indices: Tensor) -> None:
    if indices.dtype not in (DType.int64, DType.int32):
        raise Invalid(f"{label} expects i64 or i32 indices, given {indices}")


@dataclass(frozen=True)
class Embedding(Operator):
    """`weight[indices]`: weight [R, D], indices [...] in 0..R-1, result [..., D].

    The row `padding_idx` (-1: none) gets no gradient.
    """

    name = "embedding"
    operands = ("weight", "indices")
    vendor = True
    padding_idx: int = -1

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
        return grad_y.apply(EmbeddingGrad(weight.shape[0], self.padding_idx), indices), None

    def flops(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True)
class EmbeddingGrad(Operator):
    """The gradient of `embedding` for its table of `rows` rows: cotangents with equal index are added."""

    name = "embedding_grad"
    operands = ("grad", "indices")
    vendor = True
    rows: Dim
    padding_idx: int = -1

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
