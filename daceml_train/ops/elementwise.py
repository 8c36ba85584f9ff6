"""Elementwise operators: one table. A row has an expression, its derivative per operand, and its cost.

Expressions are Python over the operands `a`, `b`, `c`, the result `y`, the cotangent `g`, and the functions of
`ops.functions`; they are evaluated by NumPy here and printed as C++ by `codegen.kernel.expression`. All numeric
operands of a row have one element type (the frontend casts); comparisons give booleans.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.ops.functions import FUNCTIONS
from daceml_train.ops.operator import Array, Builder, Operator, Value, make, register
from daceml_train.tensor import Dim, DType, Shape, Tensor, broadcast, product


@dataclass(frozen=True)
class Row:
    """One elementwise operator: `y = expression`, `gradients[i]` = cotangent of operand i.

    "0" is a gradient of zeros, which PyTorch returns; None means that there is no gradient.
    """

    expression: str
    gradients: tuple[str | None, ...] = ()
    flops: int = 1
    result: str = "same"
    """Element type of the result: `same` as the last operand, or `bool`."""

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Operand names, `a`, `b`, `c` in order."""
        return tuple(n for n in "abc" if n in names(self.expression))


@functools.cache
def names(expression: str) -> frozenset[str]:
    """Variables in an expression."""
    tree = ast.parse(expression, mode="eval")
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in called)


_GELU_INNER = "0.7978845608028654 * (a + 0.044715 * a * a * a)"
_PHI = "0.5 * (1 + erf(a * 0.7071067811865476))"

