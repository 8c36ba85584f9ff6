"""Sizes as numbers: what Python's integers can express is compiled, all else is SymPy's; both are SymPy's values."""

from __future__ import annotations

import pytest
import sympy

from daceml_train import tensor
from daceml_train.tensor import evaluate, evaluate_all, symbol

M, N = symbol("m"), symbol("s77")
COMPILED = (
    *(M, M + 1, 3 * M * N - 7, (M + 2 * N) ** 3, -N, M - N**2, sympy.Integer(4)),
    *(sympy.floor(M / 3), M / 1 + sympy.floor((N + 1) / 2) * 2, sympy.floor((7 - M) / 4), sympy.floor(-(M**2) / 3)),
    *(sympy.ceiling(M / 32), sympy.ceiling(-N / 2) * M, sympy.floor(sympy.floor((M - 3) / 2) / 2 + N / 3)),
    *(sympy.Max(M, N), sympy.Min(M**2, 4, N + 3), sympy.Mod(M, 4), sympy.Mod(3 - M, 4), sympy.Max(0, M - N)),
)
OTHERS = (M * (M + 1) / 2, sympy.floor(N / M), sympy.Abs(M - N))


@pytest.mark.parametrize("size", [*COMPILED, *OTHERS], ids=str)
def test_a_size_is_sympys(size: sympy.Expr) -> None:
    for values in ({"m": 5, "s77": 3}, {"m": 1, "s77": 2**40}, {"m": 10**9, "s77": 7}):
        expected = size.subs({s: values[s.name] for s in size.free_symbols})
        found = evaluate(size, values)
        assert type(found) is int and found == int(expected)
    assert (tensor._compiled(size) is not None) == (size in COMPILED)


def test_many_sizes_by_one_function() -> None:
    sizes, values = [*COMPILED, *OTHERS], {"m": 37, "s77": 5}
    expected = [*(evaluate(size, values) for size in COMPILED), *[None] * len(OTHERS)]
    assert evaluate_all(sizes)(values) == expected and evaluate_all([])(values) == []
