"""Operators along one dimension whose elements depend on each other: running sums, sorting, the largest k, extrema.

Running sums and sorting run as library calls, since they are not loop nests; their derivatives are generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.ops.indexing import Scatter, zeros
from daceml_train.ops.movement import Flip
from daceml_train.ops.operator import Array, Builder, Operator, Value, make
from daceml_train.tensor import Dim, DType, Tensor


def check_dim(label: str, x: Tensor, dim: int) -> None:
    """Raise `Invalid` unless `x` has dimension `dim`."""
    if not 0 <= dim < x.rank:
        raise Invalid(f"{label} expects a dimension in 0..{x.rank - 1} for {x}, given {dim}")


@dataclass(frozen=True)
class CumSum(Operator):
    """`y[i] = x[0] + ... + x[i]` along `dim`, in the element type of `x`."""

    name = "cumsum"
    vendor = True
    dim: int

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        check_dim("cumsum", operands[0], self.dim)
        return (Tensor(operands[0].shape, operands[0].dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        (x,) = operands
        return (np.cumsum(x, self.dim, dtype=x.dtype),)

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        backwards = Flip((self.dim,))
        return grad_y.apply(backwards).apply(self).apply(backwards)

    def flops(self, *operands: Tensor) -> Dim:
        return operands[0].size


@dataclass(frozen=True)
class Sort(Operator):
    """The elements along `dim` in order, NaN largest, and their indices; the sort is stable."""

    name = "sort"
    results = ("y", "indices")
    vendor = True
    dim: int
    descending: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        check_dim("sort", x, self.dim)
        return Tensor(x.shape, x.dtype), Tensor(x.shape, DType.int64)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        y, indices = torch.as_tensor(operands[0].copy()).sort(dim=self.dim, descending=self.descending, stable=True)
        return y.numpy(), indices.numpy()

    def vjp(self, b: Builder, x: Value, indices: Value, grad_y: Value | None) -> Value | None:
        return _brought_back(b, x, indices, grad_y, self.dim)

    def flops(self, *operands: Tensor) -> Dim:
        return operands[0].size


def _brought_back(b: Builder, x: Value, indices: Value, g: Value | None, dim: int) -> Value | None:
    """Cotangents of selected elements, at the positions of the elements."""
    return None if g is None else zeros(b, x.shape, x.dtype).apply(Scatter(dim, accumulate=True), indices, g)


@dataclass(frozen=True)
class TopK(Operator):
    """The `count` largest or smallest elements along `dim` and their indices, in order where `ordered`."""

    name = "topk"
    results = ("y", "indices")
    vendor = True
    count: Dim
    dim: int
    largest: bool = True
    ordered: bool = True

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        check_dim("topk", x, self.dim)
        size = x.shape[self.dim]
        if isinstance(size, int) and isinstance(self.count, int) and not 0 <= self.count <= size:
            raise Invalid(f"topk expects at most {size} elements along {self.dim} of {x}, given {self.count}")
        shape = (*x.shape[: self.dim], self.count, *x.shape[self.dim + 1 :])
        return Tensor(shape, x.dtype), Tensor(shape, DType.int64)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        x = torch.as_tensor(operands[0].copy())
        y, indices = x.topk(int(self.count), self.dim, self.largest, self.ordered)
        return y.numpy(), indices.numpy()

    def vjp(self, b: Builder, x: Value, indices: Value, grad_y: Value | None) -> Value | None:
        return _brought_back(b, x, indices, grad_y, self.dim)

    def flops(self, *operands: Tensor) -> Dim:
        return operands[0].size


@dataclass(frozen=True)
class Extremum(Operator):
    """The largest (`kind` max) or smallest (min) element along `dim`, and the index of the first such one.

    NaN is both. The gradient goes to the element of the index alone.
    """

    name = "extremum"
    results = ("y", "indices")
    kind: str
    dim: int
    keepdim: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        check_dim("extremum", x, self.dim)
        (y,) = make("reduce", kind=self.kind, dims=(self.dim,), keepdim=self.keepdim).infer(x)
        return y, Tensor(y.shape, DType.int64, y.order)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        (x,) = operands
        best = x.reduce(self.kind, (self.dim,), keepdim=True)
        chosen = x.compare("eq", best)
        if x.dtype.is_float:
            (chosen,) = b.emit(make("logical_or"), chosen, x.unary("isnan"))
        index = self._positions(b, x)
        size = index.constant(_last(x.shape[self.dim]))
        first = chosen.where(index, size).reduce("min", (self.dim,), keepdim=True)
        shape = self.infer(x.tensor)[0].shape
        return best.view(shape), first.cast(DType.int64).view(shape)

    def _positions(self, b: Builder, x: Value) -> Value:
        """Indices along the dimension, to be broadcast against `x`."""
        column = tuple(size if d == self.dim else 1 for d, size in enumerate(x.shape))
        (index,) = b.emit(make("iota", shape=column, dim=self.dim, dtype=DType.int32))
        return index

    def vjp(self, b: Builder, x: Value, indices: Value, grad_y: Value | None) -> Value | None:
        if grad_y is None:
            return None
        column = tuple(1 if d == self.dim else size for d, size in enumerate(x.shape))
        here = self._positions(b, x).compare("eq", indices.cast(DType.int32).view(column))
        return here.where(grad_y.view(column), 0.0)

    def flops(self, *operands: Tensor) -> Dim:
        return 3 * operands[0].size


def _last(size: Dim) -> Dim:
    return size if isinstance(size, int) else 2**31 - 1
