"""Term: a node of an index expression, and the arithmetic that builds nodes.

A term is a number, an index axis, a read of an array, an elementwise operator of `ops.elementwise`, a cast, or a
reduction over axes. Terms are interned: terms of equal structure are one object, so identity is equality, and every
walk visits a shared subexpression once. Element types are explicit: arithmetic inserts casts by PyTorch's rules.
"""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.expressions.promotion import FLOATS, LOGICAL, common, default_float, fits, location, number_in
from daceml_train.ops.elementwise import TABLE
from daceml_train.tensor import DType

REDUCTIONS = ("sum", "amax", "amin", "prod", "lse", "argmax", "argmin")
"""The reductions that a stage computes. `argmax` and `argmin` number the elements in row-major order of their axes."""
_numbers = itertools.count()


class Axis:
    """An index axis: runs over `0..size-1`. Axes are equal if they are the same object."""

    def __init__(self, size: int, name: str = "") -> None:
        self.size, self.number, self.name = int(size), next(_numbers), name

    def __repr__(self) -> str:
        return self.name or f"i{self.number}"


class Array:
    """An array that a program reads or writes: an input, or the target of stages."""

    def __init__(self, name: str, shape: Iterable[int], dtype: DType) -> None:
        self.name, self.shape, self.dtype = name, tuple(int(n) for n in shape), dtype

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype.short}[{', '.join(map(str, self.shape))}]"


_INFIX = {"add": "+", "sub": "-", "mul": "*", "floor_divide": "//", "remainder": "%"}


def _grouped(term: Term, within: str) -> str:
    text = repr(term)
    return f"({text})" if term.op in _INFIX and (within != "add" or term.op not in ("add", "mul")) else text


