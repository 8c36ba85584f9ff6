"""Inverses, solvers and factorizations with their checks, which PyTorch leaves out of traces.

In eager execution `torch.linalg.inv` raises where the matrix is singular; a trace of it computes infinities and NaN.
These are composed of the variants that return the numbers of LAPACK's `info`, with an assertion on them in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _require(info: Tensor, what: str) -> None:
    torch._assert_async((info == 0).all(), what)


def inv(A: Tensor) -> Any:
    """`torch.linalg.inv`; a singular matrix raises when the program runs."""
    found, info = torch.linalg.inv_ex(A)
    _require(info, "linalg.inv: the inversion could not be completed because the input matrix is singular")
    return found


def cholesky(A: Tensor, *, upper: bool = False) -> Any:
    """`torch.linalg.cholesky`; a matrix that is not positive-definite raises when the program runs."""
    found, info = torch.linalg.cholesky_ex(A, upper=upper)
    _require(info, "linalg.cholesky: the factorization could not be completed: the input is not positive-definite")
    return found


def old_cholesky(input: Tensor, upper: bool = False) -> Any:
    """`torch.cholesky`."""
    return cholesky(input, upper=upper)


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Any:
    """`torch.linalg.solve`; a singular matrix raises when the program runs."""
    found, info = torch.linalg.solve_ex(A, B, left=left)
    _require(info, "torch.linalg.solve: the solver failed because the input matrix is singular")
    return found


def lu_factor(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor]:
    """`torch.linalg.lu_factor`; a zero on U's diagonal raises when the program runs."""
    factors, pivots, info = torch.linalg.lu_factor_ex(A, pivot=pivot)
    _require(info, "torch.linalg.lu_factor: U has a zero on its diagonal, which lu_solve would divide by")
    return factors, pivots


def matrix_power(A: Tensor, n: int) -> Any:
    """`torch.linalg.matrix_power`, of the inverse where `n` is negative."""
    power = torch.linalg.matrix_power(inv(A) if n < 0 else A, abs(n))
    return torch.ops.daceml_train.overwrite(A, power) if n == 0 else power


def tensorinv(A: Tensor, ind: int = 2) -> Any:
    """`torch.linalg.tensorinv`."""
    first, last = A.shape[:ind], A.shape[ind:]
    if ind <= 0 or math.prod(first) != math.prod(last):
        return torch.linalg.tensorinv(A, ind)  # raises
    return inv(A.reshape(math.prod(first), math.prod(last))).reshape(*last, *first)


Checked = Callable[..., Any]
FUNCTIONS: dict[Callable[..., Any], Checked] = {
    torch.linalg.inv: inv,
    torch.inverse: inv,
    torch.linalg.cholesky: cholesky,
    torch.cholesky: old_cholesky,
    torch.linalg.solve: solve,
    torch.linalg.lu_factor: lu_factor,
    torch.linalg.matrix_power: matrix_power,
    torch.matrix_power: matrix_power,
    torch.linalg.tensorinv: tensorinv,
}
METHODS: dict[str, Checked] = {"inverse": inv, "cholesky": old_cholesky, "matrix_power": matrix_power}
