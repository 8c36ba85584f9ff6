"""Adjoint: reverse-mode differentiation of programs. The result is a program, so derivatives of every order follow.

A read `x[f(i, r)]` in `y[i] = sum over r of e` contributes `dy[i] * de/dx` to `dx[f(i, r)]`; `inverse` turns that into
gathers. Pointwise rules are the formulas of `ops.elementwise`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from daceml_train.errors import Unsupported
from daceml_train.expressions.affine import of_map
from daceml_train.expressions.functions import FORMULAS
from daceml_train.expressions.inverse import gathers
from daceml_train.expressions.program import Program, Stage, parsed
from daceml_train.expressions.term import (
    Array,
    Axis,
    Term,
    apply,
    at,
    cast,
    children,
    constant,
    lift,
    load,
    number,
    substituted,
)
from daceml_train.ops.elementwise import TABLE
from daceml_train.tensor import DType


@functools.cache
def _compiled(formula: str) -> Any:
    return compile(formula, formula, "eval")


_FINITE = frozenset(
    {"add", "sub", "mul", "neg", "abs", "maximum", "minimum", "where", "cast", "load", "number", "axis"}
)
"""Operators whose derivatives are finite where their operands are."""


def partials(body: Term, seed: Term) -> list[tuple[Term, Term]]:
    """The reads of floating-point arrays in a body, each with its cotangent.

    Where positions alone decide which branch counts, the other one may not even be defined: it reads what stands in for
    elements that do not exist. Its derivatives do not count either, also where they are infinite.
    """
    cotangents: dict[Term, Term] = {body: seed}
    found: list[tuple[Term, Term]] = []
    for term in reversed(list(children(body))):
        g = cotangents.pop(term, None)
        if g is None or constant(g) == 0:
            continue
        if term.op == "load" and term.dtype is not None and term.dtype.is_float:
            found.append((term, g))
        elif _guards(term):
            condition, *branches = term.args
            for branch, holds in zip(branches, (True, False), strict=True):
                for read, value in partials(branch, g):
                    chosen = (value, 0.0) if holds else (0.0, value)
                    found.append((read, apply("where", condition, *chosen)))
        elif term.op == "cast" and (source := term.args[0].dtype) is not None and source.is_float:
            _add(cotangents, term.args[0], cast(g, source))
        elif term.op in TABLE:
            scope = dict(zip("abc", term.args, strict=False)) | {"y": term, "g": g}
            for operand, formula in zip(term.args, TABLE[term.op].gradients, strict=False):
                carries = operand.dtype is not None and operand.dtype.is_float
                if formula not in (None, "0") and carries and _depends(operand):
                    value = eval(_compiled(formula), {**FORMULAS, "__builtins__": {}}, scope)
                    assert operand.dtype is not None
                    _add(cotangents, operand, cast(lift(value), operand.dtype))
    return found


def _guards(term: Term) -> bool:
    """Whether a term chooses by position between branches of which one has derivatives that may be infinite."""
    if term.op != "where" or any(t.op == "load" for t in children(term.args[0])):
        return False
    inside = (t for branch in term.args[1:] if _depends(branch) for t in children(branch))
    return any(t.op not in _FINITE and t.dtype is not None and t.dtype.is_float for t in inside)


def _depends(term: Term) -> bool:
    """Whether a term reads a floating-point array, so that it can have a gradient."""
    return any(t.op == "load" and t.dtype is not None and t.dtype.is_float for t in children(term))


def _add(cotangents: dict[Term, Term], term: Term, value: Term) -> None:
    cotangents[term] = apply("add", cotangents[term], value) if term in cotangents else value


class _Adjoint:
    """One reverse pass."""

    def __init__(self, program: Program, seeds: dict[Array, Array], wanted: Sequence[Array]) -> None:
        self.program, self.seeds = program, seeds
        self.stages: list[Stage] = []
        self.pending: dict[Array, list[tuple[Term, Sequence[Axis], Term]]] = {}
        self.gradients: dict[Array, Array] = {}
        self.zeros: set[Array] = set()
        """Gradients without a stage: every read lies outside."""
        self.active = set(wanted)
        for stage in program.stages:
            reads = any(t.array in self.active for t in children(stage.body) if t.op == "load")
            if reads and stage.target.dtype.is_float:
                self.active.add(stage.target)

    def gradient(self, array: Array) -> Array:
        """The cotangent of an array, for which no contribution is to come."""
        if array in self.gradients:
            return self.gradients[array]
        parts, seed = self.pending.pop(array, []), self.seeds.get(array)
        if seed is not None and not parts:
            self.gradients[array] = seed
            return seed
        result = Array(f"d_{array.name}", array.shape, array.dtype)
        if seed is not None:
            axes = tuple(map(Axis, result.shape))
            self.stages.append(Stage(result, axes, "point", (), load(seed, map(at, axes)), (), True))
        for read, domain, value in parts:
            self.stages += gathers(result, read.args, domain, value, read.fill is None)
        if not any(stage.target is result for stage in self.stages):
            self.zeros.add(result)
        self.gradients[array] = result
        return result

    def run(self) -> None:
        """Process the stages in reverse order."""
        for stage in reversed(self.program.stages):
            target = stage.target
            if target not in self.active or (target not in self.pending and not self._reached(target)):
                continue
            outside = 0.0 if stage.scatters and not stage.checked else None
            found = self.gradient(target)
            if found in self.zeros:
                continue
            seed = load(found, stage.store, outside)
            for read, value in partials(stage.body, self.seed(stage, seed)):
                if read.array in self.active and read.array is not None:
                    self.pending.setdefault(read.array, []).append((read, (*stage.axes, *stage.reduced), value))

    def _reached(self, target: Array) -> bool:
        return target in self.seeds or target in self.gradients

    def seed(self, stage: Stage, seed: Term) -> Term:
        """The cotangent of the body, from that of the result."""
        y, body = load(stage.target, stage.store), stage.body
        match stage.kind:
            case "point" | "sum":
                return seed
            case "amax" | "amin":  # a comparison with the result would depend on how the body is rounded
                place = load(self.places(stage), map(at, stage.axes))
                here, place = (cast(i, DType.int32) for i in (of_map(_position(stage.reduced)), place))
                return apply("where", apply("eq", here, place), seed, 0.0)
            case "lse":
                return apply("mul", seed, apply("exp", apply("sub", body, y)))
            case "prod":
                return apply("mul", seed, self.others(stage))
        raise Unsupported(f"the derivative of {stage.kind}")

    def places(self, stage: Stage) -> Array:
        """The positions of the extrema of a stage: an array of the program, or one that is computed now."""
        found = next((s.target for s in self.program.stages if _finds(s, stage)), None)
        if found is None:
            result = _places(stage)
            self.stages.append(result)
            found = result.target
        return found

    def others(self, stage: Stage) -> Term:
        """For each element, the product of the others: right at zeros, and in derivatives of every order."""
        twins = {a: Axis(a.size) for a in stage.reduced}
        here = number(True)
        for axis, twin in twins.items():
            here = apply("logical_and", here, apply("eq", at(axis), at(twin)))
        other = substituted(stage.body, {a: at(t) for a, t in twins.items()})
        axes = (*stage.axes, *stage.reduced)
        target = Array(f"o_{stage.target.name}", [a.size for a in axes], stage.target.dtype)
        body = apply("where", here, 1.0, other)
        self.stages.append(Stage(target, axes, "prod", tuple(twins.values()), body))
        return load(target, map(at, axes))


def _position(axes: Sequence[Axis]) -> dict[Axis | None, int]:
    """The number of an element in row-major order of its axes."""
    found: dict[Axis | None, int] = {}
    weight = 1
    for axis in reversed(axes):
        found[axis] = weight
        weight *= axis.size
    return found


def _places(stage: Stage) -> Stage:
    """The positions in 32 bits, as many as a float has: a loop over both has vectors of one length."""
    target = Array(f"a_{stage.target.name}", stage.target.shape, DType.int32)
    return Stage(target, stage.axes, f"arg{stage.kind[1:]}", stage.reduced, stage.body)


def _finds(found: Stage, stage: Stage) -> bool:
    """Whether a stage computes the positions of the extrema of another one."""
    if found.kind != f"arg{stage.kind[1:]}" or len(found.reduced) != len(stage.reduced) or not found.plain:
        return False
    if len(found.axes) != len(stage.axes):
        return False
    pairs = zip((*found.axes, *found.reduced), (*stage.axes, *stage.reduced), strict=True)
    return substituted(found.body, {a: at(b) for a, b in pairs}) is stage.body


def adjoint(program: Program, seeded: Sequence[bool], wanted: Sequence[bool]) -> Program:
    """The program of the cotangents of the wanted inputs.

    Its inputs are the inputs, the outputs, and one cotangent per output that is `seeded`. Intermediate arrays that are
    no outputs are computed once more, where they are read.
    """
    outputs = list(program.outputs)
    seeds: dict[Array, Array] = {}
    given: list[Array] = []
    for array, present in zip(outputs, seeded, strict=True):
        if present:
            given.append(Array(f"g_{array.name}", array.shape, array.dtype))
            seeds.setdefault(array, given[-1])
    targets = [a for a, chosen in zip(program.inputs, wanted, strict=True) if chosen]
    walk = _Adjoint(program, seeds, targets)
    walk.run()
    gradients = tuple(walk.gradient(a) for a in targets)
    forward = tuple(s for s in program.stages if s.target not in outputs)
    inputs = (*program.inputs, *outputs, *given)
    return Program(inputs, (*forward, *walk.stages), gradients).pruned()


@functools.lru_cache(maxsize=4096)
def derivative(text: str, seeded: tuple[bool, ...], wanted: tuple[bool, ...]) -> tuple[str, tuple[int, ...]]:
    """The text of the adjoint and the positions, among inputs, outputs, and cotangents, of what it reads."""
    result = adjoint(parsed(text), seeded, wanted)
    read = result.read()
    kept = tuple(i for i, array in enumerate(result.inputs) if array in read)
    return Program(tuple(result.inputs[i] for i in kept), result.stages, result.outputs).text, kept


@functools.lru_cache(maxsize=1024)
def with_saved(text: str) -> str:
    """The program that also returns the intermediate arrays that its derivative reads."""
    program = parsed(text)
    stages = [s for stage in program.stages for s in _with_places(stage)]
    program = Program(program.inputs, tuple(stages), program.outputs)
    intermediate = tuple(dict.fromkeys(s.target for s in program.stages if s.target not in program.outputs))
    everything = Program(program.inputs, program.stages, (*program.outputs, *intermediate))
    seeded = tuple(o.dtype.is_float for o in program.outputs) + (False,) * len(intermediate)
    result = adjoint(everything, seeded, tuple(a.dtype.is_float for a in program.inputs))
    read = result.read()
    saved = [a for a in intermediate if a in read]
    return Program(program.inputs, program.stages, (*program.outputs, *saved)).pruned().text


def _with_places(stage: Stage) -> tuple[Stage, ...]:
    return (stage, _places(stage)) if stage.kind in ("amax", "amin") else (stage,)
