"""Read: an affine view. Windows, strides, dilations, and diagonals are reads of one array under an index map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.ops.indexing import IndexPut, zeros
from daceml_train.ops.movement import Movement
from daceml_train.ops.operator import Array, Builder, Value, make
from daceml_train.tensor import Dim, DType, Shape, Tensor, product, simplify


def _negative(size: Dim) -> bool:
    """Whether a size is known to be negative."""
    return size < 0 if isinstance(size, int) else bool(size.is_negative)


@dataclass(frozen=True)
class Read(Movement):
    """`y[i] = x[offsets + sum of coefficients * i]`, with sizes `shape`.

    `terms` are triples (dimension of y, dimension of x, coefficient). A dimension of y without a term repeats elements;
    several terms of one dimension of y read a diagonal, several of one dimension of x a window. Every index lies within
    `x`: what lies outside is padded before.
    """

    name = "read"
    shape: Shape
    terms: tuple[tuple[int, int, int], ...]
    offsets: tuple[int, ...]

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        if len(self.offsets) != x.rank or any(c == 0 for _, _, c in self.terms):
            raise Invalid(f"read expects {x.rank} offsets and coefficients other than 0 for {x}, given {self}")
        if any(not (0 <= d < len(self.shape) and 0 <= of < x.rank) for d, of, _ in self.terms):
            raise Invalid(f"read of {x} names a dimension that does not exist: {self}")
        for dim, size in enumerate(x.shape):
            ends = [c * (self.shape[d] - 1) for d, of, c in self.terms if of == dim]
            low = self.offsets[dim] + sum(e for e in ends if _negative(e))
            high = simplify(self.offsets[dim] + sum(e for e in ends if not _negative(e)))
            if 0 not in self.shape and (_negative(low) or _negative(simplify(size - 1 - high))):
                raise Invalid(f"read of {x} leaves dimension {dim}: indices run over {low}..{high}")
        return (Tensor(self.shape, x.dtype),)

    def strides(self, strides: Sequence[Dim]) -> tuple[tuple[Dim, ...], Dim]:
        """Strides and offset of the view, in an operand of these strides."""
        found: list[Dim] = [0] * len(self.shape)
        for d, of, c in self.terms:
            found[d] = simplify(found[d] + c * strides[of])
        return tuple(found), simplify(sum((o * s for o, s in zip(self.offsets, strides, strict=True)), start=0))

    def distinct(self, shape: Shape) -> Dim:
        """An upper bound of the number of elements of `x` that are read."""
        spans = []
        for dim, size in enumerate(shape):
            own = [(self.shape[d], abs(c)) for d, of, c in self.terms if of == dim]
            within = simplify(sum((c * (n - 1) for n, c in own), start=0) + 1)
            spans.append(own[0][0] if len(own) == 1 else within)
            if isinstance(spans[-1], int) and isinstance(size, int):
                spans[-1] = min(spans[-1], size)
        found, all_of_them = product(spans), product(self.shape)
        return min(found, all_of_them) if isinstance(found, int) and isinstance(all_of_them, int) else found

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        (x,) = operands
        if 0 in self.shape:
            return (np.zeros(self.shape, x.dtype),)
        index = [np.full((1,) * len(self.shape), o) for o in self.offsets]
        for d, of, c in self.terms:
            step = [1] * len(self.shape)
            step[d] = -1
            index[of] = index[of] + c * np.arange(self.shape[d]).reshape(step)
        return (np.broadcast_to(x[tuple(index)] if index else x, self.shape),)

    def vjp(self, b: Builder, x: Value, grad_y: Value) -> Value:
        if not x.shape:
            return grad_y
        strides = Tensor(x.shape).strides
        steps, start = self.strides(strides)
        (place,) = b.emit(make("full", value=start, shape=(), dtype=DType.int64))
        for d, step in enumerate(steps):
            column = tuple(n if k == d else 1 for k, n in enumerate(self.shape))
            place = place + b.emit(make("iota", shape=column, dim=d, dtype=DType.int64, step=step))[0]
        flat = zeros(b, (product(x.shape),), x.dtype)
        put = IndexPut((0,), accumulate=True)
        return flat.apply(put, grad_y.expand(self.shape), place.expand(self.shape)).view(x.shape)
