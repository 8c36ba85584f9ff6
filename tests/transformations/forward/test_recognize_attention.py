"""Attention as people write it, recognized; what is no such attention, refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import daceml_train as dt
from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph
from daceml_train.transformations.forward.recognize_attention import RecognizeAttention
from daceml_train.transformations.pipelines import TRAINING
from tests.passes.training_graphs import captured
from tests.transformations.checking import check_same

T = 6


def heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [2, 3, T, 4] as views of one matmul."""
    q, k, v = x.view(2, T, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def plain(x: Tensor) -> Tensor:
    q, k, v = heads(x)
    return ((q @ k.transpose(-1, -2)) / math.sqrt(4)).softmax(-1) @ v


def causal(x: Tensor) -> Tensor:
    q, k, v = heads(x)
    hidden = torch.ones(T, T, dtype=torch.bool).tril().logical_not()
    return ((q @ k.mT) * 0.5).masked_fill(hidden, -math.inf).softmax(-1) @ v


def chosen(x: Tensor) -> Tensor:
    q, k, v = heads(x)
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    return torch.where(seen, 0.5 * (q @ k.mT), -10000.0).softmax(-1) @ v


def added(x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = heads(x)
    return (torch.matmul(q, k.mT) / 2.0 + mask[:, None, None, :]).softmax(-1) @ v


def batched(x: Tensor, mask: Tensor) -> Tensor:
    """As `nn.MultiheadAttention` does it, with heads and batch in one dimension."""
    q, k, v = (y.reshape(6, T, 4) for y in heads(x))
    return torch.bmm(torch.baddbmm(mask.repeat_interleave(3, 0)[:, None], q * 0.5, k.mT).softmax(-1), v)


def single(x: Tensor) -> Tensor:
    return F.softmax(x @ x.T, dim=-1) @ x


def dropped(x: Tensor) -> Tensor:
    q, k, v = heads(x)
    return F.dropout((q @ k.mT * 0.5).softmax(-1), 0.3) @ v


def composed(x: Tensor) -> Tensor:
    q, k, v = heads(x)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)


FORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "plain": (plain, "attention"),
    "causal": (causal, "fused_attention"),
    "chosen": (chosen, "fused_attention"),
    "added": (added, "fused_attention"),
    "batched": (batched, "fused_attention"),
    "single": (single, "attention"),
    "dropped": (dropped, "fused_attention"),
    "composed": (composed, "fused_attention"),
}


def written(function: Callable[..., Any]) -> Graph:
    x = torch.randn(5, 4) if function is single else torch.randn(2, T, 36)
    inputs = (x.requires_grad_(), torch.randn(2, T)) if function in (added, batched) else (x.requires_grad_(),)
    return captured(function, *inputs)


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    function, operator = FORMS[name]
    before = written(function)
    (match,) = RecognizeAttention().matches(before)
    assert match.refusal is None
    after = RecognizeAttention().run(before)
    assert [n.op.label for n in after.nodes if "attention" in n.op.label] == [operator]
    assert not any(n.op.label == "softmax" for n in after.nodes)
    assert match.traffic == traffic(after).bytes - traffic(before).bytes < 0
    check_same(before, after, exact=False)


def returned(x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = heads(x)
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


def across(x: Tensor) -> Tensor:
    q, k, v = heads(x)
    return (q @ k.mT).softmax(-2) @ v


def narrow(x: Tensor) -> Tensor:
    q, k, v = heads(x)
    return (q @ k.mT).softmax(-1) @ v[..., :2]


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (returned, "has another reader than"),
        (across, "the softmax goes along dimension 2, the keys lie along 3"),
        (narrow, "values and keys differ in size"),
    ],
)
def test_refusals(function: Callable[..., Any], part: str) -> None:
    before = written(function)
    (match,) = RecognizeAttention().matches(before)
    assert part in str(match.refusal)
    assert RecognizeAttention().run(before) is before


def scaled_mask(x: Tensor) -> Tensor:
    q, k, v = heads(x)
    return ((q @ k.mT + torch.ones(T, T).tril()) * 0.5).softmax(-1) @ v


def squared(x: Tensor) -> Tensor:
    q, k, v = heads(x)
    return ((q @ k.mT) ** 2).softmax(-1) @ v


@pytest.mark.parametrize("function", [scaled_mask, squared])
def test_other_functions_are_no_match(function: Callable[..., Any]) -> None:
    (match,) = RecognizeAttention().matches(written(function))
    assert match.near_miss and match.refusal == match.near_miss
    assert RecognizeAttention().run(match.uses.graph) is match.uses.graph


@pytest.mark.compiled
def test_gradients_with_dropout_are_those_of_the_written_form() -> None:
    x = torch.randn(2, T, 36)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.project = torch.nn.Linear(36, 36)

        def forward(self, x: Tensor) -> Tensor:
            return dropped(self.project(x))

    gradients = []
    for pipeline in (TRAINING, TRAINING.without(RecognizeAttention)):
        torch.manual_seed(1)
        model = dt.optimize(Layer(), pipeline=pipeline)
        model(x).square().sum().backward()
        gradients.append(model.project.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


@pytest.mark.compiled
def test_rows_that_see_nothing_are_nan_as_in_eager() -> None:
    mask = torch.zeros(2, T)
    mask[1] = -math.inf

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return added(x, mask)

    x = torch.randn(2, T, 36)
    expected = Layer()(x, mask)
    result = dt.optimize(Layer())(x, mask)
    assert expected[1].isnan().all()
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=1e-5, atol=1e-6)
