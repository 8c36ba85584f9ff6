"""Views: affine reads as views of arrays, which have no negative strides, and as permutations where they are some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from daceml_train.expressions.affine import Map
from daceml_train.expressions.term import Axis
from daceml_train.ops.operator import Value
from daceml_train.ops.read import Read


def turned(maps: list[Map], strides: Sequence[Any]) -> set[Axis]:
    """Reverse the axes along which a row-major array would be read backwards; returns them."""
    total: dict[Axis, int] = {}
    for m, stride in zip(maps, strides, strict=True):
        for axis, c in m.items():
            if axis is not None:
                total[axis] = total.get(axis, 0) + c * stride
    backwards = {axis for axis, stride in total.items() if stride < 0}
    for m in maps:
        for axis in [a for a in m if a in backwards]:
            assert axis is not None
            m[None], m[axis] = m[None] + m[axis] * (axis.size - 1), -m[axis]
    return backwards


def plain(x: Value, shape: tuple[int, ...], terms: tuple[tuple[int, int, int], ...], offsets: tuple[int, ...]) -> Value:
    """A read; as a permutation with sizes of 1 where it is one, which every pass knows."""
    own = [d for d, _, _ in terms]
    simple = len(set(own)) == len(own) == len({of for _, of, _ in terms}) and all(c == 1 for _, _, c in terms)
    whole = all(o == 0 for o in offsets) and all(shape[d] == x.shape[of] for d, of, _ in terms)
    ones = all(x.shape[of] == 1 for of in range(len(x.shape)) if of not in {t[1] for t in terms})
    if not (simple and whole and ones):
        return x.apply(Read(shape, terms, offsets))
    dims = [of for _, of, _ in sorted(terms)] + [of for of in range(len(x.shape)) if of not in {t[1] for t in terms}]
    return x.permute(dims).view(shape)
