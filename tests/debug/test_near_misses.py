"""What a pass almost recognizes says why not, and where: in `explain`, and among a session's refused matches."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.debug import explain


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def clamped(x: Tensor) -> Tensor:
    return (x @ x.mT).tanh().softmax(-1) @ x


def masked_first(x: Tensor) -> Tensor:
    return ((x @ x.mT + 1e-3 * x[..., :1]) * 0.5).softmax(-1) @ x


def gated(x: Tensor) -> Tensor:
    return ((x @ x.mT).softmax(-1).sigmoid()) @ x


def gating(x: Tensor) -> Tensor:
    """No attention: a mixture by weights that come from no product."""
    return x.tanh().softmax(-1) @ x.mT


def written(x: Tensor) -> Tensor:
    return ((x @ x.mT) * 0.5).softmax(-1) @ x


NEAR = [
    (clamped, r"attention has no tanh between the scores and their softmax: .*"),
    (masked_first, r"the mask is applied before the scores are scaled, by .*: scale them first"),
    (gated, r"attention has no sigmoid between the softmax and the values: .*"),
]


@pytest.mark.parametrize(("function", "sentence"), NEAR, ids=[f.__name__ for f, _ in NEAR])
def test_attention_that_is_almost_recognized(function: Callable[[Tensor], Tensor], sentence: str) -> None:
    x = torch.randn(2, 5, 4)
    told = explain(Of(function), x)
    (note,) = told.of("near miss")
    assert re.search(f"recognize_attention: {sentence}", note.what)
    line = function.__code__.co_firstlineno + 1
    assert f"test_near_misses.py:{line}" in note.what and f"test_near_misses.py:{line}" in note.where
    assert told.whole and "everything is compiled" in str(told)
    session = dt.Session(Of(function), x)
    refused = [m.refusal for m in session.matches(pass_="recognize_attention", refused=True) if m.refusal]
    assert any(re.search(sentence, refusal) for refusal in refused)


@pytest.mark.parametrize("function", [written, gating])
def test_no_miss_where_it_fits_or_where_nothing_is_near(function: Callable[[Tensor], Tensor]) -> None:
    assert explain(Of(function), torch.randn(2, 5, 4)).notes == []


class EverySecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x[::2] @ self.weight).sum() + (x[1::2] @ self.weight).tanh().sum()


def test_slices_that_hoisting_almost_joins() -> None:
    session = dt.Session(EverySecond(), torch.randn(6, 4))
    (match,) = session.matches(pass_="hoist_matmuls", refused=True)
    assert re.search(r"takes rows of %.* in steps of 2 \(at .*test_near_misses.py:\d+\)", match.refusal or "")
