"""Affine index maps and the ranges of index expressions."""

from __future__ import annotations

from collections.abc import Mapping

from daceml_train.expressions.term import Axis, Term, apply, at, children, constant, number

Map = dict[Axis | None, int]
"""Axis -> coefficient; None -> the constant. Axes are in the order of first use: texts must not depend on hashes."""
Interval = tuple[int, int]


def affine(term: Term) -> Map | None:
    """A term as a linear function of axes, or None if it is not one. Coefficients of zero are dropped."""
    match term.op:
        case "number":
            return {None: term.value} if isinstance(term.value, int) else None
        case "axis":
            return {term.axis: 1}
        case "neg":
            return _combined(affine(term.args[0]), {}, -1, 0)
        case "add" | "sub":
            return _combined(affine(term.args[0]), affine(term.args[1]), 1, 1 if term.op == "add" else -1)
        case "mul":
            a, b = affine(term.args[0]), affine(term.args[1])
            for x, y in ((a, b), (b, a)):
                if x is not None and y is not None and set(x) <= {None}:
                    return _combined(y, {}, x.get(None, 0), 0)
    return None


def _combined(a: Map | None, b: Map | None, s: int, t: int) -> Map | None:
    if a is None or b is None:
        return None
    total = {k: s * a.get(k, 0) + t * b.get(k, 0) for k in dict.fromkeys((*a, *b))}
    return {k: v for k, v in total.items() if v}


def of_map(coefficients: Mapping[Axis | None, int]) -> Term:
    """The term of an affine map."""
    result = number(0)
    for axis, c in coefficients.items():
        if axis is not None and c:
            result = apply("add", result, apply("mul", c, at(axis)))
    return apply("add", result, coefficients.get(None, 0))


def interval(term: Term) -> Interval | None:
    """The least and the greatest value of an index expression; None where it depends on data.

    The range of an affine map is exact; other expressions combine the ranges of their operands. It is 0..-1 where an
    axis has no index, so that nothing is read.
    """
    if any(t.axis is not None and t.axis.size == 0 for t in children(term)):
        return 0, -1
    return _range(term)


def _range(term: Term) -> Interval | None:
    coefficients = affine(term)
    if coefficients is not None:
        low = high = coefficients.get(None, 0)
        for axis, c in coefficients.items():
            if axis is not None:
                end = c * (axis.size - 1)
                low, high = low + min(0, end), high + max(0, end)
        return low, high
    parts = [_range(a) for a in term.args]
    if term.op == "remainder" and (divisor := constant(term.args[1])) and divisor > 0:
        inner = parts[0]
        return inner if inner and inner[0] >= 0 and inner[1] < divisor else (0, divisor - 1)
    if term.op == "clamp" and parts[1] and parts[2]:
        if parts[0] is None:
            return parts[1][0], parts[2][1]
        return tuple(min(max(v, parts[1][0]), parts[2][1]) for v in parts[0])  # type: ignore[return-value]
    if term.op == "where":
        parts = parts[1:]
    if any(p is None for p in parts) or not parts:
        return None
    return _combine(term.op, [p for p in parts if p is not None])


def _combine(op: str, parts: list[Interval]) -> Interval | None:
    a, b = parts[0], parts[-1]
    match op:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "neg":
            return -a[1], -a[0]
        case "mul":
            ends = [x * y for x in a for y in b]
            return min(ends), max(ends)
        case "floor_divide" if b[0] > 0:
            ends = [x // y for x in a for y in b]
            return min(ends), max(ends)
        case "where":
            return min(a[0], b[0]), max(a[1], b[1])
        case "maximum":
            return max(a[0], b[0]), max(a[1], b[1])
        case "minimum":
            return min(a[0], b[0]), min(a[1], b[1])
    return None


def inside(index: Term, size: int) -> bool | None:
    """Whether an index is within `0..size-1` for all values of its axes; None where that depends on data."""
    found = interval(index)
    return None if found is None else found[0] >= 0 and found[1] < size
