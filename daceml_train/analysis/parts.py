"""Parts: which elements of arrays in memory a name shows, through aliases."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import sympy

from daceml_train.ops.movement import Expand, Permute, Slice, View
from daceml_train.ops.operator import Operator
from daceml_train.ops.read import Read
from daceml_train.tensor import Dim, Shape, Tensor, product, same, simplify


@dataclass(frozen=True)
class Part:
    """The elements of array `root` that a name covers: `factor * product(extents)` distinct ones.

    `extents` follows the dimensions of the name; it is 1 where the name repeats elements by broadcasting.
    """

    root: str
    extents: Shape
    factor: Dim = 1

    @property
    def size(self) -> Dim:
        return simplify(self.factor * product(self.extents))


def shown(op: Operator, part: Part, before: Tensor, after: Tensor) -> Part:
    """The elements that the result of an alias covers, given those that its operand covers."""
    match op:
        case Permute(dims=dims):
            return dataclasses.replace(part, extents=tuple(part.extents[d] for d in dims))
        case Expand():
            return dataclasses.replace(part, extents=(1,) * (after.rank - before.rank) + part.extents)
        case Slice(dim=dim):
            if same(part.extents[dim], 1) and not same(before.shape[dim], 1):
                return part  # repeated elements: fewer repetitions
            extents = tuple(after.shape[d] if d == dim else e for d, e in enumerate(part.extents))
            return dataclasses.replace(part, extents=extents)
        case Read():  # windows overlap: the elements of the operand count, not their repetitions
            size = op.distinct(part.extents)
            return Part(part.root, (1,) * after.rank, simplify(part.factor * size))
        case View():
            if part.extents == before.shape or same(after.size, 0):
                return dataclasses.replace(part, extents=after.shape)
            return Part(part.root, after.shape, part.factor * sympy.sympify(product(part.extents)) / after.size)
    raise AssertionError(f"{op.label} is no alias")
