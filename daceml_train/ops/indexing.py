"""Indexing by arrays: gathering and scattering elements. Each is the derivative of the other.

Negative indices count from the end. The operators run as library calls, which check the indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Array, Builder, Operator, Value, make
from daceml_train.tensor import Dim, DType, Shape, Tensor, broadcast, same_shape, show_shape, simplify


def check_indices(label: str, *indices: Tensor) -> None:
    """Raise `Invalid` unless these are index arrays."""
    for index in indices:
        if index.dtype not in (DType.int64, DType.int32):
            raise Invalid(f"{label} expects i64 or i32 indices, given {index}")


def zeros(b: Builder, shape: Shape, dtype: DType) -> Value:
    """An array of zeros."""
    (result,) = b.emit(make("full", value=0.0 if dtype.is_float else 0, shape=shape, dtype=dtype))
    return result


def indexed(x: Tensor, indices: Sequence[Tensor], dims: Sequence[int]) -> Shape:
    """The sizes of `x` indexed along `dims`: those of the broadcast indices replace the dimensions, by NumPy's rule.

    They take the position of the first dimension if the dimensions are adjacent, else they come first.
    """
    between = broadcast(*(i.shape for i in indices))
    kept = [size for d, size in enumerate(x.shape) if d not in dims]
    first = dims[0] if tuple(dims) == tuple(range(dims[0], dims[0] + len(dims))) else 0
    return (*kept[:first], *between, *kept[first:])


@dataclass(frozen=True)
class Index(Operator):
    """`x[..., indices, ...]`: one index array per dimension of `dims`, all broadcast to one shape."""

    name = "index"
    operands = ("x", "*indices")
    vendor = True
    may_raise = True
    dims: tuple[int, ...]

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, *indices = operands
        check_dims("index", x, indices, self.dims)
        return (Tensor(indexed(x, indices, self.dims), x.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        x, *indices = operands
        return (np.array(x[where(x.ndim, self.dims, indices)]),)

    def vjp(
        self, b: Builder, x: Value, indices: tuple[Value, ...], grad_y: Value
    ) -> tuple[Value, tuple[Value | None, ...]]:
        put = IndexPut(self.dims, accumulate=True)
        return zeros(b, x.shape, x.dtype).apply(put, grad_y, *indices), (None,) * len(indices)

    def flops(self, *operands: Tensor) -> Dim:
        return 0


def check_dims(label: str, x: Tensor, indices: Sequence[Tensor], dims: Sequence[int]) -> None:
    """Raise `Invalid` unless there is one index array for each of some ascending dimensions of `x`."""
    check_indices(label, *indices)
    if not dims or list(dims) != sorted({d for d in dims if 0 <= d < x.rank}) or len(indices) != len(dims):
        raise Invalid(
            f"{label} expects an index array for each of some ascending dimensions of {x}, "
            f"given {len(indices)} for {tuple(dims)}"
        )


def where(rank: int, dims: Sequence[int], indices: Sequence[Array]) -> tuple[Array | slice, ...]:
    """NumPy's index of `indices` along `dims`."""
    chosen: list[Array | slice] = [slice(None)] * rank
    for d, index in zip(dims, indices, strict=True):
        chosen[d] = index
    return tuple(chosen)


