"""Domain: the axes over which the body of a kernel iterates, and the ways to split them into rows and lanes.

Every dimension of every value is a list of axes. Elementwise operators align them, reductions remove them, movement
reorders, adds, splits and merges them; so one index per axis identifies an element of each value. Movement on an
argument becomes the indexing under which the argument is read; on a computed value it only permutes axes. This module
is independent of memory strides and of DaCe.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from daceml_train.ops.operator import Operator
from daceml_train.tensor import Dim, DType, same, simplify

Axes = frozenset[int]


@dataclass(frozen=True)
class Leaf:
    """One value of the body without movement: an argument read, a constant, or an operator on other leaves."""

    name: str
    op: Operator | None
    """None for an argument that is read."""
    inputs: tuple[str, ...]
    dtype: DType
    axes: Axes
    """The axes on which the value depends."""
    reduced: Axes = frozenset()
    index: tuple[tuple[int, Dim], ...] = ()
    """`iota` and `uniform`: (axis, coefficient) whose sum is the index."""
    argument: int = -1
    terms: tuple[tuple[int, int, Dim], ...] = ()
    """An argument read: (axis, dimension of the argument, multiple of that dimension's stride)."""
    offset: tuple[tuple[int, Dim], ...] = ()
    """An argument read: (dimension of the argument, multiple of its stride) before the first element."""


@dataclass(frozen=True)
class Result:
    """A yielded value: its leaf, the axes of each of its dimensions, and the argument over which it is stored."""

    leaf: str
    dims: tuple[tuple[int, ...], ...]
    dtype: DType
    target: int | None = None

    @property
    def axes(self) -> Axes:
        """All axes over which the result is stored."""
        return frozenset(axis for dim in self.dims for axis in dim)


@dataclass(frozen=True)
class Split:
    """Rows: axes of the parallel and sequential loops. Lanes: axes of the vector loops."""

    rows: Axes
    lanes: Axes


@dataclass(frozen=True)
class Domain:
    """What `analyze` found: sizes of the axes, leaves in order, results, and the legal splits.

    No split at all means that every split is legal: the kernel has no reductions, or only full ones.
    """

    sizes: tuple[Dim, ...]
    leaves: dict[str, Leaf]
    results: tuple[Result, ...]
    splits: tuple[Split, ...]

    @property
    def axes(self) -> Axes:
        """All axes."""
        return frozenset(range(len(self.sizes)))


def divide(a: Dim, b: Dim) -> Dim | None:
    """`a / b` if that is an integer for all sizes, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return None if b == 0 or a % b else a // b
    if same(b, 0):
        return None
    quotient = sympy.cancel(sympy.sympify(a) / b)
    numerator, denominator = sympy.fraction(quotient)
    if denominator != 1:
        return None
    if numerator.free_symbols and not all(c.is_Integer for c in sympy.Poly(numerator).coeffs()):
        return None
    return simplify(quotient)
