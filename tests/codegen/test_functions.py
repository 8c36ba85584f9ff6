"""Accuracy of `native/vector_math.h`, in units in the last place of float32, and that its functions vectorize."""

import re
import subprocess
from typing import Any

import numpy as np
import pytest
import torch

from daceml_train.codegen.cpu.compile import FLAGS, HEADERS, compile_kernels, compiler_command, load
from daceml_train.ops.elementwise import TABLE
from daceml_train.ops.functions import FUNCTIONS
from daceml_train.ops.operator import Value, make
from daceml_train.tensor import DType
from tests.codegen.running import FOLDER, Case, describe, kernel_of

pytestmark = pytest.mark.compiled

RANGES = {
    "exp": (-110, 88.6),
    "expm1": (-20, 20),
    "log": (1e-30, 1e30),
    "log1p": (-0.999, 1e6),
    "tanh": (-12, 12),
    "sigmoid": (-80, 80),
    "erf": (-5, 5),
    "sin": (-1000, 1000),
    "cos": (-1000, 1000),
    "atan": (-100, 100),
    "sqrt": (0, 1e20),
    "rsqrt": (1e-20, 1e20),
    "silu": (-40, 40),
    "gelu_tanh": (-6, 6),
    "gelu_erf": (-5, 5),
    "softplus": (-40, 40),
    "reciprocal": (1e-20, 1e20),
    "round": (-9, 9),
    "floor": (-9, 9),
    "square": (-9, 9),
}
SCALAR = ["pow", "asin", "acos", "asinh", "acosh", "atanh", "atan2", "exp2", "log2", "log10", "hypot"]
ABSOLUTE = {"sin": 2e-7, "cos": 2e-7, "gelu_erf": 1e-6, "gelu_tanh": 1e-6}
"""Functions with zeros: the error is bounded absolutely."""


def samples(low: float, high: float) -> torch.Tensor:
    spread = torch.linspace(low, high, 20_000, dtype=torch.float64)
    small = torch.logspace(-30, np.log10(max(abs(high), 1e-3)), 20_000, dtype=torch.float64)
    near = torch.cat([small, -small if low < 0 else small])
    return torch.cat([spread, near[(near >= low) & (near <= high)]]).float()


def test_accuracy():
    cases = {
        kind: Case(kind, kernel_of(lambda x, k=kind: x.unary(k), describe(x)), [x])
        for kind, x in ((k, samples(*r)) for k, r in RANGES.items())
    }
    paths = compile_kernels([c.code for c in cases.values()], FOLDER, jobs=2)
    errors = {}
    for kind, case in cases.items():
        case.call(load(paths[case.code.key], case.code.key))
        got, want = case.outputs[0].double().numpy(), case.expected[0]
        spacing = np.spacing(np.maximum(np.abs(want), 1.2e-38).astype(np.float32)).astype(np.float64)
        ulps, absolute = np.abs(got - want) / spacing, np.abs(got - want)
        errors[kind] = (float(ulps.max()), float(absolute.max()))
        print(f"{kind}: {ulps.max():.2f} ulp, {absolute.max():.2g}")
        fits = absolute.max() <= ABSOLUTE[kind] if kind in ABSOLUTE else ulps.max() <= 3
        assert fits, (kind, errors[kind], case.inputs[0][int(ulps.argmax())])


def test_special_arguments():
    x = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, -200.0, 200.0, -1.0, 1.0, 1e-40, 3e38])
    kinds = ["exp", "log", "log1p", "tanh", "sigmoid", "erf", "expm1", "atan", "sqrt", "abs", "sign", "isnan", "isinf"]
    case = Case("special", kernel_of(lambda x: [x.unary(k) for k in kinds], describe(x)), [x])
    path = compile_kernels([case.code], FOLDER)[case.code.key]
    case.call(load(path, case.code.key))
    with np.errstate(all="ignore"):
        for kind, got, want in zip(kinds, case.outputs, case.expected, strict=True):
            want = want.astype(np.float32) if want.dtype != bool else want
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-38, err_msg=kind)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    ("dtype", "divisor", "ulps"),
    [
        (torch.float32, 3.0, 1.5),
        (torch.float32, 51200.0, 1.5),
        (torch.float32, 1e-38, 0.5),
        (torch.float32, 2.5e30, 0.5),
        (torch.float64, 3.0, 0.5),
    ],
)
def test_divisions_by_constants(dtype: torch.dtype, divisor: float, ulps: float, inner: bool) -> None:
    """Those that are not stored are products where the reciprocal is well within range, and float's digits are enough."""
    x = torch.cat([torch.linspace(-9, 9, 4001, dtype=dtype), torch.tensor([0.0, torch.inf, torch.nan], dtype=dtype)])
    case = Case("division", kernel_of(lambda x: x / divisor * 1.0 if inner else x / divisor, describe(x)), [x])
    path = compile_kernels([case.code], FOLDER)[case.code.key]
    case.call(load(path, case.code.key))
    with np.errstate(all="ignore"):
        want = x.numpy() / np.dtype(str(dtype).removeprefix("torch.")).type(divisor)
    got, known = case.outputs[0].numpy(), np.isfinite(want)
    np.testing.assert_array_equal(got[~known], want[~known])
    assert (np.abs(got[known] - want[known]) <= 2 * ulps * inner * np.spacing(np.abs(want[known]))).all()


