"""Programs before they are lowered: guards leave sums, digits of an index become axes, and numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import daceml_train as dt
from daceml_train.expressions import array, size, total, where
from daceml_train.expressions.adjoint import derivative
from daceml_train.expressions.prepared import prepared
from daceml_train.expressions.program import Program, parsed


@dt.expression
def diagonal(x: Any, y: Any) -> Any:
    return array(x[i, i] * y[i, j] for i in x.shape[0] for j in x.shape[0])


@dt.expression
def shuffled(x: Any, s: int = 2) -> Any:
    B, C, H = x.shape
    return array(x[b, c * s + h % s, h // s] * (1 + h) for b in B for c in C // s for h in s * H)


@dt.expression
def pooled(x: Any) -> Any:
    return array(total(x[i // 3, j] * where(i % 3 < 2, 1.0, -1.0) for j in x.shape[1]) for i in size(3) * x.shape[0])


@dt.expression
def two_steps(x: Any) -> Any:
    return array(x[h // 2] + x[h // 3] for h in size(6) * (x.shape[0] // 3))


@dt.expression
def counted(x: Any) -> Any:
    return array(total(where(i < 2, x[i], 0.0) for j in size(5)) + 0 * x[k] for i in x.shape[0] for k in x.shape[0])


def points(program: Program) -> int:
    """The iterations of all loops."""
    result = 0
    for stage in program.stages:
        count = 1
        for axis in (*stage.axes, *stage.reduced):
            count *= axis.size
        result += count
    return result


def given(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_the_gradient_of_a_diagonal_is_no_cube() -> None:
    x, y = given((6, 6), (6, 6))
    text, _ = derivative(diagonal.program(x, y).text, (True,), (True, False))
    assert points(parsed(text)) == 6**3 and points(prepared(parsed(text))) == 2 * 6**2


def test_a_shuffle_has_no_indices_that_depend_on_data() -> None:
    (x,) = given((2, 4, 3))
    program = prepared(shuffled.program(x))
    assert "floor_divide" not in program.text and "remainder" not in program.text


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (diagonal, [(6, 6), (6, 6)]),
        (shuffled, [(2, 4, 3)]),
        (pooled, [(4, 5)]),
        (two_steps, [(9,)]),
        (counted, [(4,)]),
    ],
)
def test_numbers_stay(function: Any, shapes: list[tuple[int, ...]]) -> None:
    operands = given(*shapes)
    expected = function.reference(*(x.detach().numpy() for x in operands))
    torch.testing.assert_close(function(*operands).detach(), torch.from_numpy(expected))
    assert torch.autograd.gradcheck(function, operands)
    assert torch.autograd.gradgradcheck(function, operands)


@pytest.mark.compiled
@pytest.mark.parametrize(("function", "shapes"), [(diagonal, [(6, 6), (6, 6)]), (shuffled, [(2, 4, 3)])])
def test_numbers_stay_in_programs(function: Any, shapes: list[tuple[int, ...]]) -> None:
    class Model(torch.nn.Module):
        def forward(self, *xs: torch.Tensor) -> torch.Tensor:
            return function(*xs)

    operands, others = given(*shapes), given(*shapes)
    ours, theirs = dt.optimize(Model())(*operands), function(*others)
    seed = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, operands, seed), torch.autograd.grad(theirs, others, seed))
