"""Program: an expression after tracing. A list of stages, each one loop nest, and its text.

    input x0: f32[4, 6]
    input x1: f32[5, 6]
    let t0: f32[4, 5]
    t0[i0, i1] = amax(add(x0[i0, i2], x1[i1, i2]), i2) for i0 in 4 for i1 in 5 for i2 in 6
    return t0

A stage with `+=` adds to its target, which starts as zeros. A subexpression that occurs more than once is named where
it occurs first: `(v0 := exp(...))`. The text is the identity of a program: PyTorch's operator and the graph's take it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from daceml_train.errors import Invalid
from daceml_train.expressions.affine import affine
from daceml_train.expressions.promotion import default_float
from daceml_train.expressions.term import REDUCTIONS, Array, Axis, Term, apply, at, cast, children, load, node, number
from daceml_train.tensor import DType

_SHORT = {dtype.short: dtype for dtype in DType}


@dataclass(frozen=True, eq=False)
class Stage:
    """`target[store] = reduction over reduced of body`, for all values of `axes`; `adds` accumulates instead."""

    target: Array
    axes: tuple[Axis, ...]
    kind: str
    """`point`, or one of `REDUCTIONS`."""
    reduced: tuple[Axis, ...]
    body: Term
    store: tuple[Term, ...] = ()
    adds: bool = False
    checked: bool = False
    """Whether all places are inside: they are those of a read that raises otherwise."""

    def __post_init__(self) -> None:
        if not self.store:
            object.__setattr__(self, "store", tuple(at(a) for a in self.axes))

    @property
    def plain(self) -> bool:
        """Whether the stage writes every element of its target once, in the order of its axes."""
        same = len(self.store) == len(self.axes) and all(
            s.axis is a and a.size == n for s, a, n in zip(self.store, self.axes, self.target.shape, strict=True)
        )
        return same and not self.adds

    @property
    def scatters(self) -> bool:
        """Whether the place of a result depends on data or is not affine."""
        return any(affine(s) is None for s in self.store)

    def loads(self) -> list[Term]:
        """The reads of the body and of the store, each once."""
        found = [t for root in (self.body, *self.store) for t in children(root) if t.op == "load"]
        return list(dict.fromkeys(found))


@dataclass(frozen=True, eq=False)
class Program:
    """Stages in order. Arrays are single-assignment: the stages of one target come before every read of it."""

    inputs: tuple[Array, ...]
    stages: tuple[Stage, ...]
    outputs: tuple[Array, ...]

    @functools.cached_property
    def text(self) -> str:
        """The text, in which arrays and axes are numbered in the order of their occurrence."""
        return _Writer().program(self)

    def pruned(self) -> Program:
        """The program without stages that no output needs."""
        needed = set(self.outputs)
        kept: list[Stage] = []
        for stage in reversed(self.stages):
            if stage.target in needed:
                kept.append(stage)
                needed.update(t.array for t in stage.loads() if t.array is not None)
        return Program(self.inputs, tuple(reversed(kept)), self.outputs)

    def read(self) -> set[Array]:
        """The arrays that stages or outputs read."""
        return {t.array for s in self.stages for t in s.loads() if t.array is not None} | set(self.outputs)


class _Writer:
    """Writes one program."""

    def __init__(self) -> None:
        self.arrays: dict[Array, str] = {}
        self.axes: dict[Axis, str] = {}
        self.counts: dict[Term, int] = {}
        self.named: dict[Term, str] = {}

    def program(self, program: Program) -> str:
        lines = []
        for array in program.inputs:
            self.arrays[array] = f"x{len(self.arrays)}"
            lines.append(f"input {self.arrays[array]}: {_type(array)}")
        for stage in program.stages:
            if stage.target not in self.arrays:
                lines.append(self.declared(stage.target))
            lines.append(self.stage(stage))
        lines += [self.declared(o) for o in dict.fromkeys(program.outputs) if o not in self.arrays]
        return "\n".join([*lines, f"return {', '.join(self.arrays[o] for o in program.outputs)}"])

    def declared(self, array: Array) -> str:
        self.arrays[array] = f"t{len(self.arrays)}"
        return f"let {self.arrays[array]}: {_type(array)}"

    def stage(self, stage: Stage) -> str:
        self.axes = {a: f"i{n}" for n, a in enumerate((*stage.axes, *stage.reduced))}
        self.counts, self.named = {}, {}
        for root in (stage.body, *stage.store):
            for term in children(root):
                for argument in term.args:
                    self.counts[argument] = self.counts.get(argument, 0) + 1
        body = self.term(stage.body)
        if stage.kind != "point":
            body = f"{stage.kind}({', '.join([body, *(self.axes[a] for a in stage.reduced)])})"
        loops = "".join(f" for {name} in {axis.size}" for axis, name in self.axes.items())
        store = ", ".join(map(self.term, stage.store)) or "()"
        checked = "checked " if stage.checked else ""
        return f"{checked}{self.arrays[stage.target]}[{store}] {'+=' if stage.adds else '='} {body}{loops}"

    def term(self, term: Term) -> str:
        if term in self.named:
            return self.named[term]
        if term.op == "number":
            return _literal(term.value)
        if term.axis is not None:
            return self.axes[term.axis]
        inner = ", ".join(map(self.term, term.args))
        if term.op == "load":
            assert term.array is not None
            outside = f".checked({term.line!r})" if term.line else ""
            outside = outside if term.fill is None else f".outside({_literal(term.fill)})"
            text = f"{self.arrays[term.array]}{outside}[{inner or '()'}]"
        elif term.op == "cast":
            assert term.dtype is not None
            text = f"{term.dtype.short}({inner})"
        else:
            text = f"{term.op}({inner})"
        if self.counts.get(term, 0) > 1:
            self.named[term] = f"v{len(self.named)}"
            return f"({self.named[term]} := {text})"
        return text


def _literal(value: Any) -> str:
    return f"number({str(value)!r})" if value != value or value in (float("inf"), -float("inf")) else repr(value)


def _type(array: Array) -> str:
    return f"{array.dtype.short}[{', '.join(map(str, array.shape))}]"


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> Program:
    """The program of a text. Raises `Invalid`, naming the line, for a text that no program has."""
    return _Reader().program(text)


@dataclass
class _Reader:
    """Reads one program: its lines are Python's syntax."""

    arrays: dict[str, Array] = field(default_factory=dict)
    axes: dict[str, Axis] = field(default_factory=dict)
    named: dict[str, Term] = field(default_factory=dict)

    def program(self, text: str) -> Program:
        inputs: list[Array] = []
        stages: list[Stage] = []
        for position, line in enumerate(text.split("\n"), 1):
            try:
                word, _, rest = line.partition(" ")
                if word in ("input", "let"):
                    array = self.declared(rest)
                    inputs += [array] if word == "input" else []
                elif word == "return":
                    names = [name.strip() for name in rest.split(",") if name.strip()]
                    return Program(tuple(inputs), tuple(stages), tuple(self.arrays[n] for n in names))
                else:
                    stages.append(self.stage(line))
            except (SyntaxError, KeyError, ValueError, TypeError, AttributeError) as error:
                raise Invalid(f"not an expression's text: {line!r}: {error}", where=f"line {position}") from None
        raise Invalid("the text of an expression ends without return")

    def declared(self, rest: str) -> Array:
        name, _, kind = rest.partition(": ")
        short, _, sizes = kind.partition("[")
        shape = [int(s) for s in sizes.rstrip("]").split(",") if s.strip()]
        self.arrays[name] = Array(name, shape, _SHORT[short])
        return self.arrays[name]

    def stage(self, line: str) -> Stage:
        adds, checked = " += " in line, line.startswith("checked ")
        place, _, rest = line.removeprefix("checked ").partition(" += " if adds else " = ")
        generator = ast.parse(f"({rest})", mode="eval").body
        loops: list[ast.comprehension] = []
        body: ast.expr = generator
        if isinstance(generator, ast.GeneratorExp):
            body, loops = generator.elt, generator.generators
        self.axes, self.named = {}, {}
        for loop in loops:
            assert isinstance(loop.target, ast.Name) and isinstance(loop.iter, ast.Constant)
            self.axes[loop.target.id] = Axis(int(str(loop.iter.value)))
        kind, reduced = "point", tuple[Axis, ...]()
        if isinstance(body, ast.Call) and isinstance(body.func, ast.Name) and body.func.id in REDUCTIONS:
            kind = body.func.id
            reduced = tuple(self.axes[a.id] for a in body.args[1:] if isinstance(a, ast.Name))
            body = body.args[0]
        term = self.term(body)
        left = ast.parse(place, mode="eval").body
        assert isinstance(left, ast.Subscript) and isinstance(left.value, ast.Name)
        store = tuple(self.term(e) for e in _elements(left.slice))
        axes = tuple(a for a in self.axes.values() if a not in reduced)
        return Stage(self.arrays[left.value.id], axes, kind, reduced, term, store, adds, checked)

    def term(self, tree: ast.expr) -> Term:
        match tree:
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                self.named[name] = self.term(value)
                return self.named[name]
            case ast.Name(id=name):
                return self.named[name] if name in self.named else at(self.axes[name])
            case ast.Constant(value=value):
                return number(value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
                return number(-value)  # type: ignore[operator]
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                return load(self.arrays[name], map(self.term, _elements(index)))
            case ast.Subscript(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="checked"), args=[ast.Constant(line)]),
                slice=index,
            ):
                return load(self.arrays[name], map(self.term, _elements(index)), line=str(line))
            case ast.Subscript(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=[fill]), slice=index):
                return load(self.arrays[name], map(self.term, _elements(index)), self.term(fill).value)
            case ast.Call(func=ast.Name(id="number"), args=[ast.Constant(value=str(value))]):
                return number(float(value))
            case ast.Call(func=ast.Name(id=name), args=args) if name in _SHORT:
                return _cast(self.term(args[0]), _SHORT[name])
            case ast.Call(func=ast.Name(id=name), args=args):
                return apply(name, *map(self.term, args))
        raise ValueError(f"unexpected {ast.unparse(tree)}")


def _cast(term: Term, dtype: DType) -> Term:
    return node("cast", (term,), dtype) if term.op == "number" else cast(term, dtype)


def _elements(index: ast.expr) -> Sequence[ast.expr]:
    return index.elts if isinstance(index, ast.Tuple) else [index]


def result_type(kind: str, body: Term) -> DType:
    """The element type that a stage of this kind computes."""
    dtype = body.dtype or (default_float[-1] if isinstance(body.value, float) else DType.int64)
    if kind in ("argmax", "argmin") or (kind in ("sum", "prod") and not dtype.is_float):
        return DType.int64
    if kind == "lse" and not dtype.is_float:
        raise Invalid("logsumexp of integers", advice="cast them with to_float")
    return dtype


def named(arrays: Iterable[Array]) -> str:
    """The names of arrays, for messages."""
    return ", ".join(a.name for a in arrays)
