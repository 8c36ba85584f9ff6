from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.cli import main
from daceml_train.debug import explain

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        return torch.special.bessel_j0(y)

def made():
    return Model(), torch.randn(2, 4)

def step():
    model = Model()
    return model, (torch.randn(2, 4), torch.randn(2, 4)), nn.functional.mse_loss, torch.optim.SGD(model.parameters())
"""


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        if y.sum() > 0:
            y = y * 2
        return torch.special.bessel_j0(torch.special.bessel_j0(y))


def test_what_breaks_and_falls_back() -> None:
    told = dt.debug.explain(Breaks(), torch.ones(3))
    assert len(told.graphs) == 2
    assert not told.whole
    (broken,) = told.of("break")
    assert broken.where.startswith("test_explain.py:")
    assert broken.advice.startswith("a Python decision on a tensor's value ends the graph: use torch.where")
    (fallback,) = told.of("fallback")
    assert (fallback.what, fallback.count) == ("aten.special_bessel_j0.default", 2)
    assert "test_explain.py:" in fallback.where
    assert "docs/guide/writing-an-operator.md" in fallback.advice
    text = str(told)
    assert text.startswith(f"Breaks: {sum(told.graphs)} operators in 2 graphs")
    assert "special_bessel_j0" in text


def test_a_whole_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    told = explain(dt.optimize(model), torch.randn(3, 4))
    assert told.whole
    assert "everything is compiled" in str(told)
    assert model[1].num_batches_tracked == 0, "the model itself has run"


def test_a_model_that_cannot_be_captured() -> None:
    class Complex(nn.Module):
        def forward(self, x: Tensor) -> list[float]:
            return x.tolist()

    told = explain(Complex(), torch.ones(2))
    assert not told.whole
    assert told.notes


@pytest.mark.parametrize("factory", ["made", "step"])
def test_the_command(factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "user_model.py").write_text(MODEL)
    assert main(["explain", f"{tmp_path}/user_model.py:{factory}"]) == 0
    message = capsys.readouterr().out
    assert "user_model.py:12" in message
    assert "bessel" in message
