"""Sums, maxima and products over every set of dimensions, in every layout and element type."""

import itertools

import pytest
import torch

from daceml_train.ops.operator import Value, make
from daceml_train.tensor import DType
from tests.codegen.running import Case, check, describe, kernel_of

pytestmark = pytest.mark.compiled
SUBSETS = [dims for n in range(1, 5) for dims in itertools.combinations(range(4), n)]


def reduction(kind: str, dims: tuple[int, ...], keepdim: bool = False):
    def body(x: Value) -> Value:
        return x.reduce(kind, dims, keepdim)

    return body


def cases(x: torch.Tensor, kind: str, name: str, subsets=SUBSETS, **options) -> list[Case]:
    return [
        Case(
            f"{kind} over {dims} of {name}",
            kernel_of(reduction(kind, dims, bool(sum(dims) % 2)), describe(x)),
            [x],
            **options,
        )
        for dims in subsets
    ]


def test_every_set_of_dimensions():
    x = torch.randn(3, 4, 5, 6)
    permuted = torch.randn(5, 3, 6, 4).permute(1, 3, 0, 2)
    last = x.contiguous(memory_format=torch.channels_last)
    check(cases(x, "sum", "dense") + cases(permuted, "sum", "permuted") + cases(last, "sum", "channels last"))


def test_the_same_kernels_serve_other_sizes():
    check(cases(torch.randn(2, 7, 1, 9), "sum", "dense", blocks=2) + cases(torch.rand(2, 3, 300, 40), "sum", "dense"))


@pytest.mark.parametrize("kind", ["max", "min", "prod"])
def test_kinds(kind):
    x = torch.randn(3, 4, 5, 6)
    some = [(0,), (1,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)]
    with_nan = x.clone()
    with_nan[1, 2, 3, 4] = torch.nan
    infinite = x.clone()
    infinite[0, 0] = -torch.inf
    infinite[:, :, 2, 2] = torch.inf
    check(
        cases(x, kind, "floats", some)
        + cases(with_nan, kind, "floats with NaN", some)
        + (cases(infinite, kind, "floats with infinities", some) if kind != "prod" else [])
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8])
def test_element_types(dtype):
    x = torch.randn(3, 4, 5, 6)
    x = (x * 3).to(dtype) if not dtype.is_floating_point else x.to(dtype)
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float64: 1e-14}.get(dtype, 0.0)
    some = [(0,), (3,), (1, 2), (0, 1, 2, 3)]
    kinds = ["sum", "max"] if dtype is not torch.int8 else ["max", "min"]
    check([c for kind in kinds for c in cases(x, kind, str(dtype), some, tolerance=tolerance)])


def test_booleans():
    x = torch.rand(3, 4, 5, 6) < 0.2
    some = [(0,), (3,), (1, 2), (0, 1, 2, 3)]
    check([c for kind in ("max", "min") for c in cases(x, kind, "booleans", some)])


def test_nothing_to_reduce():
    x, y = torch.randn(3, 0, 5, 2), torch.randn(0, 4, 5, 6)
    some = [(0,), (1,), (3,), (1, 2), (0, 1, 2, 3)]
    check(cases(x, "sum", "empty", some) + cases(y, "sum", "empty", some) + cases(x, "prod", "empty", some))


def test_long_sums_are_accurate():
    """A naive float32 sum of a million numbers near 1 is off by 1e-4 or more."""
    x = torch.rand(1_000_000) + 0.5
    wide = [
        Case("all", kernel_of(reduction("sum", (0,)), describe(x)), [x], tolerance=1e-6, blocks=2),
        Case("rows", kernel_of(reduction("sum", (1,)), describe(x.view(2, -1))), [x.view(2, -1)], tolerance=1e-6),
        Case("columns", kernel_of(reduction("sum", (0,)), describe(x.view(-1, 5))), [x.view(-1, 5)], tolerance=1e-6),
    ]
    check(wide)


def test_runs_are_bitwise_repeatable():
    from daceml_train.codegen.cpu.compile import compile_kernels, load
    from tests.codegen.running import FOLDER

    x = torch.randn(1000, 300)
    case = Case("columns", kernel_of(reduction("sum", (0,)), describe(x)), [x], blocks=2)
    address = load(compile_kernels([case.code], FOLDER)[case.code.key], case.code.key)
    case.call(address)
    first = case.outputs[0].clone()
    for _ in range(5):
        case.call(address)
        assert torch.equal(first, case.outputs[0])


def test_columns_of_values_that_depend_on_the_row() -> None:
    """Several rows are added at once; each has its own index."""

    def body(x: Value) -> Value:
        (row,) = x.builder.emit(make("iota", shape=(37, 512), dim=0, dtype=DType.float32))
        return (x * row).sum((0,))

    x = torch.rand(37, 512)  # sums of one sign, which do not cancel
    check([Case("rows", kernel_of(body, describe(x)), [x])])
