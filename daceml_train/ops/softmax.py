"""Softmax and its logarithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.ops.operator import Builder, Operator, Value
from daceml_train.ops.reduction import reduced, require_float, wide
from daceml_train.tensor import Dim, Tensor, simplify


@dataclass(frozen=True)
class Softmax(Operator):
    """`exp(x) / sum(exp(x))` along `dim`; the maximum is subtracted first. A row of only -inf produces NaN."""

    name = "softmax"
    dim: int

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return (_checked(operands[0], self.dim, self.name),)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        (x,) = operands
        if x.shape[self.dim] == 0:
            return (x,)
        v = wide(x)
        e = (v - v.reduce("max", (self.dim,), keepdim=True)).unary("exp")
        return ((e / e.sum((self.dim,), keepdim=True)).cast(x.dtype),)

    def vjp(self, b: Builder, y: Value, grad_y: Value) -> Value:
        g, p = wide(grad_y), wide(y)
        return (p * (g - (g * p).sum((self.dim,), keepdim=True))).cast(y.dtype)

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(17 * operands[0].size)


@dataclass(frozen=True)
class LogSoftmax(Operator):
    """`x - log(sum(exp(x)))` along `dim`; the maximum is subtracted first."""

    name = "log_softmax"
    dim: int

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return (_checked(operands[0], self.dim, self.name),)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        (x,) = operands
        if x.shape[self.dim] == 0:
            return (x,)
        v = wide(x)
        centered = v - v.reduce("max", (self.dim,), keepdim=True)
        return ((centered - centered.unary("exp").sum((self.dim,), keepdim=True).unary("log")).cast(x.dtype),)

    def vjp(self, b: Builder, y: Value, grad_y: Value) -> Value:
        g = wide(grad_y)
        return (g - wide(y).unary("exp") * g.sum((self.dim,), keepdim=True)).cast(y.dtype)

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(14 * operands[0].size)


def _checked(x: Tensor, dim: int, label: str) -> Tensor:
    require_float(x, label)
    reduced(x, (dim,), True, label)
    return x
