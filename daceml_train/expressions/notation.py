"""Notation: an operator is a Python function whose results are comprehensions over index axes.

    def correlate(f, g, radius=4):
        B, C, H, W = f.shape
        D = size(2 * radius + 1)
        return array(total(f[b, c, h, w] * g.outside(0)[b, c, h + i - radius, w + j - radius] for c in C)
                     for b in B for i in D for j in D for h in H for w in W)

The function runs once per set of sizes, with sizes that yield one symbolic index when iterated; nothing is parsed, so
it works in a notebook and a debugger steps through it. Run on NumPy arrays (`reference`), it means what Python means.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daceml_train.errors import Invalid, Unsupported
from daceml_train.expressions.affine import inside, interval
from daceml_train.expressions.loops import Frame, Size, View, state, targets
from daceml_train.expressions.program import Program, Stage, result_type
from daceml_train.expressions.promotion import default_float, location, number_in, promote
from daceml_train.expressions.reference import listed, reduced
from daceml_train.expressions.term import (
    REDUCTIONS,
    Array,
    Axis,
    Term,
    apply,
    at,
    cast,
    free_axes,
    lift,
    load,
    node,
    rebuilt,
)
from daceml_train.tensor import DType


def size(n: int) -> Size:
    """A number as a size to loop over."""
    if isinstance(n, Term):
        advice = "loop over the largest size, and choose: where(j < n, ..., 0)"
        raise Invalid(f"size({n!r}) would differ from element to element", where=location(), advice=advice)
    try:
        number = operator.index(n)
    except TypeError:
        raise Invalid(f"size({n!r}): a size is an integer", where=location()) from None
    if number < 0:
        raise Invalid(f"size({number}) is negative", where=location())
    return Size(number)


class Operand:
    """An array as the function sees it: `x[i, j]`, `x.shape`, and what lies outside."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.shape = tuple(map(Size, array.shape))

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.array.dtype

    def __getitem__(self, index: Any) -> Term:
        return self._read(index, None)

    def __iter__(self) -> Any:
        raise Invalid(f"{self.array.name} is not iterable", where=location(), advice="loop over a size of its shape")

    def outside(self, value: float) -> View:
        """Reads that yield `value` outside of the array."""
        number = lift(value).value
        if number is None:
            message = f"{self.array.name}.outside({value!r}): what lies outside is a number"
            raise Invalid(message, where=location(), advice="write where(inside, x.clamp[...], value) for other values")
        if isinstance(number, float) and not self.array.dtype.is_float and not number.is_integer():
            raise Invalid(f"the number {number} does not fit {self.array.dtype.name}", where=location())
        return View(lambda index: self._read(index, number))

    @property
    def clamp(self) -> View:
        """Reads that yield the nearest element outside of the array."""
        return View(lambda index: self._around(index, lambda i, n: apply("clamp", i, 0, n - 1), saturated=True))

    @property
    def wrap(self) -> View:
        """Reads that start over at the other end outside of the array."""
        return View(lambda index: self._around(index, lambda i, n: apply("remainder", i, n)))

    def _around(self, index: Any, change: Callable[[Term, int], Term], saturated: bool = False) -> Term:
        """A read at a changed index; `saturated` changes floats before they become integers, which they may exceed."""
        shape = self.array.shape
        raw = self._indices(index)
        if saturated and len(raw) == len(shape):
            floats = [isinstance(i, Term) and i.dtype is not None and i.dtype.is_float for i in raw]
            raw = tuple(change(i, n) if f and n else i for i, n, f in zip(raw, shape, floats, strict=True))
        given = [self._index(i, d) for d, i in enumerate(raw)]
        if any(n == 0 and not inside(i, n) for i, n in zip(given, shape, strict=True)):
            raise Invalid(f"{self.array} has no elements to read", where=location())
        changed = [i if inside(i, n) else change(i, n) for i, n in zip(given, shape, strict=True)]
        return self._read(tuple(changed), None)

    def _indices(self, index: Any) -> tuple[Any, ...]:
        given = index if isinstance(index, tuple) else (index,)
        if len(given) != len(self.shape):
            message = f"{self.array.name} has {len(self.shape)} dimensions, given {len(given)} indices"
            raise Invalid(message, where=location())
        return given

    def _index(self, index: Any, dim: int) -> Term:
        term = lift(index)
        if term.dtype is DType.bool or not _integral(term):
            message = f"index {dim} of {self.array.name} is {term!r}, which is no integer"
            raise Invalid(message, where=location(), advice="use floor, ceil, or round")
        return cast(term, DType.int64)

    def _read(self, index: Any, fill: float | None) -> Term:
        given = [self._index(i, d) for d, i in enumerate(self._indices(index))]
        within = [inside(i, n) for i, n in zip(given, self.array.shape, strict=True)]
        if fill is None and False in within:
            dim = within.index(False)
            shown = ", ".join("..." if d != dim else repr(i) for d, i in enumerate(given))
            raise Invalid(
                f"{self.array.name}[{shown}]: dimension {dim} has size {self.array.shape[dim]}, "
                f"the index runs over {_range(given[dim])}",
                where=location(),
                advice="say what lies outside: .outside(value), .clamp, or .wrap",
            )
        if all(within):
            fill = None
        if fill is not None:
            fill = number_in(fill, self.array.dtype)
        known = fill is not None or all(w is not None for w in within)  # others are checked at run time
        return load(self.array, given, fill, "" if known else f"{self.array.name} at {location()}")


