"""Attributes that are expressions over sizes, whose signs differ from batch to batch, with `dynamic=True`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of

pytestmark = pytest.mark.compiled

Results = tuple[Tensor, ...]


def padded(h: Tensor) -> Results:
    n = h.shape[0]
    fixed = F.pad(h, (0, 0, 0, 36 - n)), F.pad(h, (0, 0, 12 - n, 1))
    multiples = [F.pad(h, (0, 0, 0, amount)) for amount in (-n % 8, (8 - n % 8) % 8, 8 - n % 8, -(-n // 8) * 8 - n)]
    return (*fixed, *multiples, torch.cat([h, h.new_zeros(40 - n, 7)]))


def sliced(h: Tensor) -> Results:
    n = h.shape[0]
    return (h[n - 9 :], h[3 - n :], h[10 - n :], h[: -(n // 4)], h[n // 2 - 3], h[4 - n], h[10 - n], h[n - 8 :: 2])


def written(h: Tensor) -> Results:
    n, first, last, one = h.shape[0], h.clone(), h.clone(), h.clone()
    first[n - 9 :] = 0.5
    last[: 9 - n] *= 2
    one[n - 7] = h[0]
    return first, last, one, torch.slice_scatter(h, h[:3] * 2, 0, n - 9, n - 6), torch.select_scatter(h, h[0], 0, n - 8)


def scaled(h: Tensor) -> Results:
    n = h.shape[0]
    return (h / n**0.5 * n**-1.5, h * (n - 9) + max(n - 9, 0), h * 2.0**-n, (h @ h.t() / (7 * n) ** 0.5).softmax(-1))


@pytest.mark.parametrize("forward", [padded, sliced, written, scaled], ids=lambda f: f.__name__)
def test_as_in_eager_execution(forward: Callable[[Tensor], Results]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 7)

        def forward(self, x: Tensor) -> Results:
            return forward(self.linear(x).tanh())

    theirs = Model()
    ours = dt.optimize(copy.deepcopy(theirs), dynamic=True)
    for rows in (12, 9, 20, 10, 40, 36):
        x, y = (torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows)).requires_grad_() for _ in range(2))
        results, expected = ours(x), theirs(y)
        torch.testing.assert_close(results, expected)
        gradients = [torch.randn_like(t) for t in expected]
        found = torch.autograd.grad(results, (x, *ours.parameters()), gradients)
        torch.testing.assert_close(found, torch.autograd.grad(expected, (y, *theirs.parameters()), gradients))
    state = state_of(ours)
    assert state is not None and not state.backend.breaks, state
