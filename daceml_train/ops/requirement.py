"""Require: a condition on data, checked while a program runs."""

from __future__ import annotations

from dataclasses import dataclass

from daceml_train.errors import ExecutionError, Invalid
from daceml_train.ops.operator import Array, Operator
from daceml_train.tensor import Dim, DType, Tensor


@dataclass(frozen=True)
class Require(Operator):
    """`holds`, a 0-d boolean; the call raises with `message` if it is false.

    Computations that require the condition must depend on the result.
    """

    name = "require"
    operands = ("holds",)
    vendor = True
    may_raise = True
    zero_gradient = True
    message: str

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (holds,) = operands
        if holds.shape or holds.dtype is not DType.bool:
            raise Invalid(f"require expects a 0-d truth value, given {holds}")
        return (holds,)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        (holds,) = operands
        if not holds:
            raise ExecutionError(self.message, -1)
        return (holds,)

    def flops(self, *operands: Tensor) -> Dim:
        return 0