def _range(term: Term) -> str:
    found = interval(term)
    return "data" if found is None else f"{found[0]}..{found[1]}"


def _integral(term: Term) -> bool:
    """Whether a term has only integer values."""
    if term.dtype is None:
        return isinstance(term.value, int)
    if not term.dtype.is_float:
        return True
    if term.op in ("floor", "ceil", "round", "trunc"):
        return True
    if term.op == "cast":
        return _integral(term.args[0])
    if term.op == "number":
        return float(term.value).is_integer()
    arguments = [a for a in term.args if a.op != "number" or not float(a.value).is_integer()]
    return term.op in ("add", "sub", "mul", "neg", "maximum", "minimum", "clamp") and all(map(_integral, arguments))


# ---- comprehensions -------------------------------------------------------------------------------------------------
@contextmanager
def _entered(generator: Any, what: str) -> Iterator[Frame]:
    code = getattr(generator, "gi_code", None)
    if not isinstance(generator, Generator):
        message = f"{what} expects a comprehension, given {type(generator).__name__}"
        raise Invalid(message, where=location(), advice=f"{what}(... for i in I)")
    frame = Frame(code)
    enclosing = state.frames[-1] if state.frames else None
    names = set(targets(frame.code))
    if enclosing is not None and frame.code in enclosing.code.co_consts and names & set(targets(enclosing.code)):
        shadowed = ", ".join(sorted(names & set(targets(enclosing.code))))
        raise Invalid(f"the loop over {shadowed} hides an index of the same name", where=location())
    state.frames.append(frame)
    try:
        yield frame
    finally:
        state.frames.pop()
        generator.close()


def _first(generator: Any, frame: Frame, what: str) -> tuple[Term, tuple[Axis, ...]]:
    try:
        body = next(generator)
    except StopIteration:
        message = f"{what} over nothing: a comprehension without an index"
        raise Invalid(message, where=location(), advice="filters are written where(...)") from None
    except RuntimeError as error:  # what Python makes of StopIteration inside
        raise Invalid(f"{what}: {error}", where=location()) from None
    if frame.ended:
        axis, where = frame.ended[0]
        message = f"a loop over a size of {axis.size} ends within an element of {what}"
        advice = "write total(... for ...), largest(... for ...) and so on, not sum, max, or a list"
        raise Invalid(message, where=where, advice=advice)
    axes = tuple(frame.axes)
    if not axes:
        raise Invalid(f"{what} expects loops over sizes", where=location(), advice="size(n) makes a size of a number")
    if len(set(targets(frame.code))) < len(axes):
        raise Invalid("two loops of one comprehension use the same name", where=location())
    if next(generator, generator) is not generator:
        message = f"{what} loops over something other than sizes"
        raise Invalid(message, where=location(), advice="size(n) makes a size of a number")
    return lift(body), axes


def array(generator: Any) -> Any:
    """The array whose elements the comprehension lists, over the indices in the order of its `for`s."""
    with _entered(generator, "array") as frame:
        if state.stages is None:
            return listed(generator, frame)
        body, axes = _first(generator, frame, "array")
    stages = state.stages
    free = [a for a in free_axes(body) if a not in axes]
    if free:
        raise Invalid(
            f"an index of another comprehension is used: {free[0]!r} of size {free[0].size}", where=location()
        )
    body = _split(body, stages)
    kind, reduced, inner = "point", tuple[Axis, ...](), body
    if body.op in REDUCTIONS:
        kind, reduced, inner = body.op, body.axes, body.args[0]
    target = Array(f"t{len(stages)}", [a.size for a in axes], result_type(kind, inner))
    inner = _hoisted(inner, (*axes, *reduced), stages) if kind != "point" else cast(inner, target.dtype)
    stages.append(Stage(target, axes, kind, reduced, inner))
    return Operand(target)


