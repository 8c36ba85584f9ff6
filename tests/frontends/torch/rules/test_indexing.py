"""Index arrays, order and windows: own operators in the graph, with eager's values and gradients, and compiled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.frontends.torch.check import check, operators

INDEX = torch.tensor([[0, 2, 1], [1, 0, 2]])
MASK = torch.tensor([[True, False, True], [False, True, True]])
CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "index": (lambda x: x[:, torch.tensor([2, 0, 0])], (4, 3)),
    "index of two": (lambda x: x[torch.tensor([0, -1]), torch.tensor([1, 1])], (4, 3)),
    "index_select": (lambda x: x.index_select(1, torch.tensor([1, 1])), (4, 3)),
    "gather": (lambda x: x.gather(0, INDEX), (4, 3)),
    "scatter": (lambda x: (x * 0).scatter(0, torch.tensor([[3, 1, 0]]), x[:1]), (4, 3)),
    "scatter of a number": (lambda x: x.scatter(0, torch.tensor([[3, 1, 0]]), 2.0), (4, 3)),
    "scatter_add": (lambda x: x.scatter_add(1, INDEX, x[:2] * 2), (4, 3)),
    "index_add": (lambda x: x.index_add(0, torch.tensor([1, 1]), x[:2], alpha=3), (4, 3)),
    "index_copy": (lambda x: x.index_copy(0, torch.tensor([3, 1]), x[:2] * 2), (4, 3)),
    "index_fill": (lambda x: x.index_fill(0, torch.tensor([1, 1]), 2.0), (4, 3)),
    "index_put": (lambda x: x.index_put((torch.tensor([1, 0]),), x[2:] * 3), (4, 3)),
    "masked put of rows": (lambda x: x[:2].clone().index_put((MASK,), x.flatten()[:4]), (4, 3)),
    "masked put of a row": (lambda x: x.index_put((torch.tensor([True, False]),), x[1] * 2), (2, 3)),
    "cumsum": (lambda x: x.cumsum(-1), (4, 3)),
    "sort": (lambda x: x.sort(0, descending=True)[0], (4, 3)),
    "topk": (lambda x: x.topk(2)[0], (4, 3)),
    "max": (lambda x: x.max(1)[0], (4, 3)),
    "argmax": (lambda x: x * x.argmax(), (4, 3)),
    "roll": (lambda x: x.roll((1, -5), (0, 1)), (4, 3)),
    "roll of all": (lambda x: x.roll(2), (4, 3)),
    "reflection": (lambda x: F.pad(x, (2, 1), mode="reflect"), (1, 4, 3)),
    "replication": (lambda x: F.pad(x, (2, -1, 0, 3), mode="replicate"), (1, 2, 4, 3)),
    "unfold": (lambda x: F.unfold(x, 2, padding=1), (1, 2, 4, 3)),
    "fold": (lambda x: F.fold(x, (3, 3), 2), (1, 8, 4)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (1, 2, 4, 3)),
    "bilinear": (lambda x: F.interpolate(x, (5, 7), mode="bilinear"), (1, 2, 4, 3)),
    "diagonal": (lambda x: x.diagonal(-1), (4, 3)),
    "Tensor.unfold": (lambda x: x.unfold(0, 2, 1) * 2, (4, 3)),
    "adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), (1, 2, 4, 3)),
    "logaddexp": (lambda x: torch.logaddexp(x, x.detach() * 2), (4, 3)),
    "fmax": (lambda x: torch.fmax(x, x.detach() * 2), (4, 3)),
    "softmax of a number": (lambda x: x.log_softmax(0), ()),
    "norm": (lambda x: torch.linalg.vector_norm(x, torch.inf, dim=1), (4, 3)),
    "atan2": (lambda x: torch.atan2(x, x.cos()), (4, 3)),
    "bce": (lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid()), (4, 3)),
    "cosine similarity of shapes that broadcast": (lambda x: F.cosine_similarity(x[:1], x.view(4, 1, 3), -2), (4, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_no_call_for_want_of_a_rule(name: str) -> None:
    function, shape = CASES[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    captured = check(function, x)
    assert not captured.fallbacks and "aten" not in operators(captured)


@pytest.mark.compiled
def test_compiled(tmp_path: Path) -> None:
    """All of them as one module: library calls and kernels, forward and backward."""

    class All(nn.Module):
        def forward(self, *inputs: Tensor) -> list[Tensor]:
            return [function(x) for (function, _), x in zip(CASES.values(), inputs, strict=True)]

    inputs = [torch.randn(shape) for _, shape in CASES.values()]
    ones = [x.clone().requires_grad_() for x in inputs]
    others = [x.clone().requires_grad_() for x in inputs]
    expected, compiled = All()(*ones), dt.optimize(All(), cache=tmp_path, jobs=2)
    results = compiled(*others)
    state = state_of(compiled)
    assert state is not None and not state.backend.breaks
    assert not [f for record in state.backend.records for f in record.fallbacks]
    for name, got, wanted in zip(CASES, results, expected, strict=True):
        torch.testing.assert_close(got, wanted, msg=name)
    weights = [torch.randn_like(y) for y in expected]
    torch.autograd.backward(expected, weights)
    torch.autograd.backward(results, weights)
    for name, got, wanted in zip(CASES, others, ones, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, msg=name)


@pytest.mark.compiled
def test_operands_that_are_not_dense(tmp_path: Path) -> None:
    class Some(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
            return x.gather(0, i), x[i[0]], x.cumsum(0), x.max(0)[0], x.topk(2, 0)[0]

    x, i = torch.randn(3, 4).t()[:, ::2], torch.randint(0, 4, (2, 8))[:, ::4]
    for got, wanted in zip(dt.optimize(Some(), cache=tmp_path)(x, i), Some()(x, i), strict=True):
        torch.testing.assert_close(got, wanted)


def test_an_index_out_of_range_raises(tmp_path: Path) -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            return x[i] * 2

    model = dt.optimize(Chosen(), cache=tmp_path)
    with pytest.raises(Exception, match="out of bounds|out of range"):
        model(torch.randn(3), torch.tensor([3]))