TABLE: dict[str, Row] = {
    #           y =                          cotangents                                              FLOPs
    "add": Row("a + b", ("g", "g")),
    "sub": Row("a - b", ("g", "-g")),
    "mul": Row("a * b", ("g * b", "g * a")),
    "div": Row("a / b", ("g / b", "-g * (y / b)"), 4),
    "pow": Row(
        "pow(a, b)",
        ("where(b == 0, 0, g * (b * pow(a, b - 1)))", "where((a == 0) & (b >= 0), 0, g * (y * log(a)))"),
        20,
    ),
    "fmod": Row("fmod(a, b)", ("g", "-g * trunc(a / b)"), 8),
    "remainder": Row(
        "where((fmod(a, b) != 0) & ((fmod(a, b) < 0) != (b < 0)), fmod(a, b) + b, fmod(a, b))",
        ("g", "-g * floor_divide(a, b)"),
        12,
    ),
    "maximum": Row(
        "max(a, b)", ("where(a < b, 0, where(a == b, g / 2, g))", "where(b < a, 0, where(a == b, g / 2, g))")
    ),
    "minimum": Row(
        "min(a, b)", ("where(a > b, 0, where(a == b, g / 2, g))", "where(b > a, 0, where(a == b, g / 2, g))")
    ),
    "clamp": Row(
        "min(c, max(b, a))",
        ("where((a >= b) & (a <= c), g, 0)", "where((a < b) & (b < c), g, 0)", "where(a > c, g, where(c < b, g, 0))"),
        2,
    ),
    "hardtanh": Row(  # clamp, whose operand has no gradient where it is equal to a bound
        "min(c, max(b, a))",
        ("where((a > b) & (a < c), g, 0)", "where((a < b) & (b < c), g, 0)", "where(a > c, g, where(c < b, g, 0))"),
        2,
    ),
    "clamp_min": Row("max(b, a)", ("where(a >= b, g, 0)", "where(a < b, g, 0)")),
    "clamp_max": Row("min(b, a)", ("where(a <= b, g, 0)", "where(a > b, g, 0)")),
    "where": Row("where(a, b, c)", (None, "where(a, g, 0)", "where(a, 0, g)")),
    "neg": Row("-a", ("-g",)),
    "abs": Row("abs(a)", ("g * sign(a)",)),
    "sign": Row("sign(a)", ("0",)),
    "square": Row("a * a", ("g * (2 * a)",)),
    "reciprocal": Row("1 / a", ("-g * (y * y)",), 4),
    "sqrt": Row("sqrt(a)", ("g / (2 * y)",), 4),
    "rsqrt": Row("rsqrt(a)", ("-0.5 * g * y * y * y",), 5),
    "exp": Row("exp(a)", ("g * y",), 10),
    "expm1": Row("expm1(a)", ("g * (y + 1)",), 10),
    "log": Row("log(a)", ("g / a",), 10),
    "log1p": Row("log1p(a)", ("g / (a + 1)",), 10),
    "sin": Row("sin(a)", ("g * cos(a)",), 10),
    "cos": Row("cos(a)", ("-g * sin(a)",), 10),
    "tan": Row("tan(a)", ("g * (1 + y * y)",), 12),
    "atan": Row("atan(a)", ("g / (1 + a * a)",), 12),
    "asin": Row("asin(a)", ("g * rsqrt(1 - a * a)",), 20),
    "acos": Row("acos(a)", ("-g * rsqrt(1 - a * a)",), 20),
    "asinh": Row("asinh(a)", ("g * rsqrt(a * a + 1)",), 20),
    "acosh": Row("acosh(a)", ("g * rsqrt(a * a - 1)",), 20),
    "atanh": Row("atanh(a)", ("g / (1 - a * a)",), 20),
    "atan2": Row(
        "atan2(a, b)",
        (
            "where(a * a + b * b == 0, 0, g * b * (1 / (a * a + b * b)))",
            "where(a * a + b * b == 0, 0, g * -a * (1 / (a * a + b * b)))",
        ),
        24,
    ),
    "exp2": Row("exp2(a)", ("g * y * 0.6931471805599453",), 20),
    "log2": Row("log2(a)", ("g / (a * 0.6931471805599453)",), 20),
    "log10": Row("log10(a)", ("g / (a * 2.302585092994046)",), 20),
    "hypot": Row("hypot(a, b)", ("g * a / y", "g * b / y"), 20),
    "copysign": Row("copysign(a, b)", ("where(a == 0, 0, g * (y / a))", "0")),
    "bce": Row(
        "-(b * max(log(a), -100) + (1 - b) * max(log1p(-a), -100))",
        ("g * (a - b) / max((1 - a) * a, 9.999999960041972e-13)", "g * (log1p(-a) - log(a))"),
        24,
    ),
    "tanh": Row("tanh(a)", ("g * (1 - y * y)",), 12),
    "sigmoid": Row("sigmoid(a)", ("g * y * (1 - y)",), 12),
    "erf": Row("erf(a)", ("g * 1.1283791670955126 * exp(-a * a)",), 15),
    "relu": Row("where(a < 0, 0, a)", ("where(y <= 0, 0, g)",)),
    "silu": Row("a * sigmoid(a)", ("g * sigmoid(a) * (1 + a * (1 - sigmoid(a)))",), 13),
    "gelu_erf": Row(f"a * {_PHI}", (f"g * ({_PHI} + a * 0.3989422804014327 * exp(-0.5 * a * a))",), 20),
    "gelu_tanh": Row(
        f"0.5 * a * (1 + tanh({_GELU_INNER}))",
        (
            f"g * (0.5 * (1 + tanh({_GELU_INNER})) + 0.5 * a * (1 - tanh({_GELU_INNER}) * "
            f"tanh({_GELU_INNER})) * 0.7978845608028654 * (1 + 0.134145 * a * a))",
        ),
        20,
    ),
    "elu": Row("where(a > 0, a, expm1(a))", ("where(a <= 0, g * exp(a), g)",), 11),
    # PyTorch multiplies by a sixth of single precision, whatever the element type.
    "hardsigmoid": Row("min(max(a + 3, 0), 6) / 6", ("where((a > -3) & (a < 3), g * 0.16666667163372040, 0)",), 4),
    "hardswish": Row("a * min(max(a + 3, 0), 6) / 6", ("where(a <= -3, 0, where(a < 3, g * (a / 3 + 0.5), g))",), 5),
    "cosh": Row("(exp(a) + exp(-a)) * 0.5", ("g * ((expm1(a) - expm1(-a)) * 0.5)",), 22),
    "sinh": Row("(expm1(a) - expm1(-a)) * 0.5", ("g * ((exp(a) + exp(-a)) * 0.5)",), 22),
    "logaddexp": Row(
        "where(a == b, a + 0.6931471805599453, max(a, b) + log1p(exp(-abs(a - b))))",
        ("g / (1 + exp(b - a))", "g / (1 + exp(a - b))"),
        25,
    ),
    "xlogy": Row(
        "where(isnan(b), b, where(a == 0, 0, a * log(b)))",
        ("where((a == 0) & (b <= 0), 0, xlogy(g, b))", "g * a / b"),
        13,
    ),
    "xlog1py": Row(
        "where(isnan(b), b, where(a == 0, 0, a * log1p(b)))",
        ("where((a == 0) & (b <= -1), 0, xlog1py(g, b))", "g * a / (b + 1)"),
        13,
    ),
    # The terms that addcmul and addcdiv add; `c` is their number.
    "scaled_mul": Row("c * a * b", ("g * (b * c)", "g * (a * c)", "g * (a * b)"), 2),
    "scaled_div": Row("c * a / b", ("g * (c / b)", "-g * ((c * a) / (b * b))", "g * (a / b)"), 5),
    # Losses of a difference `a`, linear beyond `b`; `where` around a square would have NaN from it as a gradient.
    "smooth_l1": Row(
        "where(abs(a) < b, 0.5 * a * a / b, abs(a) - 0.5 * b)",
        ("smooth_l1_slope(a, b) * g", "g * where(abs(a) < b, -0.5 * a * a / (b * b), -0.5)"),
        7,
    ),
    "smooth_l1_slope": Row(
        "where(abs(a) >= b, sign(a), a / b)",
        ("where(abs(a) >= b, 0, g / b)", "where(abs(a) >= b, 0, -g * a / (b * b))"),
        6,
    ),
    "huber": Row(
        "where(abs(a) <= b, 0.5 * a * a, b * (abs(a) - 0.5 * b))",
        ("huber_slope(a, b) * g", "where(abs(a) <= b, 0, g * (abs(a) - b))"),
        7,
    ),
    "huber_slope": Row("min(max(a, -b), b)", ("where(abs(a) > b, 0, g)", "where(abs(a) > b, g * sign(a), 0)"), 3),
    "logsigmoid": Row(
        "min(a, 0) - log1p(exp(-abs(a)))", ("g * (where(a > 0, exp(-abs(a)), 1) / (1 + exp(-abs(a))))",), 25
    ),
    "entr": Row(
        "where(a > 0, -a * log(a), where(a < 0, -1e999, where(a == 0, 0, a)))", ("g * -(1 + log(a))",), 13
    ),  # beyond the largest number lies infinity
    "mish": Row(
        "a * tanh(max(a, 0) + log1p(exp(-abs(a))))",
        ("g * (tanh(softplus(a)) + a * sigmoid(a) * (1 - tanh(softplus(a)) * tanh(softplus(a))))",),
        40,
    ),
    "prelu": Row("where(a > 0, a, b * a)", ("where(a > 0, g, b * g)", "where(a > 0, 0, a * g)"), 2),
    "logit": Row("log(a / (1 - a))", ("where(a < 0, log(a), where(a > 1, log(1 - a), g / abs(a * (1 - a))))",), 15),
    "softplus": Row("max(a, 0) + log1p(exp(-abs(a)))", ("g * sigmoid(a)",), 25),
    "floor": Row("floor(a)", ("0",)),
    "ceil": Row("ceil(a)", ("0",)),
    "round": Row("round(a)", ("0",)),
    "trunc": Row("trunc(a)", ("0",)),
    "floor_divide": Row("floor_divide(a, b)", ("0", "0"), 4),
    "eq": Row("a == b", (None, None), result="bool"),
    "ne": Row("a != b", (None, None), result="bool"),
    "lt": Row("a < b", (None, None), result="bool"),
    "le": Row("a <= b", (None, None), result="bool"),
    "gt": Row("a > b", (None, None), result="bool"),
    "ge": Row("a >= b", (None, None), result="bool"),
    "isnan": Row("isnan(a)", (None,), result="bool"),
    "isinf": Row("isinf(a)", (None,), result="bool"),
    "bitwise_and": Row("bit_and(a, b)", (None, None)),
    "bitwise_or": Row("bit_or(a, b)", (None, None)),
    "bitwise_xor": Row("bit_xor(a, b)", (None, None)),
    "bitwise_not": Row("bit_not(a)", (None,)),
    "shift_left": Row("shift_left(a, b)", (None, None)),
    "shift_right": Row("shift_right(a, b)", (None, None)),
    "logical_and": Row("logical_and(a, b)", (None, None), result="bool"),
    "logical_or": Row("logical_or(a, b)", (None, None), result="bool"),
    "logical_not": Row("logical_not(a)", (None,), result="bool"),
}

