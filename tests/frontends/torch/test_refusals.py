"""Element types that eager execution refuses: the same error, and nothing computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import daceml_train as dt
from daceml_train.frontends.torch.capture import refusals

FLOATS, INTEGERS, TRUTHS = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([1, 2, 3]), torch.tensor([True, False])
WIDE = FLOATS.double()

REFUSED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a negative power of integers": (lambda x: x**-1, (INTEGERS,)),
    "a truth value subtracted": (lambda x: x - True, (FLOATS,)),
    "abs of truth values": (lambda x: x.abs(), (TRUTHS,)),
    "relu of truth values": (lambda x: x.relu(), (TRUTHS,)),
    "argmax of truth values": (lambda x: x.argmax(), (TRUTHS,)),
    "gelu of integers": (F.gelu, (INTEGERS,)),
    "silu of integers": (F.silu, (INTEGERS,)),
    "hardsigmoid of integers": (F.hardsigmoid, (INTEGERS,)),
    "softplus of integers": (F.softplus, (INTEGERS,)),
    "softmax of integers": (lambda x: x.softmax(0), (INTEGERS,)),
    "index_add of float64": (lambda x, i, y: x.index_add(0, i, y), (FLOATS, INTEGERS - 1, WIDE)),
    "index_put of float64": (lambda x, i, y: x.index_put((i,), y), (FLOATS, INTEGERS - 1, WIDE)),
    "layer norm of float64": (lambda x, w: F.layer_norm(x, (3,), w), (WIDE, torch.ones(3))),
    "group norm of float64": (lambda x, w: F.group_norm(x, 1, w), (WIDE.view(1, 3, 1), torch.ones(3))),
    "batch norm of float64": (
        lambda x, w: F.batch_norm(x, w - 1, w, w, w, training=True),
        (torch.ones(4, 3, dtype=torch.float64), torch.ones(3)),
    ),
    "batch norm of float64, in evaluation": (
        lambda x, w: F.batch_norm(x, w - 1, w, w, w),
        (torch.ones(4, 3, dtype=torch.float64), torch.ones(3)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_eager_errors(name: str) -> None:
    function, operands = REFUSED[name]
    with pytest.raises(Exception) as expected:
        function(*operands)
    with warnings.catch_warnings(), pytest.raises(type(expected.value)) as given:
        warnings.simplefilter("ignore")
        torch.compile(function, backend="daceml_train")(*operands)
    assert str(expected.value) in str(given.value)


ADMITTED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "powers of integers": (lambda x, y: x**y + x**2, (INTEGERS, torch.tensor([-1, 2, -1]))),
    "layer norm of bfloat16": (lambda x, w: F.layer_norm(x, (3,), w), (FLOATS.bfloat16(), torch.ones(3))),
    "batch norm of bfloat16": (
        lambda x, w: F.batch_norm(x, w - 1, w.clone(), w, w, training=True),
        (torch.randn(4, 3).bfloat16(), torch.ones(3)),
    ),
    "mixed element types": (lambda x, y, z: (x * y + z.sum() / x).clamp(0, 1), (FLOATS, WIDE, INTEGERS)),
    "indices": (lambda x, i: x.index_add(0, i - 1, x).scatter_add(0, i - 1, x)[i - 1], (FLOATS, INTEGERS)),
    "masks": (lambda x, m: torch.where(x > 0, x, 0.0).masked_fill(m, 2.0), (FLOATS, FLOATS < 0)),
}


@pytest.mark.parametrize("name", ADMITTED)
def test_element_types_that_eager_execution_takes_stay_in_the_graph(name: str) -> None:
    function, operands = ADMITTED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a part that runs in PyTorch is a warning
        result = torch.compile(function, backend="daceml_train")(*operands)
    torch.testing.assert_close(result, function(*operands))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_bytes_are_resampled_with_weights_that_are_integers(mode: str) -> None:
    image = torch.randint(0, 256, (1, 3, 7, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = torch.compile(lambda x: F.interpolate(x, scale_factor=1.7, mode=mode), backend="daceml_train")(image)
    assert torch.equal(ours, F.interpolate(image, scale_factor=1.7, mode=mode))


@pytest.mark.parametrize("eps", [0.1, 0.5, 0.7, 1.0])
def test_the_lower_bound_of_logit_prevails(eps: float) -> None:
    x = torch.tensor([0.0, 0.2, 0.5, 0.6, 0.9, 1.0])
    ours = torch.compile(lambda x: torch.logit(x, eps), backend="daceml_train")(x)
    torch.testing.assert_close(ours, torch.logit(x, eps))


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_recurrent_layers_are_not_tried(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch does not compare the shapes of their operands, and reads memory that is not theirs."""
    tried = []
    monkeypatch.setattr(refusals, "_tried", lambda function, *rest: tried.append(function.__name__) or "")
    layer = getattr(torch.nn, kind)(128, 128, batch_first=True)  # too wide to be tried in its own shape
    x = torch.randn(4, 3, 128)
    torch.testing.assert_close(dt.optimize(layer)(x)[0], layer(x)[0], rtol=1e-4, atol=1e-5)
    assert not {"gru", "lstm", "rnn_tanh"} & set(tried)
