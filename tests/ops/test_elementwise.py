"""Every row of the table: derivatives proven by SymPy where it can, values and gradients against PyTorch."""

import itertools
import re
from typing import Any

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F

from daceml_train.errors import Invalid
from daceml_train.ops.elementwise import TABLE, Cast, Elementwise, Full, Iota
from daceml_train.tensor import DType, Tensor
from tests.ops.checking import check_gradient, check_op, check_types, numbers

TORCH: dict[str, Any] = {
    "div": torch.true_divide,
    "remainder": torch.remainder,
    "silu": F.silu,
    "relu": torch.relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "softplus": lambda a: F.softplus(a, threshold=1e6),
    "floor_divide": lambda a, b: torch.floor_divide(a.detach(), b.detach()),
    "bce": lambda a, b: F.binary_cross_entropy(
        a.expand(torch.broadcast_shapes(a.shape, b.shape)),
        b.expand(torch.broadcast_shapes(a.shape, b.shape)),
        reduction="none",
    ),
    "elu": F.elu,
    "hardsigmoid": lambda a: (
        F.hardsigmoid(a.detach()) + torch.where((a > -3) & (a < 3), a - a.detach(), 0.0) * 0.1666666716337204
    ),  # PyTorch's gradient has no derivative
    "hardswish": F.hardswish,
    "clamp": lambda *xs: torch.clamp(*torch.broadcast_tensors(*xs)),
    "hardtanh": lambda a, b, c: torch.where(
        (a > b) & (a < c), a, torch.clamp(*torch.broadcast_tensors(a.detach(), b, c))
    ),
    "xlog1py": torch.special.xlog1py,
    "scaled_mul": lambda a, b, c: c * a * b,
    "scaled_div": lambda a, b, c: c * a / b,
    "smooth_l1": lambda a, b: torch.where(a.abs() < b, 0.5 * a * a / b, a.abs() - 0.5 * b),
    "smooth_l1_slope": lambda a, b: torch.where(a.abs() < b, a / b, a.detach().sign()),
    "huber": lambda a, b: torch.where(a.abs() <= b, 0.5 * a * a, b * (a.abs() - 0.5 * b)),
    "huber_slope": lambda a, b: torch.where(a.abs() <= b, a, a.detach().sign() * b),
    "entr": torch.special.entr,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "prelu": lambda a, b: torch.where(a > 0, a, a * b),
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
}
BITS = [kind for kind in TABLE if kind.startswith(("bitwise", "shift"))]
REALS = [kind for kind in TABLE if kind not in BITS]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, 100.0, -100.0, np.inf, -np.inf, np.nan]


RANGES = (
    dict.fromkeys(("sqrt", "rsqrt", "log", "log1p", "log2", "log10", "pow"), (0.1, 3.0))
    | dict.fromkeys(("asin", "acos", "atanh"), (-0.9, 0.9))
    | {"acosh": (1.1, 3.0), "bce": (0.1, 0.9), "logit": (0.1, 0.9), "xlogy": (0.1, 3.0)}
    | dict.fromkeys(("xlog1py", "entr", "smooth_l1", "smooth_l1_slope", "huber", "huber_slope"), (0.1, 3.0))
)


def reference(kind: str) -> Any:
    return TORCH.get(kind) or getattr(torch, kind)


def boolean(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2, shape).astype(bool)


def operands(kind: str, shape: tuple[int, ...]) -> list[np.ndarray]:
    count = len(TABLE[kind].operands)
    low, high = RANGES.get(kind, (-3.0, 3.0))
    xs = [numbers(*shape, seed=i, low=low, high=high) for i in range(count)]
    return [boolean(*shape), *xs[1:]] if kind == "where" else xs


@pytest.mark.parametrize("kind", REALS)
def test_against_torch(kind: str) -> None:
    for shape in ((3, 4), (1,), (), (0, 2)):
        options = {"smooth": bool(np.prod(shape)) and kind not in ("fmod", "remainder")}
        check_op(Elementwise(kind), *operands(kind, shape), reference=reference(kind), **options)


