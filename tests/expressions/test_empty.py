"""Arrays without elements: results are empty or what a reduction of nothing is, and gradients are zeros."""

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.errors import Invalid
from daceml_train.expressions import array, largest, logsumexp, product, size, total

NO_IDS = torch.zeros(0, dtype=torch.int64)
CASES = {
    "elements": (lambda x: array(x[i] * 2 for i in x.shape[0]), lambda x: x * 2, [(0,)]),
    "outside": (
        lambda x: array(x.clamp[i - 1] + x.wrap[i - 1] + x.outside(1.0)[i + 1] for i in x.shape[0]),
        lambda x: x * 2,
        [(0,)],
    ),
    "sums": (lambda x: array(total(x[i, j] for j in x.shape[1]) for i in x.shape[0]), lambda x: x.sum(1), [(2, 0)]),
    "products": (
        lambda x: array(product(x[i, j] for j in x.shape[1]) for i in x.shape[0]),
        lambda x: x.prod(1),
        [(2, 0)],
    ),
    "logsumexp": (
        lambda x: array(logsumexp(x[i, j] for j in x.shape[1]) for i in x.shape[0]),
        lambda x: x.logsumexp(1),
        [(2, 0)],
    ),
    "largest": (
        lambda x: array(largest(x[i, j] for j in x.shape[1]) for i in x.shape[0]),
        lambda x: x.amax(1),
        [(0, 2)],
    ),
    "windows": (
        lambda x: array(total(x[2 * i + k] for k in size(2)) for i in x.shape[0] // 2),
        lambda x: x[::2],
        [(0,)],
    ),
    "rows": (
        lambda x, y: array(total(x[i, k] * y[k, j] for k in y.shape[0]) for i in x.shape[0] for j in y.shape[1]),
        lambda x, y: x @ y,
        [(0, 6), (6, 5)],
    ),
    "depth": (
        lambda x, y: array(total(x[i, k] * y[k, j] for k in y.shape[0]) for i in x.shape[0] for j in y.shape[1]),
        lambda x, y: x @ y,
        [(6, 0), (0, 5)],
    ),
    "ids": (
        lambda t, n: array(t[n[i], d] for i in n.shape[0] for d in t.shape[1]),
        lambda t, n: t[n],
        [(4, 3), None],
    ),
    "table": (
        lambda t, n: array(t[n[i], d] for i in n.shape[0] for d in t.shape[1]),
        lambda t, n: t[n],
        [(0, 3), None],
    ),
}


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given):
        return self.function(*given)


@pytest.mark.compiled
@pytest.mark.parametrize("name", CASES)
def test_no_elements(name: str) -> None:
    function, expected, shapes = CASES[name]
    operator = dt.expression(function)

    def outcome(call):
        given = [NO_IDS if s is None else torch.ones(s, requires_grad=True) for s in shapes]
        result = call(*given)
        return [result.detach(), *torch.autograd.grad(result.sum(), [x for x in given if x.requires_grad])]

    for call in (operator, dt.optimize(Applied(operator))):
        for a, b in zip(outcome(call), outcome(expected), strict=True):
            torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_elements_of_nothing_are_refused() -> None:
    for function in (lambda x, y: array(x[i] for i in y.shape[0]), lambda x, y: array(x.clamp[i] for i in y.shape[0])):
        with pytest.raises(Invalid, match=r"size 0|no elements"):
            dt.expression(function)(torch.ones(0), torch.ones(2))
