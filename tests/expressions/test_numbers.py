"""Numbers in expressions: their types, their ranges, and the options they come from."""

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.errors import Invalid
from daceml_train.expressions import array, floor, largest, maximum, size, total, where

DOUBLE, BYTES = torch.ones(2, dtype=torch.float64), torch.tensor([1, 200, 255], dtype=torch.uint8)


class Applied(nn.Module):
    """An expression as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = dt.expression(function)

    def forward(self, *given):
        return self.function(*given)


def test_equal_options_of_other_types_are_other_programs() -> None:
    scaled = dt.expression(lambda x, a: array(x[i] * a for i in x.shape[0]))
    nested = dt.expression(lambda x, a: array(x[i] * a[0][0] for i in x.shape[0]))
    x, ones = torch.arange(3), torch.ones(1)
    for function, wrap in ((scaled, lambda a: a), (nested, lambda a: ((a,), "text"))):
        for number in (2, 2.0, 1, 1.0, True):
            assert function(x, wrap(number)).dtype is (x * number).dtype
        for zero in (0.0, -0.0):
            assert float(1 / function(ones, wrap(zero))) == float(1 / torch.tensor(zero))


@pytest.mark.compiled
@pytest.mark.parametrize("compiler", ["compile", "optimize"])
def test_options_that_change_under_a_compiler(compiler: str) -> None:
    """Numbers that a tracer has made symbols are fixed, and checked in each call."""
    module = Applied(lambda x, a, n=(1, 2): array(x[i] * a for i in x.shape[0]))
    dt_or_torch = torch.compile(module, backend="aot_eager") if compiler == "compile" else dt.optimize(module)
    for numbers in ((1, 2, 3), (1.5, 2.5, 3.5)):
        assert [dt_or_torch(DOUBLE, a)[0].item() for a in numbers] == list(numbers)


def test_complex_operands_are_refused() -> None:
    with pytest.raises(Invalid, match="operand x of the expression <lambda> is complex"):
        dt.expression(lambda x: array(x[i] * x[i] for i in x.shape[0]))(torch.ones(2, dtype=torch.complex64))


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: array(total(0.1 for j in size(3)) for i in x.shape[0]), 0.1 + 0.1 + 0.1),
        (lambda x: array(0.1 for i in x.shape[0]), 0.1),
        (lambda x: array(largest(16777217.0 for j in size(2)) for i in x.shape[0]), 16777217.0),
        (lambda x: array(where(i < 2, 0.1, 0.2) for i in x.shape[0]), 0.1),
        (lambda x: array(maximum(0.1, 0.2) for i in x.shape[0]), 0.2),
    ],
)
def test_constants_have_the_type_of_the_expression(function, expected: float) -> None:
    module = Applied(function)
    for call in (module, dt.optimize(module)):
        result = call(DOUBLE)
        assert result.dtype is torch.float64 and result.tolist() == pytest.approx([expected] * 2, rel=1e-15)


def test_a_choice_made_at_once_has_the_type_of_both_branches() -> None:
    chosen = dt.expression(lambda x, y: array(where(1 > 0, x[i], y[i]) for i in x.shape[0]))
    assert chosen(DOUBLE.float(), DOUBLE).dtype is torch.float64
    one = dt.expression(lambda x: array(where(1 > 0, 1, x[i]) for i in x.shape[0]))
    for dtype in (torch.int32, torch.float32):
        assert one(DOUBLE.to(dtype)).dtype is dtype


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: array(where(x[i] < 300, 1, 0) for i in x.shape[0]), [1, 1, 1]),
        (lambda x: array(where(x[i] > -1, 1, 0) for i in x.shape[0]), [1, 1, 1]),
        (lambda x: array(where(x[i] == 456, 1, 0) for i in x.shape[0]), [0, 0, 0]),
        (lambda x: array(x[i] + -1 for i in x.shape[0]), [0, 199, 254]),
    ],
)
def test_numbers_beside_small_integers(function, expected: list[int]) -> None:
    """Comparisons are right for every number; negative numbers wrap around in arithmetic of unsigned integers."""
    module = Applied(function)
    for call in (module, dt.optimize(module)):
        assert call(BYTES).tolist() == expected


@pytest.mark.parametrize(
    ("function", "dtype", "message"),
    [
        (lambda x: array(x[i] * 300 for i in x.shape[0]), torch.uint8, "the number 300 does not fit uint8"),
        (lambda x: array(x[i] * 3000000000 for i in x.shape[0]), torch.int32, "3000000000 does not fit int32"),
        (lambda x: array(10**30 for i in x.shape[0]), torch.int32, "does not fit int64"),
        (lambda x: array(where(i > 0, 10**30, 0) for i in x.shape[0]), torch.int32, "does not fit int64"),
        (lambda x: array(x[i] * 10**400 for i in x.shape[0]), torch.float32, "does not fit float32"),
        (lambda x: array(x.outside(300)[i - 1] for i in x.shape[0]), torch.uint8, "300 does not fit uint8"),
        (lambda x: array(x.outside(0.5)[i - 1] for i in x.shape[0]), torch.uint8, "0.5 does not fit uint8"),
    ],
)
def test_numbers_out_of_range_are_refused(function, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(Invalid, match=message) as raised:
        dt.expression(function)(BYTES.to(dtype))
    assert raised.value.where.startswith("test_numbers.py:")


@pytest.mark.compiled
def test_zero_times_what_is_not_finite() -> None:
    module = Applied(lambda x: array(0 * x[i] for i in x.shape[0]))
    x = torch.tensor([float("nan"), float("inf"), 1.0])
    for call in (module, dt.optimize(module)):
        torch.testing.assert_close(call(x), 0 * x, equal_nan=True)
    assert module(BYTES).dtype is torch.uint8


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_places_that_are_no_numbers_are_outside(dtype: torch.dtype) -> None:
    """Reads and gradients at rounded numbers that are not finite, or that no integer can hold."""
    module = Applied(lambda x, y: array(x.outside(-1)[floor(y[i])] for i in y.shape[0]))
    inf, large = float("inf"), [2.0**24, 2.0**31, 2.0**32 + 1, 2.0**62, 2.0**63, 2.0**64, 1e30]
    places = [0.0, 1.9, 2.0, -0.0, -0.5, 3.0, float("nan"), inf, -inf, *large, *(-n for n in large)]
    y, x = torch.tensor(places, dtype=dtype), torch.tensor([5.0, 6.0, 7.0], dtype=dtype, requires_grad=True)
    expected = torch.tensor([5.0, 6.0, 7.0, 5.0], dtype=dtype)
    for call in (module, dt.optimize(module)):
        x.grad = None
        found = call(x, y)
        torch.testing.assert_close(found[:4], expected)
        assert (found[4:] == -1).all()
        found.sum().backward()
        assert x.grad.tolist() == [2.0, 1.0, 1.0]
