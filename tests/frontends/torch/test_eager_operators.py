"""Expressions and operators of plugins outside of programs: PyTorch calls with autograd, in all that PyTorch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import daceml_train as dt
from daceml_train.expressions import array, exp, floor, largest, to_float, total
from daceml_train.ops.operator import Builder, Operator, Value
from daceml_train.tensor import Tensor as Type
from tests.debug.planted import cube


@dt.expression
def windows(x: Any, k: Any) -> Any:
    """Sums of products over windows of three."""
    T, R = x.shape[1], k.shape[0]
    return array(total(x.outside(0)[b, t + r - 1] * k[r] for r in R) + exp(x[b, t]) for b in x.shape[0] for t in T)


@dt.expression
def gathered(x: Any, p: Any) -> Any:
    """Reads between two elements, and the largest element of each row."""
    B, T = x.shape
    read = array(
        x.clamp[b, floor(p[b, t])] * (1 - (p[b, t] - floor(p[b, t])))
        + x.clamp[b, floor(p[b, t]) + 1] * (p[b, t] - floor(p[b, t]))
        for b in B
        for t in p.shape[1]
    )
    return read, array(largest(x[b, t] + 0 * to_float(t) for t in T) for b in B)


def by_hand(x: Tensor, k: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x, (1, 1))
    return sum(padded[..., r : r + x.shape[-1]] * k[r] for r in range(3)) + x.exp()


@dataclass(frozen=True)
class Distances(Operator):
    """Scaled squared distances of the rows of two matrices, by operators of many kinds."""

    name = "eager_distances"
    operands = ("a", "b")
    scale: float = 1.0

    def infer(self, *operands: Type) -> tuple[Type, ...]:
        a, b = operands
        return (Type((a.shape[0], b.shape[0]), a.dtype),)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        x, y = operands
        lengths = (x * x).sum((1,), keepdim=True) + (y * y).sum((1,), keepdim=True).T
        return (((lengths - 2.0 * (x @ y.T)) * self.scale),)


@dataclass(frozen=True)
class Cumulative(Operator):
    """A leaf that only NumPy evaluates, with a derivative of its own."""

    name = "eager_cumulative"
    operands = ("x",)
    backwards: bool = False

    def infer(self, *operands: Type) -> tuple[Type, ...]:
        return operands

    def evaluate(self, *operands: Any) -> tuple[Any, ...]:
        (x,) = operands
        return (np.cumsum(x[::-1], 0)[::-1] if self.backwards else np.cumsum(x, 0),)

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(Cumulative(not self.backwards))


distances = dt.torch_function(Distances, "daceml_eager::distances")
cumulative = dt.torch_function(Cumulative, "daceml_eager::cumulative")


def operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 7, dtype=torch.float64), torch.randn(3, dtype=torch.float64)


def matrices() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "expression": (windows, by_hand, operands),
    "operator": (distances, lambda a, b: (a[:, None] - b).square().sum(-1), matrices),
    "cubic": (cube, lambda x: x**3, lambda: operands()[:1]),
}
each = pytest.mark.parametrize("case", CASES)


def required(given: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in given]


@each
def test_values_and_derivatives_of_first_and_second_order(case: str) -> None:
    ours, theirs, make = CASES[case]
    torch.testing.assert_close(ours(*make()), theirs(*make()))
    if case == "cubic":  # the derivative of the planted operator is wrong on purpose
        return
    assert torch.autograd.gradcheck(ours, required(make()))
    assert torch.autograd.gradgradcheck(ours, required(make()))


@each
def test_vmap(case: str) -> None:
    ours, theirs, make = CASES[case]
    given = make()
    stacked = [torch.stack([x, 2 * x, x - 1], 1) for x in given]
    torch.testing.assert_close(torch.vmap(ours, 1)(*stacked), torch.vmap(theirs, 1)(*stacked))
    if len(given) == 2:
        one = torch.vmap(ours, (1, None), 1)(stacked[0], given[1])
        torch.testing.assert_close(one, torch.vmap(theirs, (1, None), 1)(stacked[0], given[1]))


def test_gradients_per_sample_of_an_expression() -> None:
    ours, theirs, make = CASES["expression"]
    stacked = [torch.stack([x, 2 * x, x - 1]) for x in make()]
    found, expected = (
        torch.vmap(torch.func.grad(lambda a, b, f=f: f(a, b).square().sum(), (0, 1)))(*stacked) for f in (ours, theirs)
    )
    torch.testing.assert_close(found, expected)


def test_vmap_over_indices_that_depend_on_data() -> None:
    torch.manual_seed(0)
    x, p = torch.randn(3, 2, 6, dtype=torch.float64), torch.rand(3, 2, 4, dtype=torch.float64) * 7 - 1
    found = torch.vmap(gathered)(x, p)
    for i in range(3):
        torch.testing.assert_close([y[i] for y in found], [*gathered(x[i], p[i])])
    assert torch.autograd.gradcheck(lambda a, b: torch.vmap(gathered)(a, b), required((x, p)))


@pytest.mark.compiled
@each
def test_torch_compile(case: str) -> None:
    ours, _, make = CASES[case]
    compiled = torch.compile(lambda *xs: ours(*xs).square(), backend="aot_eager", fullgraph=True)
    given, other = required(make()), required(make())
    found = [compiled(*given), *torch.autograd.grad(compiled(*given).sum(), given)]
    expected = [ours(*other).square(), *torch.autograd.grad(ours(*other).square().sum(), other)]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", ["expression", "operator"])
def test_the_registration_is_whole(case: str) -> None:
    _, _, make = CASES[case]
    if case == "operator":
        torch.library.opcheck(torch.ops.daceml_eager.distances.default, (*required(make()), 2.0))
        return
    text = windows.program(*make()).text  # type: ignore[attr-defined]
    torch.library.opcheck(torch.ops.daceml_train.expression.default, (required(make()), text))


@each
def test_autocast_changes_nothing(case: str) -> None:
    ours, _, make = CASES[case]
    given = required(x.float() for x in make())
    expected = [ours(*given), *torch.autograd.grad(ours(*given).sum(), given)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours(*given)
        found = [y, *torch.autograd.grad(y.sum(), given)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        x, k = operands()
        return windows(x + index, k) + distances(x, x, 0.5).sum()


def test_workers_of_a_data_loader() -> None:
    windows(*operands())
    found = list(torch.utils.data.DataLoader(Samples(), batch_size=2, num_workers=1))
    expected = list(torch.utils.data.DataLoader(Samples(), batch_size=2))
    torch.testing.assert_close(found, expected)


def test_what_runs_in_numpy_has_one_derivative_and_refuses_the_second() -> None:
    x = operands()[0].requires_grad_()
    torch.testing.assert_close(cumulative(x), x.cumsum(0))
    assert torch.autograd.gradcheck(cumulative, x)
    (first,) = torch.autograd.grad(cumulative(x).square().sum(), x, create_graph=False)
    torch.testing.assert_close(first, torch.autograd.grad(x.cumsum(0).square().sum(), x)[0])
    with pytest.raises(dt.Unsupported, match="eager_cumulative"):
        torch.autograd.grad(cumulative(x).square().sum(), x, create_graph=True)


def test_results_share_no_memory_with_operands() -> None:
    @dataclass(frozen=True)
    class Unchanged(Operator):
        """Nothing."""

        name = "eager_same"
        operands = ("x",)

        def infer(self, *operands: Type) -> tuple[Type, ...]:
            return operands

        def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
            return (operands[0].view(operands[0].shape),)

        def vjp(self, b: Builder, grad_y: Value) -> Value:
            return grad_y

    same = dt.torch_function(Unchanged, "daceml_eager::same")
    x = torch.ones(3, requires_grad=True)
    y = same(x)
    assert y.data_ptr() != x.data_ptr()
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1, 1, 1]
