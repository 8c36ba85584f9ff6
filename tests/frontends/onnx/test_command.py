"""`daceml-train run` and `report` on ONNX models."""

import numpy as np
import onnx
import pytest
import torch

from daceml_train.cli import main
from daceml_train.frontends.onnx import load
from tests.frontends.onnx.models import perceptron, random

pytestmark = pytest.mark.compiled


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(perceptron(), "m.onnx")
    np.save("x.npy", random(2, 4))
    return tmp_path


@pytest.mark.parametrize("given", ["x.npy", "x=x.npy"])
def test_run_prints_and_writes_results(folder, capsys, given):
    assert main(["run", "m.onnx", "--input", given, "-o", "r.npz"]) == 0
    assert "y: float32 [2, 3]" in capsys.readouterr().out
    expected = load("m.onnx")(torch.from_numpy(random(2, 4))).detach()
    torch.testing.assert_close(torch.from_numpy(np.load("r.npz")["y"]), expected)


def test_inputs_are_made_up_in_the_size_asked_for(folder, capsys):
    assert main(["run", "m.onnx", "--size", "batch=5"]) == 0
    assert "y: float32 [5, 3]" in capsys.readouterr().out


def test_report(folder, capsys):
    assert main(["report", "m.onnx", "--size", "batch=5", "--runs", "1", "-o", "r.html"]) == 0
    assert "library calls" in capsys.readouterr().out and (folder / "r.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent.onnx"], "there is no ONNX file absent.onnx"),
        (["m.onnx", "--size", "batch=x"], "--size takes NAME=N, given 'batch=x'"),
        (["m.onnx", "--input", "z=x.npy"], "'z' names no input of the model; its inputs are: x"),
        (["m.onnx", "--input", "m.onnx"], "m.onnx holds no NumPy array"),
        (["m.onnx", "--input", "wide.npy"], "input 'x' has shape (2, 7)"),
    ],
)
def test_wrong_use(folder, capsys, arguments, sentence):
    np.save("wide.npy", random(2, 7))
    assert main(["run", *arguments]) == 1
    assert sentence in capsys.readouterr().err