@pytest.mark.parametrize("kind", [k for k in REALS if len(TABLE[k].operands) > 1])
def test_broadcasting(kind: str) -> None:
    count = len(TABLE[kind].operands)
    for shapes in itertools.product([(3, 4), (1, 4), (4,), (3, 1), ()], repeat=count):
        if (3, 4) in shapes:
            xs = [operands(kind, shape)[i] for i, shape in enumerate(shapes)]
            wrt = tuple(i for i, formula in enumerate(TABLE[kind].gradients) if formula not in (None, "0"))
            if wrt:
                check_gradient(Elementwise(kind), xs, reference(kind), wrt, [0])


BY_PARTS = ("scaled_mul", "scaled_div", "smooth_l1", "smooth_l1_slope", "huber", "huber_slope", "prelu")
"""Parts of operators of PyTorch's: their special points are swept by `make conformance-special`."""


@pytest.mark.parametrize("kind", [kind for kind in REALS if kind not in BY_PARTS])
def test_special_points(kind: str) -> None:
    """Zeros of either sign, infinities, NaN, +-100 and ties: the values and first derivatives of PyTorch."""
    count = len(TABLE[kind].operands)
    points = np.array(list(itertools.product(SPECIAL, repeat=2 if kind == "where" else count))).T
    xs = [p.copy() for p in points]
    if kind == "where":
        xs = [boolean(xs[0].size), *xs]
    if kind in (
        "floor_divide",
        "fmod",
        "remainder",
    ):  # PyTorch's vectorized and scalar versions differ by zero and infinity
        finite = np.isfinite(xs[0]) & np.isfinite(xs[1]) & (xs[1] != 0)
        xs = [x[finite] for x in xs]
    if kind == "logit":  # by position in a vector, PyTorch's derivative at -0 has either sign
        xs = [x[~(np.signbit(x) & (x == 0))] for x in xs]
    if kind == "bce":
        inside = np.all([(x >= 0) & (x <= 1) for x in xs], 0)
        xs = [x[inside] for x in xs]
    check_op(Elementwise(kind), *xs, reference=reference(kind), smooth=False, second=False)


INTEGERS = [
    "add",
    "sub",
    "mul",
    "maximum",
    "minimum",
    "neg",
    "abs",
    "sign",
    "square",
    "floor_divide",
    "remainder",
    "fmod",
    "relu",
]


@pytest.mark.parametrize("kind", TABLE)
def test_integers(kind: str) -> None:
    row = TABLE[kind]
    if kind in INTEGERS or kind in BITS or row.result == "bool":
        second = np.array([2, 3, 1 if kind in BITS else -2, 7, 4, 5])
        xs = [np.array([-7, -1, 2, 7, 0, 5]), second][: len(row.operands)]
        check_op(Elementwise(kind), *xs, reference=reference(kind))
        narrow = [x.astype(np.int32) for x in xs]
        assert Elementwise(kind).evaluate(*narrow)[0].dtype == (bool if row.result == "bool" else np.int32)


def test_remainder_is_exact_far_from_zero() -> None:
    a, b = np.array([1e15 + 0.5, -1e15]), np.array([0.1, 0.3])
    np.testing.assert_array_equal(
        Elementwise("remainder").evaluate(a, b)[0], torch.remainder(*map(torch.as_tensor, (a, b)))
    )


# ---- proofs -----------------------------------------------------------------------------------------------------
SYMBOLIC: dict[str, Any] = {
    **{n: getattr(sympy, n) for n in ("exp", "log", "sqrt", "tanh", "sin", "cos", "tan", "atan", "erf", "sign")},
    "log1p": lambda x: sympy.log(1 + x),
    "expm1": lambda x: sympy.exp(x) - 1,
    "pow": lambda x, y: x**y,
    "abs": sympy.Abs,
    "sigmoid": lambda x: 1 / (1 + sympy.exp(-x)),
    "rsqrt": lambda x: 1 / sympy.sqrt(x),
    "where": lambda condition, yes, no: yes if bool(condition) else no,
}
PROVEN = [
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "square",
    "reciprocal",
    "sqrt",
    "rsqrt",
    "exp",
    "expm1",
    "log",
    "log1p",
    "sin",
    "cos",
    "tan",
    "atan",
    "tanh",
    "sigmoid",
    "erf",
    "silu",
    "gelu_erf",
    "gelu_tanh",
    "abs",
    "pow",
]


