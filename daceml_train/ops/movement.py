"""Movement: operators that rearrange elements. View, permute, expand and slice only change how memory is indexed.

Sizes are explicit (no -1) and dimensions non-negative, so equal operators compare equal. `permute` permutes the
memory order, too: the result aliases its operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import sympy

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Array, Builder, Operator, Value
from daceml_train.tensor import Dim, Shape, Tensor, broadcast, same, same_shape, show_shape, simplify


class Movement(Operator):
    """Base of the operators that compute nothing."""

    def flops(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True)
class View(Movement):
    """The elements of `x`, in row-major order of its dimensions, under the sizes `shape`."""

    name = "view"
    shape: Shape

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        y = Tensor(self.shape, x.dtype)
        if not same(x.size, y.size):
            raise Invalid(f"view to {show_shape(self.shape)} expects {y.size} elements, given {x.size} in {x}")
        return (y,)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        return (operands[0].reshape(self.shape),)

    def vjp(self, b: Builder, x: Value, grad_y: Value) -> Value:
        return grad_y.view(x.shape)


@dataclass(frozen=True)
class Permute(Movement):
    """Dimensions reordered: dimension i of the result is dimension `dims[i]` of `x`."""

    name = "permute"
    dims: tuple[int, ...]

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        if sorted(self.dims) != list(range(x.rank)):
            raise Invalid(f"permute expects a permutation of 0..{x.rank - 1} for {x}, given {self.dims}")
        order = tuple(self.dims.index(d) for d in (x.order or range(x.rank)))
        shape = tuple(x.shape[d] for d in self.dims)
        return (Tensor(shape, x.dtype, None if order == tuple(range(x.rank)) else order),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        return (np.transpose(operands[0], self.dims),)

    def vjp(self, b: Builder, x: Value, grad_y: Value) -> Value:
        return grad_y.permute(tuple(self.dims.index(d) for d in range(len(self.dims))))


@dataclass(frozen=True)
class Reorder(Movement):
    """A copy of `x` with its dimensions in memory in `order`, outermost first."""

    name = "reorder"
    order: tuple[int, ...]

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        if sorted(self.order) != list(range(x.rank)):
            raise Invalid(f"reorder expects a permutation of 0..{x.rank - 1} for {x}, given {self.order}")
        return (Tensor(x.shape, x.dtype, None if self.order == tuple(range(x.rank)) else self.order),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        return (operands[0],)

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y


@dataclass(frozen=True)
class Expand(Movement):
    """`x` broadcast to `shape`, by NumPy's rule."""

    name = "expand"
    shape: Shape

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        if x.rank > len(self.shape) or not same_shape(broadcast(x.shape, self.shape), self.shape):
            raise Invalid(f"expand to {show_shape(self.shape)} expects sizes that are equal or 1, given {x}")
        return (Tensor(self.shape, x.dtype, x.order if x.rank == len(self.shape) else None),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        return (np.broadcast_to(operands[0], self.shape),)

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y  # in the broadcast shape: the reverse pass sums it


@dataclass(frozen=True)
class Slice(Movement):
    """Elements `start`, `start + step`, ... below `stop` along `dim`; `0 <= start <= stop <= size`, `step >= 1`."""

    name = "slice"
    dim: int
    start: Dim
    stop: Dim
    step: int = 1

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        if not 0 <= self.dim < x.rank or self.step < 1:
            raise Invalid(f"slice expects a dimension in 0..{x.rank - 1} and a step >= 1, given {self}")
        for low, high in ((0, self.start), (self.start, self.stop), (self.stop, x.shape[self.dim])):
            room = simplify(high - low)
            if room < 0 if isinstance(room, int) else room.is_negative:
                raise Invalid(f"slice expects 0 <= start <= stop <= {x.shape[self.dim]} for {x}, given {self}")
        shape = list(x.shape)
        shape[self.dim] = self.count
        return (Tensor(tuple(shape), x.dtype, x.order),)

    @property
    def count(self) -> Dim:
        """The number of elements along `dim`."""
        room = simplify(self.stop - self.start)
        return -(-room // self.step) if isinstance(room, int) else simplify(sympy.ceiling(room / self.step))

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        index = (slice(None),) * self.dim + (slice(self.start, self.stop, self.step),)
        return (operands[0][index],)

    def vjp(self, b: Builder, x: Value, grad_y: Value) -> Value:
        size, count, covered = x.shape[self.dim], self.count, self.count
        if same(count, 0):
            return _pad(grad_y, self.dim, 0, size)
        if self.step > 1:
            outer, inner = x.shape[: self.dim], x.shape[self.dim + 1 :]
            apart = _pad(grad_y.view((*outer, count, 1, *inner)), self.dim + 1, 0, self.step - 1)
            covered = simplify((count - 1) * self.step + 1)
            grad_y = apart.view((*outer, simplify(count * self.step), *inner)).slice(self.dim, 0, covered)
        return _pad(grad_y, self.dim, self.start, simplify(size - self.start - covered))


def _pad(x: Value, dim: int, before: Dim, after: Dim) -> Value:
    """`x` with zeros before and after it along `dim`."""
    if same(before, 0) and same(after, 0):
        return x
    return x.apply(Pad(tuple((before, after) if d == dim else (0, 0) for d in range(len(x.shape))), 0.0))


@dataclass(frozen=True)
class Pad(Movement):
    """`x` with `pads[d] = (before, after)` elements of `value` around it in dimension d; none is negative."""

    name = "pad"
    vendor = True
    pads: tuple[tuple[Dim, Dim], ...]
    value: float | int | bool = 0.0

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        if len(self.pads) != x.rank:
            raise Invalid(f"pad expects {x.rank} pairs for {x}, given {len(self.pads)}")
        if any(isinstance(p, int) and p < 0 for pair in self.pads for p in pair):
            raise Invalid(f"pad expects sizes >= 0, given {self.pads}", advice="use slice to crop")
        shape = tuple(simplify(low + size + high) for size, (low, high) in zip(x.shape, self.pads, strict=True))
        return (Tensor(shape, x.dtype, x.order),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        return (np.pad(operands[0], self.pads, constant_values=self.value),)

    def vjp(self, b: Builder, x: Value, grad_y: Value) -> Value:
        for d, (before, after) in enumerate(self.pads):
            if not (same(before, 0) and same(after, 0)):
                grad_y = grad_y.slice(d, before, simplify(before + x.shape[d]))
        return grad_y


@dataclass(frozen=True)
class Concat(Movement):
    """The operands one after the other along `dim`; their other sizes and their element types are equal.

    `placed` are the positions of operands that are written in place into the result.
    """

    name = "concat"
    operands = ("*xs",)
    vendor = True
    dim: int
    placed: tuple[int, ...] = ()

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        if not operands or not 0 <= self.dim < operands[0].rank:
            raise Invalid(f"concat along {self.dim} expects operands with that dimension, given {_show(operands)}")
        if not set(self.placed) <= set(range(len(operands))):
            raise Invalid(f"concat of {len(operands)} operands cannot have {self.placed} in place")
        first = operands[0]
        outer = first.shape[: self.dim], first.shape[self.dim + 1 :]
        for x in operands[1:]:
            fits = x.rank == first.rank and x.dtype is first.dtype
            if not fits or not all(map(same_shape, (x.shape[: self.dim], x.shape[self.dim + 1 :]), outer)):
                raise Invalid(f"concat along {self.dim} expects operands equal in all else, given {_show(operands)}")
        size: Dim = 0
        for x in operands:
            size = simplify(size + x.shape[self.dim])
        order = first.order if all(x.order == first.order for x in operands) else None
        return (Tensor((*outer[0], size, *outer[1]), first.dtype, order),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        return (np.concatenate(operands, self.dim),)

    def vjp(self, b: Builder, xs: tuple[Value, ...], grad_y: Value) -> tuple[tuple[Value, ...]]:
        gradients: list[Value] = []
        start: Dim = 0
        for x in xs:
            stop = simplify(start + x.shape[self.dim])
            gradients.append(grad_y.slice(self.dim, start, stop))
            start = stop
        return (tuple(gradients),)


def _show(operands: Sequence[Tensor]) -> str:
    return ", ".join(map(str, operands)) or "none"


@dataclass(frozen=True)
class Flip(Movement):
    """`x` in reverse order along each of `dims`."""

    name = "flip"
    vendor = True
    dims: tuple[int, ...]

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        if list(self.dims) != sorted({d for d in self.dims if 0 <= d < x.rank}):
            raise Invalid(f"flip expects ascending dimensions in 0..{x.rank - 1} for {x}, given {self.dims}")
        return (x,)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        return (np.flip(operands[0], self.dims),)

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(self)