JUMPS = frozenset(
    ("floor", "ceil", "round", "trunc", "floor_divide", "fmod", "remainder", "eq", "ne", "lt", "le", "gt", "ge")
)
"""Operators whose results jump where an operand changes by its last bit, so that operands are rounded as in PyTorch."""


@dataclass(frozen=True)
class Elementwise(Operator):
    """The operator `kind` of `TABLE`, with broadcasting."""

    kind: str

    @property
    def row(self) -> Row:
        """The table row."""
        return TABLE[self.kind]

    @property
    def label(self) -> str:
        return self.kind

    def attributes(self) -> dict[str, Any]:
        return {}

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return _infer(self.kind, operands)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            scope = dict(zip("abc", operands, strict=False))
            result = eval(compile(self.row.expression, self.kind, "eval"), {**FUNCTIONS, "__builtins__": {}}, scope)
        if self.row.result != "bool" and result.dtype != operands[-1].dtype:
            result = result.astype(operands[-1].dtype)
        return (np.asarray(result),)

    def gradient(self, b: Builder, index: int, operands: tuple[Value, ...], y: Value, g: Value) -> Value | None:
        """The cotangent of operand `index`, in the broadcast shape; None where it is zero."""
        formula = self.row.gradients[index]
        if formula in (None, "0"):
            return None
        scope = dict(zip("abc", operands, strict=False)) | {"y": y, "g": g}
        return emit_expression(b, formula, scope)

    def flops(self, *operands: Tensor) -> Dim:
        return self.row.flops * product(self.infer(*operands)[0].shape)