@dataclass(frozen=True)
class IndexPut(Operator):
    """`x` with `values` at `indices` along `dims`; they replace the elements or, with `accumulate`, are added to them.

    The values have the sizes of `x` indexed so. Which of several values for one element is taken is unspecified.
    """

    name = "index_put"
    operands = ("x", "values", "*indices")
    vendor = True
    may_raise = True
    dims: tuple[int, ...]
    accumulate: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, values, *indices = operands
        check_dims("index_put", x, indices, self.dims)
        expected = indexed(x, indices, self.dims)
        if not same_shape(values.shape, expected) or values.dtype is not x.dtype:
            raise Invalid(f"index_put into {x} expects values {show_shape(expected)} of its type, given {values}")
        return (Tensor(x.shape, x.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        x, values, *indices = operands
        y, chosen = x.copy(), where(x.ndim, self.dims, indices)
        if self.accumulate:
            np.add.at(y, chosen, values)  # type: ignore[arg-type]
        else:
            y[chosen] = values
        return (y,)

    def vjp(
        self, b: Builder, values: Value, indices: tuple[Value, ...], grad_y: Value
    ) -> tuple[Value, Value, tuple[Value | None, ...]]:
        taken = grad_y.apply(Index(self.dims), *indices)
        if self.accumulate:
            return grad_y, taken, (None,) * len(indices)
        cut = zeros(b, (), values.dtype).expand(values.shape)
        return grad_y.apply(self, cut, *indices), taken, (None,) * len(indices)

    def flops(self, *operands: Tensor) -> Dim:
        return operands[1].size if self.accumulate else 0


@dataclass(frozen=True)
class Gather(Operator):
    """`y[i, j, k] = x[i, index[i, j, k], k]` for `dim` 1: the index selects the element along `dim`.

    In the other dimensions the index may be smaller than `x`; it then covers the first elements.
    """

    name = "gather"
    operands = ("x", "index")
    vendor = True
    may_raise = True
    dim: int

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, index = operands
        check_positions("gather", x, index, self.dim)
        return (Tensor(index.shape, x.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        x, index = operands
        return (np.array(x[along(index, self.dim)]),)

    def vjp(self, b: Builder, x: Value, index: Value, grad_y: Value) -> tuple[Value, None]:
        return zeros(b, x.shape, x.dtype).apply(Scatter(self.dim, accumulate=True), index, grad_y), None

    def flops(self, *operands: Tensor) -> Dim:
        return 0


def check_positions(label: str, x: Tensor, index: Tensor, dim: int) -> None:
    """Raise `Invalid` unless `index` is an index along `dim` of `x`."""
    check_indices(label, index)
    fits = index.rank == x.rank and 0 <= dim < x.rank
    rooms = [simplify(x.shape[d] - index.shape[d]) for d in range(x.rank) if d != dim] if fits else []
    if not fits or any(room < 0 if isinstance(room, int) else room.is_negative for room in rooms):
        raise Invalid(
            f"{label} along {dim} of {x} expects indices no larger than it in other dimensions, given {index}"
        )


def along(index: Array, dim: int) -> tuple[Array, ...]:
    """NumPy's index of the elements that `index` names along `dim`."""
    places: list[Array] = list(np.indices(index.shape, sparse=True))
    places[dim] = index
    return tuple(places)


@dataclass(frozen=True)
class Scatter(Operator):
    """`x` with `y[i, index[i, j, k], k] = values[i, j, k]` for `dim` 1, or, with `accumulate`, added there.

    Which of several values for one element is taken is unspecified. `in_place` stores the result over `x`.
    """

    name = "scatter"
    operands = ("x", "index", "values")
    vendor = True
    may_raise = True
    dim: int
    accumulate: bool = False
    in_place: bool = False

    @property
    def updates(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]
        """`x`, if the operator works in place."""
        return ((0, 0),) if self.in_place else ()

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, index, values = operands
        check_positions("scatter", x, index, self.dim)
        if not same_shape(values.shape, index.shape) or values.dtype is not x.dtype:
            raise Invalid(f"scatter into {x} expects values {show_shape(index.shape)} of its type, given {values}")
        return (Tensor(x.shape, x.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        x, index, values = operands
        y = x.copy()
        if self.accumulate:
            np.add.at(y, along(index, self.dim), values)
        else:
            y[along(index, self.dim)] = values
        return (y,)

    def vjp(self, b: Builder, index: Value, values: Value, grad_y: Value) -> tuple[Value, None, Value]:
        taken = grad_y.apply(Gather(self.dim), index)
        if self.accumulate:
            return grad_y, None, taken
        cut = zeros(b, (), values.dtype).expand(values.shape)
        return grad_y.apply(self, index, cut), None, taken

    def flops(self, *operands: Tensor) -> Dim:
        return operands[2].size if self.accumulate else 0


@dataclass(frozen=True)
class MaskedPut(Operator):
    """`x` with the rows of `values` [count, rest], in order, where `mask` is true; mask [lead], x [lead, rest].

    The mask must select as many positions as there are rows; the library call raises otherwise.
    """

    name = "masked_put"
    operands = ("x", "mask", "values")
    vendor = True
    may_raise = True

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, mask, values = operands
        check_mask("masked_put", x, mask)
        if not same_shape(values.shape[1:], x.shape[mask.rank :]) or values.rank == 0 or values.dtype is not x.dtype:
            raise Invalid(f"masked_put into {x} by {mask} expects rows of {x}, given {values}")
        return (Tensor(x.shape, x.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        x, mask, values = operands
        y = x.copy()
        y[mask] = values
        return (y,)

    def vjp(self, b: Builder, mask: Value, values: Value, grad_y: Value) -> tuple[Value, None, Value]:
        shape = (*mask.shape, *(1,) * (len(grad_y.shape) - len(mask.shape)))
        kept = mask.view(shape).where(0.0, grad_y)
        return kept, None, grad_y.apply(MaskedTake(values.shape[0]), mask)

    def flops(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True)
class MaskedTake(Operator):
    """The `count` rows of `x` [lead, rest] where `mask` [lead] is true, in order; it must select exactly that many."""

    name = "masked_take"
    operands = ("x", "mask")
    vendor = True
    may_raise = True
    count: Dim

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, mask = operands
        check_mask("masked_take", x, mask)
        return (Tensor((self.count, *x.shape[mask.rank :]), x.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        x, mask = operands
        return (x[mask],)

    def vjp(self, b: Builder, x: Value, mask: Value, grad_y: Value) -> tuple[Value, None]:
        return zeros(b, x.shape, x.dtype).apply(MaskedPut(), mask, grad_y), None

    def flops(self, *operands: Tensor) -> Dim:
        return 0


def check_mask(label: str, x: Tensor, mask: Tensor) -> None:
    """Raise `Invalid` unless `mask` covers the first dimensions of `x`."""
    if mask.dtype is not DType.bool or mask.rank == 0 or not same_shape(mask.shape, x.shape[: mask.rank]):
        raise Invalid(f"{label} expects a mask over the first dimensions of {x}, given {mask}")
