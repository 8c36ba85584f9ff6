from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.debug import bisect
from daceml_train.ops.softmax import Softmax
from tests.debug.planted import Crash, WrongSubtraction, cube

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    def __init__(self, function: Any = torch.tanh) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.function(self.norm(self.first(x)))
        return self.last(h).softmax(-1)


def run(script: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """What the reproduction exits with and prints, run here: a process of its own costs seconds."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code, capsys.readouterr().out


def test_a_sound_model(tmp_path: Path) -> None:
    found = bisect(Net(), torch.randn(4, 6), folder=tmp_path, code=False)
    assert not found, str(found)
    assert str(found).startswith("nothing deviates from eager execution\ncompared: 1 results of a captured graph of")
    compared = "\n".join(found.compared)
    assert "6 gradients" in compared
    assert all(str(p) in compared for p in dt.TRAINING)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_pass(tmp_path: Path) -> None:
    """Whose script runs in a process of its own."""
    pipeline = dt.TRAINING.after("decompose", WrongSubtraction())
    found = bisect(Net(), torch.randn(4, 6), pipeline=pipeline, folder=tmp_path, code=False)
    assert found.finding is not None
    assert (found.finding.stage, found.finding.culprit) == ("pass", "wrong_subtraction()")
    assert "test_bisect.py:" in found.finding.where
    script = found.finding.script
    assert script is not None
    text = script.read_text()
    assert text.count(" = ") - text[: text.index("graph ")].count(" = ") < 12, f"not small:\n{text}"
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=variables)
    assert done.returncode == 1, done.stderr
    assert "deviates by" in done.stdout
    assert "sub(" in done.stdout


def test_a_pass_that_raises(tmp_path: Path) -> None:
    pipeline = dt.TRAINING.before("fusion", Crash())
    found = bisect(Net(), torch.randn(4, 6), pipeline=pipeline, folder=tmp_path, code=False)
    assert found.finding is not None
    assert found.finding.culprit == "crash() raises ValueError: no tanh, please"
    script = found.finding.script
    assert script is not None
    with pytest.raises(ValueError, match="no tanh, please"):
        runpy.run_path(str(script), run_name="__main__")


def test_a_wrong_derivative_of_an_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eager execution of the operator has the wrong derivative too: finite differences tell."""
    found = bisect(Net(lambda x: cube(x) * torch.rand_like(x)), torch.randn(4, 6), folder=tmp_path, code=False)
    assert found.finding is not None
    assert found.finding.stage == "derivative"
    assert "cube_with_a_wrong_derivative" in found.finding.culprit
    assert "test_bisect.py:" in found.finding.where
    assert found.finding.script is not None
    status, message = run(found.finding.script, capsys)
    assert status == 1
    assert float(message.removeprefix("deviates by ")) > 0.1


def test_a_wrong_derivative_against_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Softmax.vjp
    monkeypatch.setattr(Softmax, "vjp", lambda self, b, y, grad_y: right(self, b, y, grad_y) * 2.0)
    found = bisect(Net(), torch.randn(4, 6), folder=tmp_path, code=False)
    assert found.finding is not None
    assert found.finding.stage == "derivative"
    assert "softmax(" in found.finding.culprit
    assert found.finding.error > 0.01


def test_a_wrong_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from daceml_train.ops.functions import FUNCTIONS

    monkeypatch.setitem(FUNCTIONS, "tanh", lambda x: np.tanh(x) * 1.01)
    found = bisect(Net(), torch.randn(4, 6), folder=tmp_path, code=False)
    assert found.finding is not None
    assert (found.finding.stage, found.finding.culprit) == ("capture", "%tanh = tanh(%layer_norm)")


@pytest.mark.compiled
@pytest.mark.slow
def test_wrong_generated_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from daceml_train.codegen.kernel import expression

    model, x = nn.GELU(), torch.randn(3, 4)
    assert not bisect(model, x, folder=tmp_path)
    right = expression.literal
    monkeypatch.setattr(expression, "literal", lambda value, dtype: right(value * 1.1, dtype))
    found = bisect(model, x, folder=tmp_path)
    assert found.finding is not None
    assert found.finding.stage == "code"
    assert "gelu" in found.finding.culprit
    script = found.finding.script
    assert script is not None
    assert run(script, capsys)[0] == 1
    monkeypatch.undo()
    assert run(script, capsys)[0] == 0


def test_graphs_that_draw_random_numbers_and_graphs_after_a_break(tmp_path: Path) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = nn.functional.dropout(self.first(x), 0.5)
            if h.sum() > 100:
                h = h * 2
            return self.second(h)

    found = bisect(Breaks(), torch.randn(4, 6), folder=tmp_path, code=False)
    assert not found, str(found)
    assert "the graph draws random numbers: it is compared with itself, not with PyTorch" in found.notes
    assert sum("results of a captured graph" in c for c in found.compared) == 1
