"""Expressions of the elementwise table as C++ text, for any element type.

Functions come from `native/vector_math.h`, overloaded for float and double. 16-bit floats are computed in float.
Integers follow NumPy: `/` is a true division, `floor(a / b)` and `trunc(a / b)` stay exact.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

from daceml_train.errors import Refused
from daceml_train.ops.elementwise import Cast, Elementwise
from daceml_train.tensor import DType

HALVES = (DType.bfloat16, DType.float16)
_CALLED = {
    "floor_divide",
    "logical_and",
    "logical_or",
    "logical_not",
    "isnan",
    "isinf",
    "sign",
    "abs",
    "max",
    "min",
    "fmod",
    "bit_and",
    "bit_or",
    "bit_xor",
    "bit_not",
    "shift_left",
    "shift_right",
}
"""Functions that accept integers; the others compute in floating point."""
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


def computed(dtype: DType) -> DType:
    """The element type in which a kernel computes values of `dtype`."""
    return DType.float32 if dtype in HALVES else dtype


def accumulator(dtype: DType, kind: str) -> DType:
    """The element type in which a reduction of `dtype` is accumulated across segments, rows and blocks."""
    if kind in ("max", "min"):
        return computed(dtype)
    return DType.float64 if dtype.is_float else DType.bool if dtype is DType.bool else DType.int64


def literal(value: float | int | bool, dtype: DType) -> str:
    """A constant in C++."""
    dtype = computed(dtype)
    if dtype is DType.bool:
        return "true" if value else "false"
    if not dtype.is_float:
        whole = int(value)
        return f"({dtype.c})({whole}LL)" if whole != -(2**63) else f"({dtype.c})(-{2**63 - 1}LL - 1)"
    suffix = "f" if dtype is DType.float32 else ""
    number = float(value)
    if math.isnan(number):
        return f'({dtype.c})__builtin_nan{suffix}("")'
    if math.isinf(number):
        return ("-" if number < 0 else "") + f"__builtin_inf{suffix}()"
    text = repr(number) + suffix
    return f"({text})" if text.startswith("-") else text


def elementwise(
    op: Elementwise, texts: Sequence[str], dtypes: Sequence[DType], constants: Sequence[float | int | bool | None]
) -> str:
    """The value of `op` as C++, given the texts of its operands; `constants` maps operands to known numbers."""
    operands = dict(zip("abc", zip(texts, dtypes, constants, strict=True), strict=False))
    dtype = computed(dtypes[-1])
    if op.kind == "remainder":  # its expression calls `fmod` four times
        return f"vm::remainder<{dtype.c}>({texts[0]}, {texts[1]})"
    tree = ast.parse(op.row.expression, mode="eval").body
    printer = _Printer({n: (t, computed(d), c) for n, (t, d, c) in operands.items()}, dtype)
    text, kind = printer.show(tree)
    wanted = DType.bool if op.row.result == "bool" else dtype
    return text if kind is wanted else f"({wanted.c})({text})"


def rounded(text: str, dtype: DType) -> str:
    """A float value rounded to the nearest 16-bit float."""
    return f"vm::from_{dtype.name}(vm::to_{dtype.name}({text}))"


def cast(op: Cast, text: str, source: DType, exact: bool = False) -> str:
    """A conversion: to booleans by comparison with zero, else a C++ conversion.

    A value of 16 bits is rounded to them where it is converted, from another type or to one, unless it is `exact`
    already; between conversions, results of operators keep float's digits until they are stored.
    """
    if source in HALVES and source is not op.dtype and not exact:
        text = rounded(text, source)
    narrow = op.dtype in HALVES and source is not op.dtype and source is not DType.bool
    target, source = computed(op.dtype), computed(source)
    if narrow:
        return rounded(text if source is target else f"({target.c}){text}", op.dtype)
    if target is source:
        return text
    if target is DType.bool:
        return f"({text} != 0)"
    if source is DType.bool:  # gcc vectorizes a select, not the conversion of a boolean
        return f"({text} ? {literal(1, target)} : {literal(0, target)})"
    return f"({target.c}){text}"


class _Printer:
    """Prints one expression; every node returns its text and element type."""

    def __init__(self, scope: dict[str, tuple[str, DType, float | int | bool | None]], dtype: DType) -> None:
        self.scope, self.dtype = scope, dtype
        self.real = dtype if dtype.is_float else DType.float64

    def show(self, node: ast.expr) -> tuple[str, DType]:
        match node:
            case ast.Name(id=name):
                text, dtype, _ = self.scope[name]
                return text, dtype
            case ast.Constant(value=int() | float() as value):
                whole = isinstance(value, int) and not self.dtype.is_float
                return (str(value), self.dtype) if whole else (literal(value, self.real), self.real)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                text, dtype = self.show(operand)
                return f"-{text}", dtype
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(op, self.show(left), self.show(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return f"({self.show(left)[0]} {_COMPARISONS[type(op)]} {self.show(right)[0]})", DType.bool
            case ast.Call(func=ast.Name(id=name), args=args):
                return self.call(name, args)
        raise Refused(f"{ast.unparse(node)!r} has no C++ form")

    def binary(self, op: ast.operator, left: tuple[str, DType], right: tuple[str, DType]) -> tuple[str, DType]:
        dtype = next((d for d in (left[1], right[1]) if d.is_float), left[1])
        a, b = left[0], right[0]
        if isinstance(op, ast.Div) and not dtype.is_float:
            return f"((double){a} / (double){b})", DType.float64
        if isinstance(op, ast.BitAnd):
            return f"vm::logical_and({a}, {b})", DType.bool
        return f"({a} {_OPERATORS[type(op)]} {b})", dtype

    def call(self, name: str, args: Sequence[ast.expr]) -> tuple[str, DType]:
        if name in ("floor", "trunc") and isinstance(args[0], ast.BinOp) and isinstance(args[0].op, ast.Div):
            parts = [self.show(a) for a in (args[0].left, args[0].right)]
            if not any(d.is_float for _, d in parts):
                function = "floor_divide" if name == "floor" else "truncate_divide"
                return f"vm::{function}({parts[0][0]}, {parts[1][0]})", parts[0][1]
        if name == "pow":
            short = self.power(args)
            if short is not None:
                return short
        shown = [self.show(a) for a in args]
        if name == "where":
            (test, _), (yes, dtype), (no, _) = shown
            return f"({test} ? {yes} : {no})", dtype
        dtype = shown[0][1]
        if name in ("max", "min"):
            dtype = next((d for _, d in shown if d.is_float), dtype)
            return f"vm::{name}<{dtype.c}>({', '.join(t for t, _ in shown)})", dtype
        if name == "pow" and not any(d.is_float for _, d in shown):  # exact, which powers in double are not
            return f"vm::pow<{dtype.c}>({', '.join(t for t, _ in shown)})", dtype
        if name in ("isnan", "isinf", "logical_and", "logical_or", "logical_not"):
            return f"vm::{name}({', '.join(t for t, _ in shown)})", DType.bool
        if not dtype.is_float and name not in _CALLED:
            shown, dtype = [(f"(double){t}", DType.float64) for t, _ in shown], DType.float64
        return f"vm::{name}({', '.join(t for t, _ in shown)})", dtype

    def power(self, args: Sequence[ast.expr]) -> tuple[str, DType] | None:
        """`pow` with a small constant exponent, as multiplications and roots."""
        if not (isinstance(args[0], ast.Name) and isinstance(args[1], ast.Name)):
            return None
        text, dtype, _ = self.scope[args[0].id]
        exponent = self.scope[args[1].id][2]
        if exponent is None or not (dtype.is_float or exponent in (1, 2, 3)):
            return None
        one = literal(1, dtype)
        forms = {
            0.0: one,
            1.0: text,
            2.0: f"({text} * {text})",
            3.0: f"({text} * {text} * {text})",
            4.0: f"(({text} * {text}) * ({text} * {text}))",
            0.5: f"vm::sqrt({text})",
            -0.5: f"vm::rsqrt({text})",
            -1.0: f"({one} / {text})",
            -2.0: f"({one} / ({text} * {text}))",
            1.5: f"({text} * vm::sqrt({text}))",
        }
        form = forms.get(float(exponent))
        return None if form is None else (form, dtype)
