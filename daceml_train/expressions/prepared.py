"""Prepared: the same program with less to compute, before it is lowered or run.

y[a, b] = sum(where(a == b, f(a, r), 0), r)  =>  t[a] = sum(f(a, r), r); y[a, b] = where(a == b, t[a], 0)
y[h] = f(h // 2, h % 2)                      =>  y[2 * i + j] = f(i, j)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from daceml_train.expressions.affine import of_map
from daceml_train.expressions.program import Program, Stage
from daceml_train.expressions.term import (
    Array,
    Axis,
    Term,
    apply,
    at,
    children,
    constant,
    free_axes,
    load,
    rebuilt,
    substituted,
)


@functools.lru_cache(maxsize=1024)
def prepared(program: Program) -> Program:
    """The program with guards outside of sums, and axes of which only quotient and remainder are read split in two."""
    stages = [part for stage in program.stages for part in _guarded(stage)]
    return Program(program.inputs, tuple(map(_split, stages)), program.outputs)


def _guarded(stage: Stage) -> Iterator[Stage]:
    """The stage with a guard that no reduced axis is in outside of its sum, where the sum then has fewer axes."""
    body = stage.body
    guards = []
    while body.op == "where" and constant(body.args[2]) == 0 and not set(free_axes(body.args[0])) & set(stage.reduced):
        guards.append(body.args[0])
        body = body.args[1]
    used = set(free_axes(body))
    axes = tuple(a for a in stage.axes if a in used)
    if stage.kind != "sum" or not guards or len(axes) == len(stage.axes) or not stage.target.dtype.is_float:
        yield stage
        return
    if not set(stage.reduced) <= used:  # the sum counts what does not depend on an axis
        yield stage
        return
    inner = tuple(Axis(a.size, a.name) for a in axes)
    total = Array("total", tuple(a.size for a in axes), stage.target.dtype)
    renamed = {a: at(i) for a, i in zip(axes, inner, strict=True)}
    yield Stage(total, inner, "sum", stage.reduced, substituted(body, renamed))
    value: Term = load(total, map(at, axes))
    for guard in reversed(guards):
        value = apply("where", guard, value, 0.0)
    yield replace(stage, kind="point", reduced=(), body=value)


def _split(stage: Stage) -> Stage:
    """The stage with each axis `h` of which `h // s` or `h % s` is read as two axes, if `s` divides its size."""
    for axis in stage.axes:
        step = _step(stage, axis)
        if step is None:
            continue
        high, low = Axis(axis.size // step, axis.name), Axis(step, axis.name)
        digits = {"floor_divide": at(high), "remainder": at(low)}

        def digit(term: Term, axis: Axis = axis, step: int = step, digits: dict[str, Term] = digits) -> Term:
            return digits[term.op] if _is_digit(term, axis, step) else term

        whole = {axis: of_map({high: step, low: 1})}
        body, *store = (substituted(rebuilt(t, digit), whole) for t in (stage.body, *stage.store))
        axes = tuple(new for a in stage.axes for new in ((high, low) if a is axis else (a,)))
        stage = replace(stage, axes=axes, body=body, store=tuple(store))
    return stage


def _is_digit(term: Term, axis: Axis, step: int | None = None) -> bool:
    if term.op not in ("floor_divide", "remainder") or term.args[0].axis is not axis:
        return False
    divisor = constant(term.args[1])
    return isinstance(divisor, int) and (divisor == step if step is not None else 1 < divisor < axis.size)


def _step(stage: Stage, axis: Axis) -> int | None:
    """The one number by which an axis is divided; None if there is none, or if it does not divide the axis's size."""
    found = {constant(t.args[1]) for t in children(stage.body) if _is_digit(t, axis)}
    found |= {0} if any(_is_digit(t, axis) for s in stage.store for t in children(s)) else set()
    step = next(iter(found), 0)
    return int(step) if len(found) == 1 and step and axis.size % step == 0 else None


__all__ = ["prepared"]
