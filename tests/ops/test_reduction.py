import numpy as np
import pytest
import torch

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.reduction import LogSumExp, Mean, Reduce, Variance
from daceml_train.tensor import DType, Tensor, symbol
from tests.ops.checking import check_op, numbers

SHAPES = [((3, 4, 5), (1,)), ((3, 4, 5), (0, 2)), ((6,), (0,)), ((2, 1, 3), (1,)), ((1, 1), (0, 1)), ((4, 3), ())]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_sum(shape: tuple[int, ...], dims: tuple[int, ...], keepdim: bool) -> None:
    reference = lambda x: torch.sum(x, dims, keepdim) if dims else x * 1  # noqa: E731
    check_op(Reduce("sum", dims, keepdim), numbers(*shape), reference=reference)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_extremes(kind: str, shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    function = {"max": torch.amax, "min": torch.amin}[kind]
    reference = lambda x: function(x, dims) if dims else x * 1  # noqa: E731
    check_op(Reduce(kind, dims), numbers(*shape), reference=reference)
    ties = np.random.default_rng(0).integers(0, 2, shape).astype(float)
    check_op(Reduce(kind, dims), ties, reference=reference, smooth=False)


def test_extremes_keep_nan() -> None:
    x = numbers(2, 5)
    x[0, 3] = np.nan
    check_op(Reduce("max", (1,)), x, reference=lambda x: x.amax(1), smooth=False, second=False)
    assert Reduce("max", (0,)).evaluate(np.array([False, True]))[0] == True  # noqa: E712


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_prod(size: int, zeros: int) -> None:
    x = numbers(3, size, 2)
    x[1, :zeros, 0] = 0
    check_op(Reduce("prod", (1,)), x, reference=lambda x: x.prod(1), symbolic=False)
    check_op(Reduce("prod", (1, 2), True), x, reference=lambda x: x.prod(2, True).prod(1, True), symbolic=False)


@pytest.mark.parametrize("kind", ["sum", "prod"])
def test_nothing_to_reduce(kind: str) -> None:
    function = {"sum": torch.sum, "prod": torch.prod}[kind]
    check_op(Reduce(kind, (1,)), numbers(3, 0), reference=lambda x: function(x, 1), symbolic=kind != "prod")
    check_op(Reduce(kind, (0,)), numbers(3, 0), reference=lambda x: function(x, 0), symbolic=False)


def test_integers_have_no_gradient() -> None:
    check_op(Reduce("sum", (0,)), np.arange(6).reshape(2, 3), reference=lambda x: x.sum(0))


@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_mean(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    check_op(Mean(dims), numbers(*shape), reference=lambda x: x.mean(dims) if dims else x * 1)
    check_op(Mean((0,), True), numbers(0, 3), reference=lambda x: x.mean(0, True), smooth=False, second=False)


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("correction", [0, 1, 2.5])
@pytest.mark.parametrize(("shape", "dims"), [s for s in SHAPES if s[1]])
def test_variance(shape: tuple[int, ...], dims: tuple[int, ...], correction: float) -> None:
    degenerate = np.prod([shape[d] for d in dims]) <= correction
    reference = lambda x: x.var(dims, correction=correction)  # noqa: E731
    check_op(
        Variance(dims, correction), numbers(*shape), reference=reference, smooth=not degenerate, second=not degenerate
    )


@pytest.mark.parametrize(("shape", "dims"), [s for s in SHAPES if s[1]])
def test_logsumexp(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    check_op(LogSumExp(dims), numbers(*shape), reference=lambda x: x.logsumexp(dims))
    check_op(LogSumExp(dims, True), 1000 * numbers(*shape), reference=lambda x: x.logsumexp(dims, True), smooth=False)


def test_logsumexp_of_infinities() -> None:
    x = numbers(4, 3)
    x[0], x[1, 1], x[2, 2] = -np.inf, -np.inf, np.inf
    check_op(LogSumExp((1,)), x, reference=lambda x: x.logsumexp(1), smooth=False, second=False)
    check_op(LogSumExp((1,)), numbers(3, 0), reference=lambda x: x.logsumexp(1), smooth=False)


def test_errors() -> None:
    x, s = Tensor((2, 0)), symbol("s")
    with pytest.raises(Invalid, match=r"expects ascending dimensions in 0\.\.1 .* given \(1, 0\)"):
        Reduce("sum", (1, 0)).infer(x)
    with pytest.raises(Invalid, match="has no elements"):
        Reduce("max", (1,)).infer(x)
    with pytest.raises(Invalid, match="expects one of sum, max, min, prod, given 'median'"):
        Reduce("median", (1,)).infer(x)
    with pytest.raises(Invalid, match=r"mean expects floating-point elements, given i64\[2\]; cast first"):
        Mean((0,)).infer(Tensor((2,), DType.int64))
    with pytest.raises(Unsupported, match="prod over a symbolic number"):
        check_op(Reduce("prod", (0,)), numbers(3), reference=lambda x: x.prod(0))
    assert Reduce("sum", (0,)).infer(Tensor((s, 4)))[0].shape == (4,)


def test_memory_order_is_kept() -> None:
    x = Tensor((2, 3, 4, 5), order=(0, 2, 3, 1))
    assert Reduce("sum", (1,)).infer(x)[0].order is None
    assert Reduce("sum", (0,)).infer(x)[0].order == (1, 2, 0)
    assert Reduce("sum", (0,), True).infer(x)[0].order == (0, 2, 3, 1)
