"""Sizes as numbers: polynomials are compiled, all else is SymPy's; both are SymPy's values."""

from __future__ import annotations

import pytest
import sympy

from daceml_train import tensor
from daceml_train.tensor import evaluate, symbol

M, N = symbol("m"), symbol("s77")
POLYNOMIALS = (M, M + 1, 3 * M * N - 7, (M + 2 * N) ** 3, -N, M - N**2, sympy.Integer(4))
OTHERS = (sympy.floor(M / 3), M / 1 + sympy.floor((N + 1) / 2) * 2, sympy.Max(M, N), sympy.Mod(M, 4))


@pytest.mark.parametrize("size", [*POLYNOMIALS, *OTHERS], ids=str)
def test_a_size_is_sympys(size: sympy.Expr) -> None:
    for values in ({"m": 5, "s77": 3}, {"m": 1, "s77": 2**40}, {"m": 10**9, "s77": 7}):
        expected = size.subs({s: values[s.name] for s in size.free_symbols})
        found = evaluate(size, values)
        assert type(found) is int and found == int(expected)
    assert (tensor._compiled(size) is not None) == (size in POLYNOMIALS)
