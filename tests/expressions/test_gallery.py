"""Every operator of the gallery against PyTorch's composition and against its own reference, with all derivatives."""

import numpy as np
import pytest
import torch

from benchmarks.novel import compositions, operators
from benchmarks.novel.cases import SMALL, operands

SECOND = [
    "capsule",
    "involution",
    "bilinear",
    "deformable",
    "tropical",
    "circulant",
    "sparse_stride",
    "diagonal_gate",
    "strided_lse",
]


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", SMALL)
def test_values_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    given = operands(SMALL[name])
    expected = as_tuple(getattr(compositions, name)(*given))
    found = as_tuple(getattr(operators, name)(*given))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    seeds = [torch.randn_like(r) for r in expected]
    wanted = [x for x in given if x.requires_grad]
    gradients = torch.autograd.grad(found, wanted, seeds)
    for a, b in zip(gradients, torch.autograd.grad(expected, wanted, seeds), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_reference(name: str) -> None:
    """The function, run by Python on NumPy scalars, computes the same."""
    torch.manual_seed(0)
    given = [x.detach() for x in operands(SMALL[name])]
    operator = getattr(operators, name)
    for a, b in zip(as_tuple(operator(*given)), as_tuple(operator.reference(*(x.numpy() for x in given))), strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives(name: str) -> None:
    torch.manual_seed(0)
    given = operands(SMALL[name])
    wanted = [x for x in given if x.requires_grad]
    (expected,), (found,) = (as_tuple(getattr(m, name)(*given)) for m in (compositions, operators))
    seed = torch.randn_like(expected).requires_grad_()
    second = []
    for y in (found, expected):
        first = torch.autograd.grad(y, wanted, seed, create_graph=True)
        penalty = sum((g * g * g).sum() for g in first)
        second.append(torch.autograd.grad(penalty, [*wanted, seed], allow_unused=True, materialize_grads=True))
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
