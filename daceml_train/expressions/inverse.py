"""Inverse: from a scatter to gathers, by solving index maps.

`target[f(i, r)] += value(i, r)` is solved dimension by dimension for the axis of largest extent, whose loop vanishes.
A coefficient s > 1 divides the result into s phases, each a dense stage with strided stores. What cannot be solved,
because an index depends on data, remains a scatter. What a clamped index reads is first added where it would be read
without the clamp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd

from daceml_train.expressions.affine import Map, affine, inside, interval, of_map
from daceml_train.expressions.program import Stage
from daceml_train.expressions.term import (
    Array,
    Axis,
    Term,
    apply,
    at,
    children,
    constant,
    load,
    number,
    rebuilt,
    substituted,
)

_AROUND = 4
"""Elements around a dimension per element in it, up to which what a clamped index reads is added there first."""


@dataclass(frozen=True)
class _Phase:
    """A part of the result while its dimensions are solved."""

    alive: dict[Axis, None]
    """The axes that are still loops: a dict, for its order."""
    values: dict[Axis, Term] = field(default_factory=dict)
    """Solved axes, in terms of axes of the result and of loops that are left."""
    place: dict[int, Term] = field(default_factory=dict)
    """Dimension of the result -> its index."""
    guards: tuple[Term, ...] = ()
    axes: tuple[Axis, ...] = ()

    def solved(self, dim: int, place: Term, axis: Axis, values: dict[Axis, Term], guards: Sequence[Term]) -> _Phase:
        """This phase with one more dimension solved."""
        alive = {a: None for a in self.alive if a not in values}
        alive |= {a: None for v in values.values() for a in _axes(v) if a not in self.axes and a is not axis}
        composed = {a: substituted(v, values) for a, v in self.values.items()} | values
        return _Phase(alive, composed, self.place | {dim: place}, (*self.guards, *guards), (*self.axes, axis))


def _axes(term: Term) -> list[Axis]:
    return [t.axis for t in children(term) if t.axis is not None]


def gathers(
    target: Array, index: Sequence[Term], domain: Sequence[Axis], value: Term, checked: bool = False
) -> list[Stage]:
    """Stages that add `value`, over `domain`, to `target[index]`; a `checked` index is inside."""
    split, change = _split_axes(domain, index)
    index, value = [change(i) for i in index], change(value)
    for dim, (i, n) in enumerate(zip(index, target.shape, strict=True)):
        if (around := _around(i, n)) is not None:
            before, after = around
            shape = tuple(before + n + after if d == dim else size for d, size in enumerate(target.shape))
            wide = Array(f"around_{target.name}", shape, target.dtype)
            unclamped = [apply("add", k.args[0], before) if d == dim else k for d, k in enumerate(index)]
            parts = gathers(wide, unclamped, split, value, checked)
            return [*parts, *_folded(target, wide, dim, before, after)] if parts else []
    wrapped = [_wraps(i, n) for i, n in zip(index, target.shape, strict=True)]
    maps = [affine(i.args[0] if w else i) for i, w in zip(index, wrapped, strict=True)]
    known = [m for m in maps if m is not None]
    if len(known) < len(maps):
        return [Stage(target, tuple(split), "point", (), value, tuple(index), True, checked)]
    phases = [_Phase(dict.fromkeys(split))]
    for dim in sorted(range(len(maps)), key=lambda d: len([a for a in known[d] if a is not None])):
        solve = _wrapped if wrapped[dim] else _solved
        phases = [result for phase in phases for result in solve(phase, dim, target.shape[dim], known[dim])]
    return [_stage(phase, target, value) for phase in phases]


def _around(index: Term, size: int) -> tuple[int, int] | None:
    """How far a clamped affine index leaves a dimension below and above; None for any other, or where that is far."""
    if index.op != "clamp" or tuple(map(constant, index.args[1:])) != (0, size - 1):
        return None
    found = interval(index.args[0]) if affine(index.args[0]) is not None else None
    if found is None:
        return None
    before, after = max(0, -found[0]), max(0, found[1] - size + 1)
    return (before, after) if before + after <= _AROUND * size else None


def _folded(target: Array, wide: Array, dim: int, before: int, after: int) -> Iterator[Stage]:
    """Stages that add `wide`, which has more elements around those of `target`, where the nearest element is."""
    n = target.shape[dim]

    def part(start: int, count: int, place: int, summed: bool) -> Stage:
        axes = [Axis(count if d == dim else size) for d, size in enumerate(target.shape)]
        read = [of_map({a: 1, None: start if d == dim else 0}) for d, a in enumerate(axes)]
        store = [of_map({a: 1, None: place if d == dim else 0}) for d, a in enumerate(axes)]
        if not summed:
            return Stage(target, tuple(axes), "point", (), load(wide, read), tuple(store), True)
        store[dim] = number(place)
        others = tuple(a for d, a in enumerate(axes) if d != dim)
        return Stage(target, others, "sum", (axes[dim],), load(wide, read), tuple(store), True)

    if n == 1:
        yield part(0, wide.shape[dim], 0, True)
        return
    low, high = int(before > 0), int(after > 0)
    if low:
        yield part(0, before + 1, 0, True)
    if n - low - high > 0:
        yield part(before + low, n - low - high, low, False)
    if high:
        yield part(before + n - 1, after + 1, n - 1, True)


def _stage(phase: _Phase, target: Array, value: Term) -> Stage:
    body = _opened(value, phase.values)
    settled = set(_guards_by_fill(body)) if _multilinear(body) else set()
    for guard in phase.guards:
        condition = substituted(guard, phase.values)
        if condition not in settled and constant(condition) is not True:
            body = apply("where", condition, body, 0.0 if target.dtype.is_float else 0)
    loops = tuple(sorted(phase.alive, key=lambda a: a.number))
    place = tuple(phase.place[d] for d in range(len(target.shape)))
    return Stage(target, phase.axes, "sum" if loops else "point", loops, body, place, True)


def _split_axes(domain: Sequence[Axis], index: Sequence[Term]) -> tuple[list[Axis], Callable[[Term], Term]]:
    """Axes used as `i // s` and `i % s` become `i = s * outer + inner`, so that both are affine."""
    parts: dict[Axis, tuple[Axis, Axis, int]] = {}
    for term in (t for i in index for t in children(i)):
        if term.op in ("floor_divide", "remainder") and (axis := term.args[0].axis) and axis not in parts:
            s = constant(term.args[1])
            if isinstance(s, int) and 1 < s < axis.size and axis.size % s == 0 and axis in domain:
                parts[axis] = Axis(axis.size // s), Axis(s), s

    def replaced(term: Term) -> Term:
        if term.op in ("floor_divide", "remainder") and (axis := term.args[0].axis) in parts:
            outer, inner, s = parts[axis]
            if constant(term.args[1]) == s:
                return at(outer if term.op == "floor_divide" else inner)
        return term

    whole = {axis: of_map({outer: s, inner: 1}) for axis, (outer, inner, s) in parts.items()}
    axes = [a for old in domain for a in (parts[old][:2] if old in parts else (old,))]
    return axes, lambda term: substituted(rebuilt(term, replaced), whole) if parts else term


def _wraps(index: Term, size: int) -> bool:
    """Whether an index is `(+-axis + ...) % size` over an axis of that size, which is solved modulo the size."""
    if index.op != "remainder" or constant(index.args[1]) != size:
        return False
    inner = affine(index.args[0])
    return inner is not None and any(a is not None and abs(c) == 1 and a.size == size for a, c in inner.items())


def _current(phase: _Phase, coefficients: Map) -> Map:
    found = affine(substituted(of_map(coefficients), phase.values))
    return {} if found is None else found


def _fixed(phase: _Phase, dim: int, size: int, index: Term) -> _Phase:
    """A constant, or an index that earlier dimensions settled: one element of this dimension."""
    axis = Axis(size)
    return phase.solved(dim, at(axis), axis, {}, [apply("eq", at(axis), index)])


def _wrapped(phase: _Phase, dim: int, size: int, coefficients: Map) -> Iterator[_Phase]:
    index = substituted(of_map(coefficients), phase.values)
    found = affine(index)
    unknown = [a for a, c in (found or {}).items() if a in phase.alive and a is not None and abs(c) == 1]
    chosen = next((a for a in unknown if a.size == size), None)
    if chosen is None or found is None:
        yield _fixed(phase, dim, size, apply("remainder", index, size))
        return
    axis = Axis(size)
    rest = of_map({a: c for a, c in found.items() if a is not chosen})
    value = apply("remainder", apply("mul", found[chosen], apply("sub", at(axis), rest)), size)
    yield phase.solved(dim, at(axis), axis, {chosen: value}, ())


def _solved(phase: _Phase, dim: int, size: int, coefficients: Map) -> Iterator[_Phase]:
    """The phases of one affine dimension."""
    index = substituted(of_map(coefficients), phase.values)
    found = affine(index)
    unknown = [a for a in (found or {}) if a is not None and a in phase.alive]
    known = constant(index)
    if isinstance(known, int) and 0 <= known < size:  # one element, beside which others may be stored
        yield _Phase(phase.alive, phase.values, {**phase.place, dim: index}, phase.guards, phase.axes)
        return
    if found is None or not unknown:
        yield _fixed(phase, dim, size, index)
        return
    if _is_radix(found, unknown, size):  # every element is hit once: the axes are those of the result
        alive = {a: None for a in phase.alive if a not in unknown}
        place = {**phase.place, dim: index}
        yield _Phase(alive, phase.values, place, phase.guards, (*phase.axes, *unknown))
        return
    chosen = max(unknown, key=lambda a: (a.size, -abs(found[a])))
    s = abs(found[chosen])
    others = [a for a in unknown if a is not chosen]
    unit = next((a for a in others if gcd(found[a], s) == 1), None)
    dense = all(c % s == 0 for a, c in found.items() if a is not None and a is not chosen and a is not unit)
    if not dense:
        axis = Axis(size)
        left = {a: -c for a, c in found.items() if a is not chosen}
        rest = apply("add", of_map(left), at(axis))
        guard = apply("eq", apply("remainder", rest, s), 0)
        value = apply("floor_divide", rest if found[chosen] > 0 else apply("neg", rest), s)
        yield phase.solved(dim, at(axis), axis, {chosen: value}, [guard, *_within(value, chosen.size)])
        return
    for start in range(min(s, size)):
        result = _dense_phase(phase, dim, size, found, chosen, unit if s > 1 else None, start)
        if result is not None:
            yield result


def _is_radix(found: Map, axes: Sequence[Axis], size: int) -> bool:
    """Whether `c0 * i0 + c1 * i1 + ...` runs over `0..size-1`, each number once, as the digits of a number do."""
    if len(found) != len(axes) or len(axes) < 2:
        return False
    weight = 1
    for axis in sorted(axes, key=lambda a: found[a]):
        if found[axis] != weight:
            return False
        weight *= axis.size
    return weight == size


def _dense_phase(
    phase: _Phase, dim: int, size: int, found: Map, chosen: Axis, unit: Axis | None, start: int
) -> _Phase | None:
    """The elements `start, start + s, ...` of a dimension; None for a hole, whose gradient is zero."""
    s = abs(found[chosen])
    axis = Axis(-(-(size - start) // s))
    values: dict[Axis, Term] = {}
    current: Map = dict(found)
    constant_term = found.get(None, 0)
    if unit is not None:
        first = next(v for v in range(s) if (found[unit] * v + constant_term - start) % s == 0)
        count = -(-(unit.size - first) // s)
        if count <= 0:
            return None
        coarse = Axis(count)
        values[unit] = of_map({coarse: s, None: first})
        del current[unit]
        current[coarse] = found[unit] * s
        current[None] = constant_term + found[unit] * first
    elif (constant_term - start) % s:
        return None
    rest: Map = {a: -c for a, c in current.items() if a is not chosen}
    rest[axis] = rest.get(axis, 0) + s
    rest[None] = rest.get(None, 0) + start
    sign = 1 if found[chosen] > 0 else -1
    values[chosen] = of_map({a: sign * c // s for a, c in rest.items()})
    place = of_map({axis: s, None: start})
    return phase.solved(dim, place, axis, values, _within(values[chosen], chosen.size))


def _within(value: Term, size: int) -> list[Term]:
    found = interval(value)
    guards = [] if found and found[0] >= 0 else [apply("ge", value, 0)]
    return guards if found and found[1] < size else [*guards, apply("lt", value, size)]


def _multilinear(term: Term) -> bool:
    if term.op == "mul":
        return all(map(_multilinear, term.args))
    return term.op in ("load", "number") or (term.op in ("cast", "neg") and _multilinear(term.args[0]))


def _opened(term: Term, values: dict[Axis, Term]) -> Term:
    """A term with solved axes, whose reads yield zero where they may leave their arrays."""

    def change(t: Term) -> Term:
        if t.op != "load" or t.fill is not None or t.array is None:
            return t
        outside = any(inside(i, n) is False for i, n in zip(t.args, t.array.shape, strict=True))
        return load(t.array, t.args, 0.0 if t.array.dtype.is_float else 0, t.line) if outside else t

    return rebuilt(substituted(term, values), change)


def _guards_by_fill(body: Term) -> Iterator[Term]:
    """Range conditions that a factor of a product enforces itself, because it reads zero outside."""
    for term in children(body):
        if term.op == "load" and term.fill == 0 and term.array is not None and term.array.dtype.is_float:
            for index, size in zip(term.args, term.array.shape, strict=True):
                yield apply("ge", index, 0)
                yield apply("lt", index, size)