class Term:
    """One node. `dtype` is None for a number that adapts to its neighbors, as Python's numbers do in PyTorch."""

    __slots__ = ("__weakref__", "args", "array", "axes", "axis", "dtype", "fill", "line", "op", "value")
    op: str
    args: tuple[Term, ...]
    dtype: DType | None
    axis: Axis | None
    value: Any
    array: Array | None
    fill: float | None
    axes: tuple[Axis, ...]
    line: str

    def __bool__(self) -> bool:
        raise Invalid(
            "an index expression has no truth value",
            where=location(),
            advice="write where(condition, a, b) instead of if, & | ~ instead of and, or, not, maximum instead of max",
        )

    def __index__(self) -> int:
        message = f"the index expression {self!r} is no number while the function is traced"
        advice = "compute with +, -, *, //, %, and with the functions in daceml_train.expressions"
        raise Invalid(message, where=location(), advice=advice)

    def __float__(self) -> float:
        return self.__index__()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = getattr(function, "__name__", "this function")
        advice = "import it from daceml_train.expressions"
        raise Invalid(f"PyTorch's {name} takes no index expression", where=location(), advice=advice)

    def __iter__(self) -> Any:
        raise Invalid("an index expression is not iterable", where=location(), advice="loop over a size")

    def __eq__(self, other: object) -> Any:
        return apply("eq", self, other)

    def __ne__(self, other: object) -> Any:
        return apply("ne", self, other)

    __hash__ = object.__hash__

    def __add__(self, other: Any) -> Term:
        return apply("add", self, other)

    def __radd__(self, other: Any) -> Term:
        return apply("add", other, self)

    def __sub__(self, other: Any) -> Term:
        return apply("sub", self, other)

    def __rsub__(self, other: Any) -> Term:
        return apply("sub", other, self)

    def __mul__(self, other: Any) -> Term:
        return apply("mul", self, other)

    def __rmul__(self, other: Any) -> Term:
        return apply("mul", other, self)

    def __truediv__(self, other: Any) -> Term:
        return apply("div", self, other)

    def __rtruediv__(self, other: Any) -> Term:
        return apply("div", other, self)

    def __floordiv__(self, other: Any) -> Term:
        return apply("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Term:
        return apply("floor_divide", other, self)

    def __mod__(self, other: Any) -> Term:
        return apply("remainder", self, other)

    def __rmod__(self, other: Any) -> Term:
        return apply("remainder", other, self)

    def __pow__(self, other: Any) -> Term:
        return apply("pow", self, other)

    def __rpow__(self, other: Any) -> Term:
        return apply("pow", other, self)

    def __neg__(self) -> Term:
        return apply("neg", self)

    def __abs__(self) -> Term:
        return apply("abs", self)

    def __lt__(self, other: Any) -> Term:
        return apply("lt", self, other)

    def __le__(self, other: Any) -> Term:
        return apply("le", self, other)

    def __gt__(self, other: Any) -> Term:
        return apply("gt", self, other)

    def __ge__(self, other: Any) -> Term:
        return apply("ge", self, other)

    def __and__(self, other: Any) -> Term:
        return _bitwise("and", self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Term:
        return _bitwise("or", self, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Term:
        return _bitwise("xor", self, other)

    __rxor__ = __xor__

    def __invert__(self) -> Term:
        return _bitwise("not", self)

    def __round__(self, digits: int | None = None) -> Term:
        if digits is not None:
            raise Invalid("round of an index expression takes no number of digits", where=location())
        return apply("round", self)

    def __repr__(self) -> str:
        if self.op == "number":
            return repr(self.value)
        if self.op == "axis":
            return repr(self.axis)
        if self.op in _INFIX:
            return f" {_INFIX[self.op]} ".join(_grouped(a, self.op) for a in self.args)
        inner = ", ".join(map(repr, self.args))
        if self.op == "load":
            assert self.array is not None
            return f"{self.array.name}{'' if self.fill is None else f'.outside({self.fill})'}[{inner}]"
        return f"{self.op}({inner}{''.join(f', {a}' for a in self.axes)})"


_interned: weakref.WeakValueDictionary[tuple[Any, ...], Term] = weakref.WeakValueDictionary()


def node(
    op: str,
    args: tuple[Term, ...] = (),
    dtype: DType | None = None,
    *,
    axis: Axis | None = None,
    value: Any = None,
    array: Array | None = None,
    fill: float | None = None,
    axes: tuple[Axis, ...] = (),
    line: str = "",
) -> Term:
    """The one term of this structure."""
    key = (op, *map(id, args), dtype, axis, type(value), repr(value), id(array) if array else 0, repr(fill), axes)
    found: Term | None = _interned.get(key)
    if found is None:
        found = Term()
        found.op, found.args, found.dtype, found.axis, found.value = op, args, dtype, axis, value
        found.array, found.fill, found.axes, found.line = array, fill, axes, line
        _interned[key] = found
    return found


def number(value: Any) -> Term:
    """A Python number as a term."""
    return node(
        "number", value=value if isinstance(value, bool) else int(value) if isinstance(value, int) else float(value)
    )


def at(axis: Axis) -> Term:
    """The index that runs over `axis`."""
    return node("axis", (), DType.int64, axis=axis)


def load(array: Array, index: Iterable[Term], fill: float | None = None, line: str = "") -> Term:
    """The element of `array` at `index`; `fill` outside of it."""
    return node("load", tuple(index), array.dtype, array=array, fill=fill, line=line)


def lift(value: Any) -> Term:
    """A term, from a term or a number. Raises `Invalid` for anything else."""
    if isinstance(value, Term):
        return value
    if isinstance(value, bool):
        return number(value)
    if isinstance(value, np.generic | np.ndarray) and not value.ndim:
        value = value.item()
    if isinstance(value, int):
        return number(int(value))
    if isinstance(value, float):
        return number(float(value))
    kind = type(value).__name__
    advice = "make it an operand of the function" if hasattr(value, "requires_grad") else "index it: x[i, j]"
    raise Invalid(
        f"an expression computes with numbers and elements, not with a {kind}", where=location(), advice=advice
    )


def constant(term: Term) -> Any:
    """The number that a term is; None for any other term."""
    return term.value if term.op == "number" else None


def cast(term: Any, dtype: DType) -> Term:
    """A term in another element type; a number becomes a number of that kind."""
    lifted = lift(term)
    if lifted.dtype is dtype:
        return lifted
    if lifted.dtype is None:
        return number(number_in(lifted.value, dtype))
    return node("cast", (lifted,), dtype)


_FOLDED: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "div": lambda a, b: a / b if b else math.copysign(math.inf, a) if a else math.nan,
    "floor_divide": lambda a, b: a // b if b else math.nan,
    "remainder": lambda a, b: a % b if b else math.nan,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "logical_and": lambda a, b: bool(a) and bool(b),
    "logical_or": lambda a, b: bool(a) or bool(b),
    "logical_not": lambda a: not a,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "bitwise_not": operator.invert,
    "maximum": max,
    "minimum": min,
    "abs": abs,
}


def _bitwise(name: str, *operands: Any) -> Term:
    """`&`, `|`, `^` and `~`: of truth values logical, of integers bit by bit, as in PyTorch."""
    terms = [lift(v) for v in operands]
    if all(t.dtype is DType.bool or isinstance(t.value, bool) for t in terms):
        return apply("ne", *terms) if name == "xor" else apply(f"logical_{name}", *terms)
    if any(_is_float(t) or isinstance(t.value, float) for t in terms):
        shown = {"and": "&", "or": "|", "xor": "^", "not": "~"}[name]
        raise Invalid(f"{shown} takes truth values or integers, not floats", where=location())
    return apply(f"bitwise_{name}", *terms)


def apply(kind: str, *operands: Any) -> Term:
    """The elementwise operator `kind` of `ops.elementwise` on terms and numbers; constants are folded."""
    terms = [lift(v) for v in operands]
    row = TABLE[kind]
    if len(row.operands) != len(terms):
        raise Invalid(f"{kind} takes {len(row.operands)} operands, given {len(terms)}", where=location())
    values = [constant(t) for t in terms]
    simple = _simplified(kind, terms, values)
    if simple is not None:
        return simple
    numeric = terms[1:] if kind == "where" else terms
    dtype = common(numeric, kind in FLOATS)
    if kind in ("floor_divide", "remainder") and values[1] == 0 and not (dtype is not None and dtype.is_float):
        raise Invalid(f"{terms[0]!r} is divided by zero", where=location())
    if kind in LOGICAL:
        dtype = DType.bool
    elif row.result == "bool" and dtype is not None and not all(fits(v, dtype) for v in values):
        dtype = DType.int64  # no value of the type equals the number: the comparison is still right
    elif dtype is DType.bool and row.result != "bool" and kind != "where":
        dtype = DType.int64
    if dtype is None:  # numbers only
        kinds = [isinstance(t.value, float) for t in numeric if t.op == "number"]
        dtype = default_float[-1] if any(kinds) or kind in FLOATS else DType.int64
        place = len(terms) - len(numeric)  # a text has to say which type the numbers have
        terms[place] = node("cast", (number(number_in(terms[place].value, dtype)),), dtype)
        numeric = terms[place:]
    cast_to = [cast(t, dtype) for t in numeric]
    if kind == "where":
        cast_to = [cast(terms[0], DType.bool), *cast_to]
    return node(kind, tuple(cast_to), DType.bool if row.result == "bool" else dtype)


def _simplified(kind: str, terms: list[Term], values: list[Any]) -> Term | None:
    """A simpler term of the same value, or None. A number in float arithmetic keeps the other operand's type."""
    if None not in values and kind in _FOLDED:
        return number(_FOLDED[kind](*values))
    first, last = terms[0], terms[-1]
    match kind:
        case "add" if values[0] == 0 and _keeps(last, values[0]):
            return last
        case "add" | "sub" if values[1] == 0 and _keeps(first, values[1]):
            return first
        case "mul" if 0 in values and all(t.dtype in (None, DType.int64) for t in terms):
            return number(0.0 if any(isinstance(v, float) for v in values) else 0)
        case "mul" if values[0] == 1 and _keeps(last, values[0]):
            return last
        case "mul" | "div" if values[1] == 1 and _keeps(first, values[1]) and (kind == "mul" or _is_float(first)):
            return first
        case "floor_divide" if values[1] == 1 and _keeps(first, values[1]):
            return first
        case "where" if values[0] is not None:
            return _chosen(terms[1 if values[0] else 2], common(terms[1:]))
        case "where" if terms[1] is terms[2]:
            return terms[1]
        case "neg" if first.op == "neg":
            return first.args[0]
        case "logical_and" if values[0] is True:
            return last
        case "logical_and" if values[1] is True:
            return first
    return None


def _chosen(term: Term, dtype: DType | None) -> Term:
    """A branch in the type of both."""
    return term if dtype is None else cast(term, dtype)


def _is_float(term: Term) -> bool:
    return term.dtype is not None and term.dtype.is_float


def _keeps(term: Term, value: Any) -> bool:
    """Whether arithmetic with a number leaves the type of `term` as it is."""
    return term.dtype is not None and term.dtype is not DType.bool and (term.dtype.is_float or isinstance(value, int))


def children(term: Term) -> Iterable[Term]:
    """Every node of a term, operands first, each once."""
    seen: set[int] = set()
    stack = [(term, False)]
    while stack:
        current, done = stack.pop()
        if done:
            yield current
        elif id(current) not in seen:
            seen.add(id(current))
            stack.append((current, True))
            stack.extend((a, False) for a in reversed(current.args))


def rebuilt(term: Term, change: Callable[[Term], Term]) -> Term:
    """A copy of a term in which `change` may replace every node, operands first."""
    results: dict[int, Term] = {}
    for old in children(term):
        args = tuple(results[id(a)] for a in old.args)
        new = old if all(a is b for a, b in zip(args, old.args, strict=True)) else with_args(old, args)
        results[id(old)] = change(new)
    return results[id(term)]


def with_args(old: Term, args: tuple[Term, ...]) -> Term:
    """The same operator on other operands."""
    if old.op in TABLE:
        return apply(old.op, *args)
    if old.op == "cast" and old.dtype is not None and args[0].op != "number":
        return cast(args[0], old.dtype)
    return node(old.op, args, old.dtype, array=old.array, fill=old.fill, axes=old.axes, line=old.line)


def free_axes(term: Term) -> list[Axis]:
    """The axes that a term depends on, in the order of first use; axes of inner reductions are bound."""
    found: dict[Axis, None] = {}
    bound: set[Axis] = set()
    for child in children(term):
        if child.axis is not None:
            found[child.axis] = None
        bound.update(child.axes)
    return [a for a in found if a not in bound]


def substituted(term: Term, values: dict[Axis, Term]) -> Term:
    """A term with axes replaced."""
    return rebuilt(term, lambda t: values.get(t.axis, t) if t.axis is not None else t) if values else term
