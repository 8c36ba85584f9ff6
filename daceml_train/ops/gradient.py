"""Operators that define derivatives and compute nothing themselves: they lower to their operands or bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.fallback import Body, zeros_like
from daceml_train.ops.operator import Array, Builder, Operator, Value
from daceml_train.tensor import Dim, Tensor, same_shape


@dataclass(frozen=True)
class Detach(Operator):
    """`x`, through which no gradient flows: PyTorch's `detach`, and results computed under `no_grad`."""

    name = "detach"
    zero_gradient = True

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return (operands[0],)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        return operands

    def flops(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True)
class Graft(Operator):
    """The value `x` with the derivative of `source`: a tensor that was changed in place under `no_grad`."""

    name = "graft"
    operands = ("source", "x")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        source, x = operands
        if not same_shape(source.shape, x.shape) or source.dtype is not x.dtype:
            raise Invalid(f"graft expects two arrays of one type, given {source} and {x}")
        return (x,)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        return (operands[1],)

    def vjp(self, b: Builder, grad_y: Value) -> tuple[Value, None]:
        return grad_y, None

    def flops(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True)
class Overwrite(Operator):
    """The value `x`, written over `before`, which gets a gradient of zeros: PyTorch's `zero_`, `fill_`, `copy_`."""

    name = "overwrite"
    operands = ("before", "x")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        before, x = operands
        if not same_shape(before.shape, x.shape) or before.dtype is not x.dtype:
            raise Invalid(f"overwrite expects two arrays of one type, given {before} and {x}")
        return (x,)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        return (operands[1],)

    def vjp(self, b: Builder, grad_y: Value) -> tuple[None, Value]:
        return None, grad_y

    def flops(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True)
class LossGradients(Operator):
    """The gradients of `loss` by `parameters`, which code of the user's reads: the reverse pass takes its place.

    It exists in captured graphs alone, between the forward pass and the user's update or hooks; see
    `training.user_update`.
    """

    name = "loss_gradients"
    operands = ("loss", "*parameters")
    results = ("*gradients",)
    zero_gradient = True

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return operands[1:]

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        raise Unsupported("the gradients of a loss by its value alone", advice="interpret the joint graph of the step")

    def flops(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True)
class FinalGradients(Operator):
    """Gradients after the user's hooks, as the backward pass leaves them: clipping and loss scaling follow here.

    It exists in captured graphs alone, as `LossGradients`.
    """

    name = "final_gradients"
    operands = ("*gradients",)
    results = ("*finals",)
    zero_gradient = True

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return operands

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        return operands

    def flops(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True)
class CustomVJP(Operator):
    """A user's `autograd.Function`: `forward` is its computation, `backward` the derivative that the user defines.

    `forward` yields `count` results and then the saved values. `backward` takes the cotangents of the results (zeros
    where there is none) and the saved values, and yields one cotangent per operand, None where there is none.
    """

    name = "custom_vjp"
    operands = ("*xs",)
    results = ("*ys",)
    forward: Body
    backward: Body
    count: int

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        types = self._types(operands)
        return tuple(types[y] for y in self.forward.yields if y is not None)

    def _types(self, operands: Sequence[Tensor]) -> dict[str, Tensor]:
        """The type of every value of the forward body."""
        if len(operands) != len(self.forward.arguments):
            raise Invalid(f"custom_vjp takes {len(self.forward.arguments)} operands, given {len(operands)}")
        types = dict(zip(self.forward.arguments, operands, strict=True))
        for s in self.forward.statements:
            types.update(zip(s.outputs, s.op.infer(*(types[i] for i in s.inputs)), strict=True))
        return types

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        return tuple(v for v in self.forward.emit(b, operands) if v is not None)

    def vjp(
        self, b: Builder, ys: tuple[Value, ...], grad_ys: tuple[Value | None, ...]
    ) -> tuple[tuple[Value | None, ...]]:
        cotangents = tuple(
            zeros_like(b, y) if g is None else g for y, g in zip(ys[: self.count], grad_ys, strict=False)
        )
        return (self.backward.emit(b, (*cotangents, *ys[self.count :])),)

    def flops(self, *operands: Tensor) -> Dim:
        types = self._types(operands)
        return sum((s.op.flops(*(types[i] for i in s.inputs)) for s in self.forward.statements), start=0)
