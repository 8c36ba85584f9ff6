"""Lookups: reads and stores at places that depend on data, and which axes index an array without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from daceml_train.expressions.term import Axis, Term, children


@dataclass(frozen=True)
class Lookup:
    """The axes of a read or store in an order that its indices alone determine.

    So a derivative, whose stages have their axes in another order, looks up the same array as the expression itself.
    """

    along: tuple[Axis, ...]
    """Those that index the first dimensions, from end to end; none where there are rows."""
    between: tuple[Axis, ...]
    """Others on which the places depend."""
    rows: tuple[Axis, ...]
    """Those that index the last dimensions, from end to end and nothing else: rows lie in one piece."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All of them."""
        return (*self.along, *self.between, *self.rows)


def lookup(indices: Sequence[Term], shape: Sequence[int], domain: Sequence[Axis]) -> Lookup:
    """The axes of `domain` of a lookup in an array of this shape."""
    rows = _whole_rows(indices, shape, domain)
    along = [] if rows else _first_axes(indices, shape, domain)
    places = indices[len(along) : len(shape) - len(rows)]
    between = dict.fromkeys(a for i in places for a in axes_of(i) if a in domain and a not in along)
    return Lookup(tuple(along), tuple(between), tuple(rows))


def _whole_rows(indices: Sequence[Term], shape: Sequence[int], domain: Sequence[Axis]) -> list[Axis]:
    found: list[Axis] = []
    for d in reversed(range(1, len(shape))):
        axis = indices[d].axis
        others = (*indices[:d], *indices[d + 1 :])
        if axis is None or axis not in domain or axis.size != shape[d] or any(axis in axes_of(i) for i in others):
            break
        found.insert(0, axis)
    return found if prod(a.size for a in found) > 1 else []


def _first_axes(indices: Sequence[Term], shape: Sequence[int], domain: Sequence[Axis]) -> list[Axis]:
    found: list[Axis] = []
    for index, size in zip(indices[:-1], shape, strict=False):
        axis = index.axis
        if axis is None or axis not in domain or axis in found or axis.size != size or not size:
            break
        found.append(axis)
    return found


def axes_of(term: Term) -> dict[Axis, None]:
    """The axes that a term contains."""
    return {t.axis: None for t in children(term) if t.axis is not None}