@functools.lru_cache(maxsize=1 << 11)
def _infer(kind: str, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The shape rule of every row; cached, since each pass asks for every operator."""
    if len(operands) != len(TABLE[kind].operands):
        raise Invalid(f"{kind} takes {len(TABLE[kind].operands)} operands, not {len(operands)}")
    numeric = operands[1:] if kind == "where" else operands
    if len({t.dtype for t in numeric}) != 1:
        raise Invalid(f"{kind} got element types {', '.join(t.dtype.short for t in numeric)}; cast first")
    dtype = DType.bool if TABLE[kind].result == "bool" else operands[-1].dtype
    shape = broadcast(*(t.shape for t in operands))
    orders = {t.order for t in operands if t.rank == len(shape) and t.shape == shape}
    return (Tensor(shape, dtype, orders.pop() if len(orders) == 1 else None),)


_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.BitAnd: "logical_and"}
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
_CALLS = {"max": "maximum", "min": "minimum"}


def emit_expression(b: Builder, expression: str, scope: dict[str, Value]) -> Value:
    """Emit the operators of an expression over `scope`; equal subexpressions are emitted once."""
    done: dict[str, Value | float] = {}

    def visit(node: ast.expr) -> Value | float:
        key = ast.dump(node)
        if key not in done:
            done[key] = build(node)
        return done[key]

    def combine(kind: str, *operands: Value | float) -> Value | float:
        like = next((v for v in operands if isinstance(v, Value) and v.dtype is not DType.bool), None)
        like = like or next(v for v in operands if isinstance(v, Value))
        values = [v if isinstance(v, Value) else like.constant(v) for v in operands]
        (result,) = b.emit(make(kind), *values)
        return result

    def build(node: ast.expr) -> Value | float:
        match node:
            case ast.Name(id=name):
                return scope[name]
            case ast.Constant(value=int() | float() as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = visit(operand)
                return combine("neg", inner) if isinstance(inner, Value) else -inner
            case ast.BinOp(left=left, op=op, right=right):
                return combine(_BINARY[type(op)], visit(left), visit(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return combine(_COMPARE[type(op)], visit(left), visit(right))
            case ast.Call(func=ast.Name(id=name), args=args):
                return combine(_CALLS.get(name, name), *map(visit, args))
        raise Invalid(f"expression {expression!r} uses {ast.unparse(node)!r}, which no operator computes")

    result = visit(ast.parse(expression, mode="eval").body)
    assert isinstance(result, Value)
    return result


def _constructor(kind: str) -> Callable[..., Operator]:
    return functools.partial(Elementwise, kind=kind)


for _kind in TABLE:
    register(_kind, _constructor(_kind))


@dataclass(frozen=True)
class Cast(Operator):
    """`x` in another element type, rounded or truncated as C++ does."""

    name = "cast"
    dtype: DType

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        return (Tensor(x.shape, self.dtype, x.order),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        (x,) = operands
        wide = "float64" if self.dtype in (DType.float32, DType.bfloat16, DType.float16) else self.dtype.numpy
        return (x.astype(wide),)

    def vjp(self, b: Builder, x: Value, grad_y: Value) -> Value | None:
        return grad_y.cast(x.dtype) if x.dtype.is_float else None

    @property
    def zero_gradient(self) -> bool:  # type: ignore[override]
        """Casting to an integer cuts the gradient."""
        return not self.dtype.is_float


@dataclass(frozen=True)
class Full(Operator):
    """A tensor of one constant; an integer that is out of the type's range is taken modulo 2^bits."""

    name = "full"
    operands = ()
    zero_gradient = True
    value: float | int | bool
    shape: Shape = ()
    dtype: DType = DType.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", self.dtype.wrapped(self.value))

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return (Tensor(self.shape, self.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        wide = "float64" if self.dtype.is_float else self.dtype.numpy
        return (np.full(self.shape, self.value, wide),)

    def flops(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True)
class Iota(Operator):
    """Indices along one dimension: `y[i0, ..., ik] = start + step * i_dim`, of shape `shape`."""

    name = "iota"
    operands = ()
    zero_gradient = True
    shape: Shape
    dim: int = 0
    dtype: DType = DType.int64
    start: int | float = 0
    step: int | float = 1

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return (Tensor(self.shape, self.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        index = np.arange(self.shape[self.dim]) * self.step + self.start
        shape = [1] * len(self.shape)
        shape[self.dim] = -1
        wide = "float64" if self.dtype.is_float else self.dtype.numpy
        return (np.broadcast_to(index.reshape(shape), self.shape).astype(wide),)

    def flops(self, *operands: Tensor) -> Dim:
        return 0
