"""Contractions: matmuls, which BLAS runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Array, Builder, Operator, Value
from daceml_train.tensor import Dim, Tensor, product, same, same_shape, simplify


@dataclass(frozen=True)
class Matmul(Operator):
    """`a @ b`: both matrices, or both of rank 3 with the same batch size.

    With more than one of `chunks`, the result never exists as a whole: see `analysis.chunks`.
    """

    name = "matmul"
    operands = ("a", "b")
    vendor = True
    chunks: int = 1

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        a, b = operands
        fits = a.rank == b.rank in (2, 3) and same_shape(a.shape[:-2], b.shape[:-2]) and same(a.shape[-1], b.shape[-2])
        if not fits or a.dtype is not b.dtype:
            raise Invalid(f"matmul expects [M, K] and [K, N] or [B, M, K] and [B, K, N] of one type, given {a} and {b}")
        return (Tensor((*a.shape[:-1], b.shape[-1]), a.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        return (np.matmul(*operands),)

    def vjp(self, builder: Builder, a: Value, b: Value, grad_y: Value) -> tuple[Value, Value]:
        return grad_y @ b.T, a.T @ grad_y

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(2 * operands[0].size * operands[1].shape[-1])


@dataclass(frozen=True)
class MatmulAdd(Operator):
    """`c + a @ b` in one call; `c` has the result's shape, or is one row [N] that is added to every row.

    Only passes emit it: an accumulated matmul, or a matmul with its bias.
    """

    name = "matmul_add"
    operands = ("c", "a", "b")
    vendor = True

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        c, a, b = operands
        (y,) = Matmul().infer(a, b)
        fits = same_shape(c.shape, y.shape) or (y.rank == 2 and same_shape(c.shape, y.shape[1:]))
        if not fits or c.dtype is not y.dtype:
            raise Invalid(f"matmul_add expects {y} or one row of it to add to, given {c}")
        return (y,)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        c, a, b = operands
        return (np.matmul(a, b) + c,)

    def vjp(self, builder: Builder, a: Value, b: Value, grad_y: Value) -> tuple[Value, Value, Value]:
        return grad_y, grad_y @ b.T, a.T @ grad_y

    def flops(self, *operands: Tensor) -> Dim:
        _, a, b = operands
        return simplify((2 * a.shape[-1] + 1) * product((*a.shape[:-1], b.shape[-1])))
