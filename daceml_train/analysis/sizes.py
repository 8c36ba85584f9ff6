"""Sizes: values of size symbols, derived from the shapes of the inputs, and their substitution."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import sympy

from daceml_train.errors import Invalid
from daceml_train.graph.graph import Input
from daceml_train.ops.operator import Operator
from daceml_train.tensor import show_shape

T = TypeVar("T")


def bind(value: T, sizes: Mapping[str, Any]) -> T:
    """`value` with numbers substituted for symbols: a size, an operator, a type, or a nested tuple of such.

    Symbols that an operator binds itself stay. Raises `Invalid` for another symbol that `sizes` lacks.
    """
    if isinstance(value, sympy.Basic):
        return cast(T, _number(value, sizes))
    if isinstance(value, tuple):
        items = tuple(bind(v, sizes) for v in value)
        return value if all(a is b for a, b in zip(items, value, strict=True)) else cast(T, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, enum.Enum | type):
        if isinstance(value, Operator) and value.own_sizes:
            sizes = {**sizes, **{s.name: s for s in value.own_sizes}}
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            before = getattr(value, field.name)
            after = bind(before, sizes)
            if after is not before:
                changed[field.name] = after
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _number(expression: sympy.Basic, sizes: Mapping[str, Any]) -> int | float | bool | sympy.Basic:
    unknown = sorted(s.name for s in expression.free_symbols if s.name not in sizes)
    if unknown:
        raise Invalid(f"size {unknown[0]} has no value", advice="an input's shape must contain it")
    number = expression.xreplace({s: sympy.sympify(sizes[s.name]) for s in expression.free_symbols})
    if number.free_symbols:  # of an operator's own
        return number
    if isinstance(number, sympy.logic.boolalg.BooleanAtom):
        return bool(number)
    return int(number) if number.is_integer else float(number)


def symbols_of(value: Any) -> Iterator[sympy.Symbol]:
    """The symbols that occur in a size, an operator, a type, or a nested tuple of such."""
    if isinstance(value, sympy.Basic):
        yield from value.free_symbols
    elif isinstance(value, tuple):
        for item in value:
            yield from symbols_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, enum.Enum | type):
        own = value.own_sizes if isinstance(value, Operator) else frozenset()
        for field in dataclasses.fields(value):
            yield from (s for s in symbols_of(getattr(value, field.name)) if s not in own)


@dataclasses.dataclass(frozen=True)
class Step:
    """`symbol = (shape[dim] of input - offset) / factor`; offset and factor contain only symbols of earlier steps."""

    symbol: sympy.Symbol
    input: str
    dim: int
    factor: sympy.Expr
    offset: sympy.Expr


def derivation(inputs: Mapping[str, Input]) -> list[Step]:
    """How to compute every symbol of the inputs that their shapes determine, one linear size at a time."""
    pending = [
        (name, dim, size)
        for name, entry in inputs.items()
        for dim, size in enumerate(entry.tensor.shape)
        if not isinstance(size, int)
    ]
    steps: dict[sympy.Symbol, Step] = {}
    while True:
        later: list[tuple[str, int, sympy.Expr]] = []
        for name, dim, size in pending:
            unknown = size.free_symbols - steps.keys()
            line = _line(size, next(iter(unknown))) if len(unknown) == 1 else None
            if line:
                (symbol,) = unknown
                steps[symbol] = Step(symbol, name, dim, *line)
            elif unknown:
                later.append((name, dim, size))
        if len(later) == len(pending) or not later:
            return list(steps.values())
        pending = later


@functools.lru_cache(maxsize=4096)
def _line(size: sympy.Expr, symbol: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr] | None:
    """(factor, offset) where size = factor * symbol + offset; None if the size is not linear."""
    if size == symbol:
        return sympy.Integer(1), sympy.Integer(0)
    if not size.is_polynomial(symbol) or sympy.degree(size, symbol) != 1:
        return None
    factor = sympy.expand(size).coeff(symbol, 1)
    return factor, sympy.expand(size - factor * symbol)


def solve(inputs: Mapping[str, Input], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The value of every symbol, from the shapes of the inputs.

    Raises `Invalid` for a missing or unknown input, and for a shape that does not fit; the message names the input, the
    expected type and the given shape.
    """
    for name in inputs.keys() - shapes.keys():
        raise Invalid(f"input {name!r} is missing: {inputs[name].tensor}")
    for name in shapes.keys() - inputs.keys():
        raise Invalid(f"there is no input {name!r}", advice=f"the inputs are {', '.join(inputs)}")
    sizes: dict[str, int] = {}

    def refuse(name: str) -> Invalid:
        known = ", ".join(f"{s.name} = {sizes[s.name]}" for s in _sorted(inputs[name]) if s.name in sizes)
        expected = f"{inputs[name].tensor}" + (f" where {known}" if known else "")
        return Invalid(f"input {name!r} expects {expected}; given {show_shape(shapes[name])}")

    for name, entry in inputs.items():
        if len(shapes[name]) != entry.tensor.rank:
            raise refuse(name)
    for step in derivation(inputs):
        value = (shapes[step.input][step.dim] - bind(step.offset, sizes)) / sympy.Rational(bind(step.factor, sizes))
        if not value.is_integer or value < 1:
            raise refuse(step.input)
        sizes[step.symbol.name] = int(value)
    for name, entry in inputs.items():
        if any(bind(size, sizes) != given for size, given in zip(entry.tensor.shape, shapes[name], strict=True)):
            raise refuse(name)
    return sizes


def _sorted(entry: Input) -> list[sympy.Symbol]:
    return sorted(entry.tensor.symbols, key=lambda s: str(s.name))
