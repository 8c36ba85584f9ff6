"""Contract: which sums of products are matmuls.

Axes are batch (of both factors and the result), rows M (of one factor and the result), columns N (of the other), and
depth K (reduced, of both). Without rows or columns, a loop nest is faster than a matmul of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from daceml_train.expressions.term import Axis
from daceml_train.ops.operator import Value

_LEAST = 4
"""Fewer rows, columns, or terms than this are no matmul."""


@dataclass(frozen=True)
class Factor:
    """One factor: the axes it depends on."""

    axes: list[Axis]


@dataclass(frozen=True)
class Layout:
    """A matmul: the axes of each role, and the order in which each factor is read."""

    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    depth: tuple[Axis, ...]
    axes: tuple[Axis, ...]

    @property
    def orders(self) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """The axes of the left and the right factor, outermost first."""
        return (*self.batch, *self.rows, *self.depth), (*self.batch, *self.depth, *self.columns)

    def emit(self, left: Value, right: Value) -> Value:
        """The matmul of the factors, over the axes of the stage."""
        b, m, n, k = (prod(a.size for a in role) for role in (self.batch, self.rows, self.columns, self.depth))
        flat = (left.view((b, m, k)), right.view((b, k, n))) if self.batch else (left.view((m, k)), right.view((k, n)))
        result = (flat[0] @ flat[1]).view(tuple(a.size for a in (*self.batch, *self.rows, *self.columns)))
        found = (*self.batch, *self.rows, *self.columns)
        return result.permute(tuple(next(d for d, f in enumerate(found) if f is a) for a in self.axes))


def contracted(axes: Sequence[Axis], reduced: Sequence[Axis], factors: Sequence[Factor]) -> Layout | None:
    """The matmul of a sum over `reduced` of the product of two factors, or None where a loop nest is better."""
    left, right = (set(f.axes) for f in factors)
    batch = tuple(a for a in axes if a in left and a in right)
    rows = tuple(a for a in axes if a in left and a not in right)
    columns = tuple(a for a in axes if a in right and a not in left)
    if len(batch) + len(rows) + len(columns) < len(axes) or any(a not in left or a not in right for a in reduced):
        return None
    if min(prod(a.size for a in role) for role in (rows, columns, tuple(reduced))) < _LEAST:
        return None
    return Layout(batch, rows, columns, tuple(reduced), tuple(axes))
