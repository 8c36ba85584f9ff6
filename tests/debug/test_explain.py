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


class Tree(nn.Module):
    """A recursion, one operator of which is run in PyTorch if that is asked for."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.words, self.join, self.looks = nn.Embedding(10, 4), nn.Linear(4, 4), looks

    def visit(self, t: object) -> Tensor:
        if not isinstance(t, tuple):
            return self.words(torch.tensor([t]))
        x = torch.cat([self.visit(part) for part in t]).sum(0, keepdim=True)
        if self.looks and float(x.detach().sum()) > 100:
            return x
        return self.join(x).tanh()

    def forward(self, trees: list[object]) -> Tensor:
        return torch.cat([self.visit(t) for t in trees])


@pytest.mark.compiled
def test_recursions_run_level_by_level() -> None:
    trees = [((1, 2), 3), (4, 5)]
    for model in (Tree(), dt.optimize(Tree())):
        told = explain(model, trees)
        assert told.whole and not told.graphs
        assert "recorded and run level by level:" in told.levels and "in 1 program" in told.levels
        assert str(told).startswith("Tree: a recursion, recorded and run level by level:")
    told = explain(Tree(looks=True), trees)
    assert not told.whole and "level by level" in told.levels
    assert "looks at values" in told.notes[0].what


def test_steps_are_told_of_by_the_report() -> None:
    model = Tree()
    step = dt.training_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()))
    with pytest.raises(dt.Invalid, match="given a training step of Tree") as caught:
        explain(step, [1])  # type: ignore[arg-type]
    assert "dt.report(step)" in str(caught.value)
