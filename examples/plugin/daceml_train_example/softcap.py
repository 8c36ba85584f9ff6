"""The operator softcap, which keeps attention scores and logits within bounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import daceml_train as dt
from daceml_train.ops.operator import Builder, Operator, Value
from daceml_train.tensor import Tensor


@dataclass(frozen=True)
class Softcap(Operator):
    """`cap * tanh(x / cap)`: close to x where |x| is small against the cap, never beyond the cap."""

    name = "softcap"
    cap: float = 30.0

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return operands

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        (x,) = operands
        return ((x / self.cap).unary("tanh") * self.cap,)


softcap = dt.torch_function(Softcap, "daceml_train_example::softcap")
"""`softcap(x, cap=30.0)`, for use in models."""
