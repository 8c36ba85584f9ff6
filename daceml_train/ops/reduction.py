"""Reductions: the leaf `reduce`, and mean, variance and logsumexp in terms of it.

Dimensions are non-negative, ascending numbers, so equal operators compare equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import sympy

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.operator import Array, Builder, Operator, Value, make
from daceml_train.tensor import Dim, DType, Shape, Tensor, product, show_shape, simplify

KINDS = ("sum", "max", "min", "prod")


def reduced(x: Tensor, dims: Sequence[int], keepdim: bool, label: str) -> Tensor:
    """The type of `x` reduced over `dims`. Raises `Invalid` for dimensions that `x` lacks or in another form."""
    if list(dims) != sorted({d for d in dims if 0 <= d < x.rank}):
        raise Invalid(f"{label} expects ascending dimensions in 0..{x.rank - 1} for {x}, given {tuple(dims)}")
    if keepdim:
        return Tensor(tuple(1 if d in dims else size for d, size in enumerate(x.shape)), x.dtype, x.order)
    kept = [d for d in range(x.rank) if d not in dims]
    order = None if x.order is None else tuple(kept.index(d) for d in x.order if d in kept)
    return Tensor(tuple(x.shape[d] for d in kept), x.dtype, None if order == tuple(range(len(kept))) else order)


def require_float(x: Tensor, label: str) -> None:
    """Raise `Invalid` unless `x` has floating-point elements."""
    if not x.dtype.is_float:
        raise Invalid(f"{label} expects floating-point elements, given {x}; cast first")


def restore(y: Value, shape: Shape, dims: Sequence[int]) -> Value:
    """`y`, reduced over `dims` with or without `keepdim`, with the dimensions put back and expanded to `shape`."""
    return y.view(tuple(1 if d in dims else size for d, size in enumerate(shape))).expand(shape)


def scalar(b: Builder, value: Dim | float, dtype: DType) -> Value:
    """A 0-d constant; `value` may be an expression over size symbols."""
    number = value if isinstance(value, sympy.Expr) and not value.is_number else float(value)
    (result,) = b.emit(make("full", value=number if dtype.is_float else value, shape=(), dtype=dtype))
    return result


def wide(x: Value) -> Value:
    """`x` in the element type in which statistics are computed: float32 for 16-bit floats."""
    return x.cast(DType.float32) if x.dtype in (DType.float16, DType.bfloat16) else x


def wide_type(dtype: DType) -> DType:
    """The element type of statistics of `dtype`: float32 for 16-bit floats."""
    return DType.float32 if dtype in (DType.float16, DType.bfloat16) else dtype


@dataclass(frozen=True)
class Reduce(Operator):
    """`sum`, `max`, `min` or `prod` over `dims`, in the element type of `x`.

    `max` and `min` propagate NaN; on booleans they are `any` and `all`. Their gradient is split evenly among ties.
    """

    name = "reduce"
    kind: str
    dims: tuple[int, ...]
    keepdim: bool = False

    @property
    def label(self) -> str:
        return f"reduce.{self.kind}"

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        if self.kind not in KINDS:
            raise Invalid(f"reduce expects one of {', '.join(KINDS)}, given {self.kind!r}")
        if self.kind in ("max", "min") and 0 in [x.shape[d] for d in self.dims if d < x.rank]:
            raise Invalid(f"{self.label} over {self.dims} of {x} has no elements")
        return (reduced(x, self.dims, self.keepdim, self.label),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        (x,) = operands
        functions: dict[str, Callable[..., Array]] = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
        with np.errstate(all="ignore"):
            y = functions[self.kind](x, axis=self.dims, keepdims=self.keepdim)
        return (np.asarray(y, dtype=x.dtype),)

    def vjp(self, b: Builder, x: Value, y: Value, grad_y: Value) -> Value:
        gradient = restore(grad_y, x.shape, self.dims)
        match self.kind:
            case "sum":
                return gradient
            case "prod":
                return gradient * _others(x, self.dims)
            case _:
                ties = x.compare("eq", restore(y, x.shape, self.dims)).cast(x.dtype)
                return gradient * ties / ties.sum(self.dims, keepdim=True)

    def flops(self, *operands: Tensor) -> Dim:
        return operands[0].size


def _others(x: Value, dims: tuple[int, ...]) -> Value:
    """For each element, the product of the others that `prod` over `dims` multiplies it with; exact at zeros.

    A tree of pairwise products, downwards and back: 3n multiplications, and derivatives of every order.
    """
    count = product(x.shape[d] for d in dims)
    if not isinstance(count, int):
        raise Unsupported(f"the derivative of prod over a symbolic number of elements ({show_shape(x.shape)}, {dims})")
    kept = tuple(d for d in range(len(x.shape)) if d not in dims)
    order = (*kept, *dims)
    outer = tuple(x.shape[d] for d in kept)
    last = len(outer)

    def exclusive(v: Value, size: int) -> Value:
        if size <= 1:
            (ones,) = v.builder.emit(make("full", value=1.0, shape=v.shape, dtype=v.dtype))
            return ones
        half = (size + 1) // 2
        left, right = v.slice(last, 0, half), v.slice(last, half, size)
        if size % 2:
            right = right.apply(make("pad", pads=((0, 0),) * last + ((0, 1),), value=1.0))
        above = exclusive(left * right, half)
        pair = (above * right, above * left)
        (both,) = v.builder.emit(make("concat", dim=last), *pair)
        return both.slice(last, 0, size) if size % 2 else both

    flat = exclusive(x.permute(order).view((*outer, count)), count)
    return flat.view(tuple(x.shape[d] for d in order)).permute(tuple(order.index(d) for d in range(len(order))))


@dataclass(frozen=True)
class Mean(Operator):
    """The arithmetic mean over `dims`."""

    name = "mean"
    dims: tuple[int, ...]
    keepdim: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        require_float(x, "mean")
        return (reduced(x, self.dims, self.keepdim, "mean"),)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        (x,) = operands
        total = wide(x).sum(self.dims, self.keepdim)
        return ((total / scalar(b, product(x.shape[d] for d in self.dims), total.dtype)).cast(x.dtype),)

    def vjp(self, b: Builder, x: Value, grad_y: Value) -> Value:
        g = wide(grad_y)
        count = scalar(b, product(x.shape[d] for d in self.dims), g.dtype)
        return restore((g / count).cast(x.dtype), x.shape, self.dims)

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(operands[0].size + self.infer(*operands)[0].size)


@dataclass(frozen=True)
class Variance(Operator):
    """The mean squared distance from the mean over `dims`, with divisor `max(0, n - correction)`; two passes."""

    name = "variance"
    dims: tuple[int, ...]
    correction: int | float = 1
    keepdim: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        require_float(x, "variance")
        return (reduced(x, self.dims, self.keepdim, "variance"),)

    def divisor(self, shape: Shape) -> Dim | float:
        """The divisor of the sum of squares."""
        count = product(shape[d] for d in self.dims)
        if isinstance(count, int):
            return max(0, count - self.correction)
        return count - self.correction if self.correction <= 1 else sympy.Max(0, count - self.correction)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        (x,) = operands
        v = wide(x)
        squares = (v - v.mean(self.dims, keepdim=True)).unary("square").sum(self.dims, self.keepdim)
        return ((squares / scalar(b, self.divisor(x.shape), squares.dtype)).cast(x.dtype),)

    def vjp(self, b: Builder, x: Value, grad_y: Value) -> Value:
        v, g = wide(x), wide(grad_y)
        freedom = product(x.shape[d] for d in self.dims) - self.correction
        scaled = restore(g * 2 / scalar(b, freedom, g.dtype), x.shape, self.dims)
        return (scaled * (v - v.mean(self.dims, keepdim=True))).cast(x.dtype)

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(4 * operands[0].size + 2 * self.infer(*operands)[0].size)


@dataclass(frozen=True)
class LogSumExp(Operator):
    """`log(sum(exp(x)))` over `dims`, stable: the maximum is subtracted unless it is infinite."""

    name = "logsumexp"
    dims: tuple[int, ...]
    keepdim: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        require_float(x, "logsumexp")
        return (reduced(x, self.dims, self.keepdim, "logsumexp"),)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        (x,) = operands
        if 0 in [x.shape[d] for d in self.dims]:
            empty = reduced(x.tensor, self.dims, self.keepdim, "logsumexp")
            return b.emit(make("full", value=-math.inf, shape=empty.shape, dtype=empty.dtype))
        v = wide(x)
        largest = v.reduce("max", self.dims, keepdim=True)
        shift = largest.unary("isinf").where(0.0, largest)
        total = (v - shift).unary("exp").sum(self.dims, self.keepdim).unary("log")
        return ((total + shift.view(total.shape)).cast(x.dtype),)

    def vjp(self, b: Builder, x: Value, y: Value, grad_y: Value) -> Value:
        return restore(grad_y, x.shape, self.dims) * (x - restore(y, x.shape, self.dims)).unary("exp")

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(13 * operands[0].size + 12 * self.infer(*operands)[0].size)
