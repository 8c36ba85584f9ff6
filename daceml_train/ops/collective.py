"""Collectives: operators by which the processes that run one program exchange arrays."""

from __future__ import annotations

from dataclasses import dataclass

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Array, Builder, Operator, Value
from daceml_train.tensor import Dim, Tensor, simplify


@dataclass(frozen=True)
class AllReduce(Operator):
    """The sum of `x` over `ranks` processes, each of which gets the same bits.

    `position` counts the collectives of a program: all processes run them in one order, and no two are equal. The
    reference is that of processes that all have the same `x`.
    """

    name = "all_reduce"
    vendor = True
    ranks: int
    position: int = 0

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        if self.ranks < 1 or not x.dtype.is_float:
            raise Invalid(f"all_reduce sums floating-point arrays over at least 1 process, given {x} on {self.ranks}")
        return (Tensor(x.shape, x.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        (x,) = operands
        return (x * self.ranks,)

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(AllReduce(self.ranks, self.position))

    def flops(self, *operands: Tensor) -> Dim:
        return operands[0].size

    def network_bytes(self, *operands: Tensor) -> Dim:
        """Bytes that each process sends if the sum is computed in a ring, which is the least possible."""
        return simplify(2 * (self.ranks - 1) * operands[0].bytes // self.ranks)