def _hoisted(body: Term, domain: Sequence[Axis], stages: list[Stage]) -> Term:
    """A product whose computed factors that use fewer axes are stages of their own: computed once per element."""
    if body.op != "mul":
        return body
    factors = [_hoisted(f, domain, stages) for f in body.args]
    for n, factor in enumerate(factors):
        axes = tuple(free_axes(factor))
        computed = factor.op not in ("load", "number", "mul") and factor.dtype is not None and factor.dtype.is_float
        if computed and factor.dtype is not None and 0 < len(axes) < len(domain):
            target = Array(f"t{len(stages)}", [a.size for a in axes], factor.dtype)
            stages.append(Stage(target, axes, "point", (), factor))
            factors[n] = load(target, map(at, axes))
    return apply("mul", *factors)


def _split(body: Term, stages: list[Stage]) -> Term:
    """A reduction inside other arithmetic becomes a stage over just the axes that it uses."""

    def change(t: Term) -> Term:
        if t.op not in REDUCTIONS:
            return t
        kept = tuple(a for a in free_axes(t.args[0]) if a not in t.axes)
        target = Array(f"t{len(stages)}", [a.size for a in kept], result_type(t.op, t.args[0]))
        stages.append(Stage(target, kept, t.op, t.axes, t.args[0]))
        return load(target, [at(a) for a in kept])

    if body.op in REDUCTIONS:
        return node(body.op, (rebuilt(body.args[0], change),), body.dtype, axes=body.axes)
    return rebuilt(body, change)


def _reduction(kind: str, what: str, generator: Any) -> Any:
    with _entered(generator, what) as frame:
        if state.stages is None:
            return reduced(kind, generator, frame)
        body, axes = _first(generator, frame, what)
    if kind in ("amax", "amin", "argmax") and any(a.size == 0 for a in axes):
        raise Invalid(f"{what} over a size of 0", where=location())
    if kind == "argmax" and len(axes) != 1:
        raise Unsupported("argmax over several indices", where=location(), advice="merge them into one size")
    dtype = result_type(kind, body)
    if kind in ("sum", "prod", "lse") and body.dtype is not dtype:
        body = cast(body, dtype)
    if body.dtype is None:
        body = node("cast", (body,), dtype)
    return node(kind, (body,), dtype, axes=axes)


def total(generator: Any) -> Any:
    """The sum."""
    return _reduction("sum", "total", generator)


def largest(generator: Any) -> Any:
    """The maximum; the gradient goes to the first of equals."""
    return _reduction("amax", "largest", generator)


def least(generator: Any) -> Any:
    """The minimum; the gradient goes to the first of equals."""
    return _reduction("amin", "least", generator)


def product(generator: Any) -> Any:
    """The product; its gradient is right at zeros, too."""
    return _reduction("prod", "product", generator)


def logsumexp(generator: Any) -> Any:
    """`log(sum(exp(...)))`, stable."""
    return _reduction("lse", "logsumexp", generator)


def argmax(generator: Any) -> Any:
    """The index of the first maximum over one size."""
    return _reduction("argmax", "argmax", generator)


# ---- tracing --------------------------------------------------------------------------------------------------------
def trace(function: Callable[..., Any], operands: Sequence[Array], options: dict[str, Any]) -> Program:
    """The program of `function` on operands of these types. Raises `Invalid` where it is no expression."""
    outer, outer_frames = state.stages, state.frames
    state.stages, state.frames = [], []
    floats = [a.dtype for a in operands if a.dtype.is_float]
    common = DType.float32 if not floats else floats[0]
    for dtype in floats[1:]:
        common = promote(common, dtype)
    default_float.append(common)
    try:
        result = function(*map(Operand, operands), **options)
        results = result if isinstance(result, tuple) else (result,)
        wrong = [r for r in results if not isinstance(r, Operand)]
        if wrong or not results:
            given = "nothing" if not wrong or wrong[0] is None else f"an object of type {type(wrong[0]).__name__}"
            message = f"an expression returns arrays, {_name(function)} returned {given}"
            raise Invalid(message, where=_home(function), advice="return array(... for ...), or a tuple of them")
        outputs = tuple(r.array for r in results)
        if set(outputs) & set(operands) or len(set(outputs)) < len(outputs):
            raise Invalid(
                f"{_name(function)} returns an operand, or an array twice", advice="copy it: array(x[i] for i in I)"
            )
        return Program(tuple(operands), tuple(state.stages), outputs).pruned()
    finally:
        state.stages, state.frames = outer, outer_frames
        default_float.pop()


def _home(function: Callable[..., Any]) -> str:
    """The file and line of a function."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", "the function"))
