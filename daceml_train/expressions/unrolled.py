"""Unrolled: a reduction over a window of few elements as elementwise operators on one read per element.

A loop of three elements inside a loop over pixels is no vector. As elementwise operators, the window is part of the
loop over results, which is one, and fuses with what is around it. Sums of products are left as they are: schedules are
searched for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod

from daceml_train.expressions.program import Stage
from daceml_train.expressions.term import Axis, Term, children
from daceml_train.ops.operator import Value, make
from daceml_train.ops.reduction import wide
from daceml_train.tensor import DType

WINDOW = 9
"""The most elements of a window that is unrolled."""
WORK = 512
"""The most operators of all elements together."""
_PAIRS = {"sum": "add", "prod": "mul", "amax": "maximum", "amin": "minimum"}
Read = Callable[[dict[Axis, int]], Value]


def window(stage: Stage, readable: Callable[[Term], bool]) -> tuple[Axis, ...]:
    """The reduced axes of a stage that are unrolled: few elements, each of which reads arrays under affine maps."""
    terms = list(children(stage.body))
    product = all(t.op in ("load", "number", "mul", "cast", "axis", "add", "sub", "neg") for t in terms)
    if stage.kind == "point" or (stage.kind == "sum" and product):
        return ()
    chosen: list[Axis] = []
    for axis in sorted(stage.reduced, key=lambda a: a.size):
        if prod(a.size for a in (*chosen, axis)) <= WINDOW:
            chosen.append(axis)
    count = prod(a.size for a in chosen)
    partial = len(chosen) < len(stage.reduced)
    if count < 2 or len(terms) * count > WORK or (partial and stage.kind not in _PAIRS):
        return ()
    return tuple(a for a in stage.reduced if a in chosen) if all(readable(t) for t in terms if t.op == "load") else ()


def unrolled(stage: Stage, axes: Sequence[Axis], element: Read) -> Value:
    """The reduction over a window's `axes` of what `element` computes at each place of it."""
    places = [dict(zip(axes, place, strict=True)) for place in itertools.product(*(range(a.size) for a in axes))]
    values = [element(place) for place in places]
    if stage.kind in ("argmax", "argmin"):
        return _position(stage.kind, values).cast(stage.target.dtype)
    values = [v.cast(stage.target.dtype) for v in values]
    if stage.kind == "lse":
        return _logsumexp(values)
    values = [wide(v) for v in values] if stage.kind in ("sum", "prod") else values
    return _combined(_PAIRS[stage.kind], values).cast(stage.target.dtype)


def _combined(kind: str, values: Sequence[Value]) -> Value:
    """Neighbors are combined first, so that errors of sums grow with the logarithm of their number."""
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [p[0].builder.emit(make(kind), *p)[0] if len(p) == 2 else p[0] for p in pairs]
    return values[0]


def _logsumexp(values: Sequence[Value]) -> Value:
    best = _combined("maximum", values)
    finite = best.unary("isinf").where(best.constant(0.0), best)  # of infinities, no difference is taken
    return _combined("add", [(v - finite).unary("exp") for v in values]).unary("log") + finite


def _position(kind: str, values: Sequence[Value]) -> Value:
    """The first position of an extremum; NaN is one."""
    emit = values[0].builder.emit
    best = _combined("maximum" if kind == "argmax" else "minimum", values)
    shape = (1,) * len(values[0].shape)
    numbers = [emit(make("full", value=n, shape=shape, dtype=DType.int32))[0] for n in range(len(values))]
    found = numbers[-1]
    for value, number in zip(values[-2::-1], numbers[-2::-1], strict=True):
        here = value.compare("eq", best)
        if value.dtype.is_float:  # the extremum is NaN if any element is
            (here,) = emit(make("logical_or"), here, value.compare("ne", value))
        found = here.where(number, found)
    return found