@pytest.mark.parametrize(("kind", "sign"), [*((kind, 1) for kind in PROVEN), ("abs", -1)])
def test_derivative_is_proven(kind: str, sign: int) -> None:
    """gradient = g d(expression)/d(operand), as an identity in the operands; constants are made exact."""
    row = TABLE[kind]
    scope = {n: (sign if kind == "abs" else 1) * sympy.Symbol(n, positive=True) for n in "abc"}
    exact = {
        "0.7978845608028654": sympy.sqrt(2 / sympy.pi),
        "0.3989422804014327": 1 / sympy.sqrt(2 * sympy.pi),
        "0.7071067811865476": 1 / sympy.sqrt(2),
        "1.1283791670955126": 2 / sympy.sqrt(sympy.pi),
    }
    for text, value in exact.items():
        assert abs(float(value) - float(text)) < 1e-15

    def number(text: str) -> sympy.Expr:
        return exact.get(text, sympy.Rational(text))

    def symbolic(expression: str, names: dict[str, Any]) -> sympy.Expr:
        expression = re.sub(r"\d+\.\d+", lambda match: f"number('{match[0]}')", expression)
        return sympy.sympify(eval(expression, {**SYMBOLIC, "number": number, "__builtins__": {}}, names))

    y, g = symbolic(row.expression, scope), sympy.Symbol("g")
    for operand, formula in zip(row.operands, row.gradients, strict=True):
        assert formula is not None
        base = scope[operand].free_symbols.pop()
        slope = sympy.diff(y, base) / sympy.diff(scope[operand], base)
        difference = symbolic(formula, scope | {"y": y, "g": g}) - g * slope
        assert sympy.simplify(difference.rewrite(sympy.exp)) == 0, (
            f"{kind}, {operand}: off by {sympy.simplify(difference)}"
        )


# ---- the other operators ----------------------------------------------------------------------------------------
def test_cast() -> None:
    check_op(Cast(DType.float64), numbers(3, 2), reference=lambda x: x * 1)
    check_op(Cast(DType.int64), 3 * numbers(3, 2), reference=lambda x: x.long())
    check_op(Cast(DType.bool), np.array([0.0, 0.3, np.nan, -1]), reference=lambda x: x.bool())
    assert Cast(DType.int64).zero_gradient and not Cast(DType.float32).zero_gradient


def test_constants() -> None:
    check_op(Full(2.5, (2, 3), DType.float64), reference=lambda: torch.full((2, 3), 2.5, dtype=torch.float64))
    check_op(Full(True, (), DType.bool), reference=lambda: torch.tensor(True))
    check_op(Iota((2, 3), 1), reference=lambda: torch.arange(3).expand(2, 3))
    check_op(Iota((2, 0), 0, DType.float64, 0.5, 2), reference=lambda: torch.zeros(2, 0, dtype=torch.float64))
    check_types(Elementwise("add"), (numbers(2), numbers(2)))


def test_errors() -> None:
    x = Tensor((3, 4))
    with pytest.raises(Invalid, match="add takes 2 operands, not 1"):
        Elementwise("add").infer(x)
    with pytest.raises(Invalid, match="add got element types f32, i64; cast first"):
        Elementwise("add").infer(x, Tensor((3, 4), DType.int64))
    with pytest.raises(Invalid, match=r"shapes \[3, 4\], \[3\] do not broadcast"):
        Elementwise("mul").infer(x, Tensor((3,)))
