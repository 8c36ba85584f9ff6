"""`daceml-train run` and `report` on ONNX models."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from daceml_train.cli import main
from daceml_train.frontends.onnx import load
from tests.frontends.onnx.models import model, perceptron, random, tensor

pytestmark = pytest.mark.compiled


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(perceptron(), "m.onnx")
    np.save("x.npy", random(2, 4))
    return tmp_path


def two_inputs():
    """y = a - b, of one symbolic size."""
    a, b, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["batch", 4]) for n in "aby")
    graph = helper.make_graph([helper.make_node("Sub", ["a", "b"], ["y"])], "two", [a, b], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(("given", "output"), [("lr=1/x.npy", "r"), ("x=lr=1/x.npy", "r.npz")])
def test_run_prints_and_writes_results(folder, capsys, given, output):
    (folder / "lr=1").mkdir()
    (folder / "x.npy").rename(folder / "lr=1" / "x.npy")
    assert main(["run", "m.onnx", "--input", given, "-o", output]) == 0
    assert "y: float32 [2, 3]" in capsys.readouterr().out
    expected = load("m.onnx")(torch.from_numpy(random(2, 4))).detach()
    torch.testing.assert_close(torch.from_numpy(np.load("r.npz")["y"]), expected)


def test_results_are_written_whatever_they_are_called(folder):
    """`file` and `allow_pickle` are parameters of `np.savez`."""
    x, *results = (tensor(name, 2) for name in ("x", "file", "allow_pickle"))
    nodes = [helper.make_node(kind, ["x"], [y.name]) for kind, y in zip(("Neg", "Abs"), results, strict=True)]
    onnx.save(model(nodes, [x], results), "named.onnx")
    np.save("x.npy", np.array([1, -2], np.float32))
    assert main(["run", "named.onnx", "--input", "x.npy", "-o", "r.npz"]) == 0
    assert {name: y.tolist() for name, y in np.load("r.npz").items()} == {"file": [-1, 2], "allow_pickle": [1, 2]}


def test_inputs_are_made_up_in_the_size_asked_for(folder, capsys):
    assert main(["run", "m.onnx", "--size", "batch=5"]) == 0
    assert "y: float32 [5, 3]" in capsys.readouterr().out


def test_what_is_made_up_fits_what_is_given(folder, capsys):
    onnx.save(two_inputs(), "two.onnx")
    np.save("x.npy", random(2, 4).astype(">f4"))  # bytes in the other order
    assert main(["run", "two.onnx", "--input", "a=x.npy"]) == 0
    assert "y: float32 [2, 4]" in capsys.readouterr().out


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
        (["m.onnx", "--input", "absent.npy"], "there is no file absent.npy"),
        (["m.onnx", "--input", "words.npy"], "words.npy has elements of type <U1, of which PyTorch has no tensors"),
        (["m.onnx", "--input", "words.npz"], "words.npz is an archive of arrays; write the one that is meant"),
        (["m.onnx", "--input", "x.npy", "--input", "x=x.npy"], "two files are given for the input 'x', the second is"),
        (["m.onnx", "--size", "batsch=3"], "no input of the model has an extent 'batsch', did you mean 'batch'?"),
        (["m.onnx", "--size", "batch=3", "--input", "x.npy"], "the extent 'batch' is said to be 3, and the input 'x'"),
        (["m.onnx", "--size", "batch=²"], "--size takes NAME=N, given 'batch=²'"),
        (["m.onnx", "--size", f"batch={10**15}"], f"the input 'x' of shape [{10**15}, 4] does not fit into memory"),
        (["two.onnx", "--input", "x.npy"], "the model has the inputs a, b; say which: a=x.npy"),
        (["two.onnx", "--input", "aa=x.npy"], "'aa' names no input of the model, did you mean 'a'?; its inputs are"),
        (["two.onnx", "--input", "a=x.npy", "--input", "b=x3.npy"], "(in a call of the model of two.onnx)"),
    ],
)
def test_wrong_use(folder, capsys, arguments, sentence):
    np.save("wide.npy", random(2, 7))
    np.save("words.npy", np.array(["a"]))
    np.savez("words.npz", x=random(2, 4))
    np.save("x3.npy", random(3, 4))
    onnx.save(two_inputs(), "two.onnx")
    assert main(["run", *arguments]) == 1
    assert sentence in capsys.readouterr().err