DECIDING: dict[str, Any] = {
    "floor": lambda q, x, d: q.unary("floor"),
    "ceil of a sum": lambda q, x, d: (q + 2.0).unary("ceil"),
    "trunc": lambda q, x, d: q.unary("trunc"),
    "integer": lambda q, x, d: q.cast(DType.int64),
    "comparison": lambda q, x, d: q.apply(make("eq"), q.unary("round")),
    "floor_divide": lambda q, x, d: x.apply(make("floor_divide"), d),
    "remainder": lambda q, x, d: x.apply(make("remainder"), d),
    "fmod": lambda q, x, d: x.apply(make("fmod"), d),
}
"""What a quotient `q` of `x` and `d` decides."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", [41.0, 49.0, 0.1, None])
def test_quotients_that_decide_are_exact(divisor: float | None, dtype: torch.dtype) -> None:
    """A product with the reciprocal is none: 41 times a 41st of single precision is less than 1."""
    x = torch.arange(-3000, 3000, dtype=dtype) * (0.1 if divisor == 0.1 else 1.0)
    d = torch.tensor(49.0, dtype=dtype)

    def body(x, given):
        by = given if divisor is None else x.constant(divisor)
        return [decide(x.apply(make("div"), by), x, by) for decide in DECIDING.values()]

    case = Case("deciding", kernel_of(body, describe(x), describe(d)), [x, d])
    path = compile_kernels([case.code], FOLDER)[case.code.key]
    case.call(load(path, case.code.key))
    by, got = (
        d if divisor is None else torch.tensor(divisor, dtype=dtype),
        dict(zip(DECIDING, case.outputs, strict=True)),
    )
    q = x / by
    want = {
        "floor": q.floor(), "ceil of a sum": (q + 2).ceil(), "trunc": q.trunc(), "integer": q.long(),
        "comparison": q == q.round(), "floor_divide": x // by, "remainder": x % by, "fmod": x.fmod(by),
    }  # fmt: skip
    for name, expected in want.items():
        assert torch.equal(got[name], expected), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computed_16_bit_floats_are_rounded_where_a_digit_decides(dtype: torch.dtype) -> None:
    x = torch.arange(-256, 256).to(dtype)
    steps = {"floor": torch.floor, "round": torch.round, "lt": lambda v: v < 20, "integer": lambda v: v.long()}

    def body(x):
        y = x * 0.3
        return [y.unary("floor"), y.unary("round"), y.compare("lt", 20), y.cast(DType.int64)]

    case = Case("rounded", kernel_of(body, describe(x)), [x])
    path = compile_kernels([case.code], FOLDER)[case.code.key]
    case.call(load(path, case.code.key))
    for (name, step), got in zip(steps.items(), case.outputs, strict=True):
        assert torch.equal(got, step(x * 0.3)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quotients_that_are_rounded_or_compared(dtype: torch.dtype) -> None:
    """Whole numbers are not missed by a bit, whatever is divided by: a constant, one number, or one for each row."""
    special = torch.tensor([-0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38], dtype=dtype)
    x = torch.cat([torch.arange(-2000, 2000, dtype=dtype), special])
    divisors = [3, 7, 41, 49, 55, 61, 82, 97, 1e-38]
    rows = torch.tensor([[d] for d in divisors], dtype=dtype)

    def jumps(q: Value) -> list[Value]:
        return [
            q.unary("floor"),
            q.unary("trunc"),
            q.cast(DType.int32),
            q.compare("eq", 1.0),
            (q * 2 + 0.5).unary("ceil"),
        ]

    given = [x, rows, rows[3].clone()[0]]
    body = kernel_of(
        lambda x, r, s: [y for d in (*(x / d for d in divisors[:-1]), x / r, x / s) for y in jumps(d)],
        *map(describe, given),
    )
    with np.errstate(invalid="ignore"):
        case = Case("jumps", body, given)
    path = compile_kernels([case.code], FOLDER)[case.code.key]
    case.call(load(path, case.code.key))
    quotients = [*(x / d for d in divisors[:-1]), x / rows, x / given[2]]
    want = [y for q in quotients for y in (q.floor(), q.trunc(), q.to(torch.int32), q == 1, (q * 2 + 0.5).ceil())]
    for a, b in zip(case.outputs, want, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
        assert a.dtype is torch.bool or torch.equal(a.signbit(), b.signbit()) or bool(a.isnan().any())


def test_every_row_of_the_table_prints_and_vectorizes():
    """`pow` of two arrays and what is seldom used call the C library; everything else is vector code.

    All but `bce`, of whose two bounded logarithms gcc makes branches.
    """
    names = [n for n in TABLE if n not in (*SCALAR, "bce") and not n.startswith(("bitwise", "shift"))]
    x = torch.rand(64) + 0.5
    mask = torch.rand(64) < 0.5
    sources = []
    for name in names:

        def one(a, b, m, n=name):
            return body_of(n, a, b, m)

        sources.append(Case(name, kernel_of(one, describe(x), describe(x), describe(mask)), [x, x + 0.1, mask]))
    paths = compile_kernels([c.code for c in sources], FOLDER, jobs=2)
    for case in sources:
        case.call(load(paths[case.code.key], case.code.key))
        assert case.worst() < 3e-6, case.name
    distinct = {c.code.key: c.code.source.replace('#include "kernel.h"', "") for c in sources}  # some have one text
    report = vectorized('#include "kernel.h"\n' + "\n".join(distinct.values()))
    assert not report, "\n".join(report)


def test_bounds_on_both_sides_vectorize() -> None:
    x = torch.tensor([-3.0, 0.5, 9.0, float("nan"), float("inf"), -float("inf")]).repeat(40)
    bounds = torch.tensor(0.25), torch.tensor(6.0)

    def body(x, low, high):
        return x.apply(make("maximum"), low.expand(x.shape)).apply(make("minimum"), high.expand(x.shape))

    case = Case("bounds", kernel_of(body, *map(describe, (x, *bounds))), [x, *bounds])
    path = compile_kernels([case.code], FOLDER)[case.code.key]
    case.call(load(path, case.code.key))
    torch.testing.assert_close(case.outputs[0], x.clamp(*bounds), equal_nan=True)
    assert not vectorized(case.code.source)


def test_calls_of_the_c_library() -> None:
    x, y = torch.rand(64) * 0.8 + 0.1, torch.rand(64) - 0.5
    ones = [n for n in SCALAR if len(TABLE[n].operands) == 1]
    twos = [n for n in (*SCALAR, "bce", "copysign") if len(TABLE[n].operands) == 2]

    def body(a, b):
        up = a + 1.0
        return [*((up if n == "acosh" else a).unary(n) for n in ones), *(a.apply(make(n), b) for n in twos)]

    case = Case("scalar", kernel_of(body, describe(x), describe(y)), [x, y])
    path = compile_kernels([case.code], FOLDER)[case.code.key]
    case.call(load(path, case.code.key))
    assert case.worst() < 3e-6


def test_bits_of_integers() -> None:
    a, b = torch.tensor([-7, 12, 5, 1 << 20]), torch.tensor([3, 1, 70, -1])
    for dtype in (torch.int64, torch.int32, torch.uint8):
        x, y = a.to(dtype), b.to(dtype)

        def body(x, y):
            results = [x.apply(make(n), y) for n in ("bitwise_and", "bitwise_or", "bitwise_xor")]
            return [*results, x.unary("bitwise_not")]

        case = Case("bits", kernel_of(body, describe(x), describe(y)), [x, y])
        path = compile_kernels([case.code], FOLDER)[case.code.key]
        case.call(load(path, case.code.key))
        wanted = [x & y, x | y, x ^ y, ~x]
        assert all(torch.equal(got, want) for got, want in zip(case.outputs, wanted, strict=True))
    case = Case(
        "shifts",
        kernel_of(lambda x, y: [x.apply(make(f"shift_{d}"), y) for d in ("left", "right")], describe(a), describe(b)),
        [a, b],
    )
    path = compile_kernels([case.code], FOLDER)[case.code.key]
    case.call(load(path, case.code.key))
    assert torch.equal(case.outputs[0], a << b) and torch.equal(case.outputs[1], a >> b)


def body_of(name, a, b, m):
    operands = {"where": (m, a, b)}.get(name, (a, b, a)[: len(TABLE[name].operands)])
    return operands[0].apply(make(name), *operands[1:])


def vectorized(source: str) -> list[str]:
    """The `omp simd` loops that the compiler did not vectorize."""
    command = [
        *compiler_command(),
        *FLAGS,
        f"-I{HEADERS}",
        "-x",
        "c++",
        "-",
        "-o",
        "/dev/null",
        "-fopt-info-vec-optimized",
    ]
    run = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    done = {int(n) for n in re.findall(r"<stdin>:(\d+):\d+: optimized: loop vectorized", run.stderr)}
    lines = source.splitlines()
    return [
        "\n".join(lines[i : i + 12])
        for i, line in enumerate(lines)
        if "omp simd" in line and not {i + 2, i + 3} & done and "zero = " not in "".join(lines[i : i + 5])
    ]


def test_functions_are_those_of_the_table():
    """Every function that an expression may call is in the header."""
    header = (HEADERS / "vector_math.h").read_text()
    for name in set(FUNCTIONS) - {"where"}:
        assert re.search(rf"\b{name}\(", header), name
