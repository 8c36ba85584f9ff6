import numpy as np
import onnx
import pytest
import torch

import daceml_train as dt
from daceml_train.frontends.onnx import load, save_onnx
from tests.frontends.onnx.models import model, perceptron, random, tensor

X = torch.from_numpy(random(5, 4, seed=3))


@pytest.mark.parametrize("external", [False, True])
def test_a_saved_model_is_the_loaded_one_with_new_values(tmp_path, external):
    module = load(perceptron())
    with torch.no_grad():
        module.head.mul_(2.0)
    file = save_onnx(module, tmp_path / "deep" / "trained.onnx", external=external)
    assert sorted(p.name for p in file.parent.iterdir()) == ["trained.onnx"] + ["trained.onnx.data"] * external
    saved, original = onnx.load(file), perceptron()
    onnx.checker.check_model(saved)
    for name in ("producer_name", "doc_string", "ir_version"):
        assert getattr(saved, name) == getattr(original, name)
    assert list(saved.metadata_props) == list(original.metadata_props)
    assert list(saved.graph.node) == list(original.graph.node) and list(saved.graph.input) == list(original.graph.input)
    values = {t.name: onnx.numpy_helper.to_array(t) for t in saved.graph.initializer}
    np.testing.assert_array_equal(values["head"], 2 * onnx.numpy_helper.to_array(original.graph.initializer[2]))
    torch.testing.assert_close(load(file)(X), module(X))


def test_onnx_runtime_runs_what_was_trained(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    module = load(perceptron())
    update = torch.optim.SGD(module.parameters(), lr=0.1)
    module(X).square().mean().backward()
    update.step()
    file = dt.save_onnx(dt.optimize(module), tmp_path / "m.onnx")
    (theirs,) = runtime.InferenceSession(str(file)).run(None, {"x": X.numpy()})
    torch.testing.assert_close(module(X).detach(), torch.from_numpy(theirs))


def test_the_loaded_proto_is_not_changed():
    proto = perceptron()
    before = proto.SerializeToString()
    module = load(proto)
    with torch.no_grad():
        module.head.zero_()
    assert proto.SerializeToString() == before
    assert all(not t.raw_data for t in module.skeleton.graph.initializer)


def test_external_data_is_mapped_and_written_back_beside_the_file(tmp_path):
    onnx.save(perceptron(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.data")
    module = load(tmp_path / "m.onnx")
    torch.testing.assert_close(module(X), load(perceptron())(X))
    before = (tmp_path / "m.data").read_bytes()
    with torch.no_grad():
        module.head.zero_()
    assert (tmp_path / "m.data").read_bytes() == before
    save_onnx(module, tmp_path / "new.onnx")
    assert (tmp_path / "new.onnx.data").is_file()
    assert not load(tmp_path / "new.onnx")(X).any()


@pytest.mark.parametrize(
    ("path", "options", "sentence"),
    [
        ("folder", {}, "folder is a folder, and an ONNX model is a file"),
        ("file/m.onnx", {}, "the ONNX model cannot be written: "),
        ("", {}, "an ONNX model is a path, given ''"),
        (3, {}, "an ONNX model is a path, given 3"),
        ("m.onnx", {"external": "m.data"}, "external is True, False or None, given 'm.data'"),
    ],
)
def test_where_nothing_can_be_written_nothing_is(tmp_path, monkeypatch, path, options, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(dt.Invalid, match=sentence):
        dt.save_onnx(load(perceptron()), path, **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_model_that_was_not_onnx_is_refused(tmp_path):
    with pytest.raises(dt.Invalid, match="came from ONNX, given Linear"):
        save_onnx(torch.nn.Linear(2, 2), tmp_path / "x.onnx")


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("kind", ["INT4", "UINT4", "INT2", "UINT2", "FLOAT4E2M1"])
def test_types_narrower_than_a_byte_are_packed(tmp_path, kind, external):
    values = np.array([1, 0, 1, 1, 0] if kind.startswith("UINT") else [1, 0, -1, 1, -1], np.float32)
    element = getattr(onnx.TensorProto, kind)
    nodes = [onnx.helper.make_node("Cast", ["w"], ["h"], to=1), onnx.helper.make_node("Add", ["x", "h"], ["y"])]
    proto = model(nodes, [tensor("x", 5)], [tensor("y", 5)], opset=25)
    narrow = values.astype(onnx.helper.tensor_dtype_to_np_dtype(element))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(narrow, "w"))
    x = torch.zeros(5)
    module = load(proto, trainable=True)
    assert module(x).tolist() == values.tolist()
    path = save_onnx(module, tmp_path / "packed.onnx", external=external)
    (stored,) = onnx.load(path, load_external_data=False).graph.initializer
    assert external or len(stored.raw_data) == -(-5 * (2 if kind.endswith("2") else 4) // 8)
    assert load(path)(x).tolist() == values.tolist()
