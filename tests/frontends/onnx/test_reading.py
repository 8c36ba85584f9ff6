import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import daceml_train as dt
from benchmarks.onnx import mutations
from daceml_train.frontends.onnx import load
from tests.frontends.onnx.models import model, perceptron, random, tensor


def external(tmp_path, location, *, offset=0, length=None, write=True):
    if write:
        (tmp_path / "w.bin").write_bytes(random(3, 3).tobytes())
    result = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [tensor("x", 2, 3)], [tensor("y", 2, 3)])
    weight = result.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[3, 3])
    weight.data_location = TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", offset), ("length", length)):
        if text is not None:
            weight.external_data.add(key=key, value=str(text))
    (tmp_path / "folder").mkdir(exist_ok=True)
    path = tmp_path / "folder" / "m.onnx" if location.startswith("..") else tmp_path / "m.onnx"
    path.write_bytes(result.SerializeToString())
    return path


def test_external_data_is_read(tmp_path):
    assert load(external(tmp_path, "w.bin", length=36))(torch.eye(3)[:2]).shape == (2, 3)


@pytest.mark.parametrize(
    ("location", "more", "sentence"),
    [
        ("../w.bin", {}, "outside the model's folder, which is refused"),
        ("/etc/passwd", {}, "the absolute or empty path '/etc/passwd', which is refused"),
        ("", {}, "absolute or empty path"),
        ("gone.bin", {}, "stored in 'gone.bin', which is not in"),
        ("w.bin", {"length": 20}, "has 20 bytes where shape (3, 3) needs 36"),
        ("w.bin", {"offset": -8}, "has the offset '-8', not a size"),
        ("w.bin", {"offset": "0x8"}, "has the offset '0x8', not a size"),
        ("w.bin", {"length": -36}, "has the length '-36', not a size"),
        ("w.bin", {"offset": 8}, "ends beyond w.bin, the file may be truncated"),
    ],
)
def test_external_data_that_is_wrong_or_elsewhere(tmp_path, location, more, sentence):
    with pytest.raises(dt.Invalid) as caught:
        load(external(tmp_path, location, **more))
    assert sentence in str(caught.value)


def test_external_data_with_a_second_name_is_refused(tmp_path):
    """A hard link to a file elsewhere looks like a file of the model's folder, as a symlink does."""
    secret = tmp_path / "elsewhere.bin"
    secret.write_bytes(random(3, 3).tobytes())
    (tmp_path / "w.bin").hardlink_to(secret)
    with pytest.raises(dt.Invalid, match=r"a file with several names \(hard links\), which is refused"):
        load(external(tmp_path, "w.bin", write=False))
    (tmp_path / "w.bin").unlink()
    (tmp_path / "folder" / "w.bin").symlink_to(secret)
    with pytest.raises(dt.Invalid, match="outside the model's folder"):
        path = external(tmp_path, "w.bin", write=False)
        load(path.rename(tmp_path / "folder" / "m.onnx"))


@pytest.mark.parametrize("repeats", [[1 << 32, 1 << 32], [1 << 40, 1 << 20]])
def test_a_tile_that_no_memory_holds_is_named(repeats):
    result = model(
        [helper.make_node("Tile", ["x", "r"], ["y"], name="tiles")],
        [tensor("x", 2, 3)],
        [tensor("y", "a", "b")],
    )
    result.graph.initializer.append(numpy_helper.from_array(np.array(repeats, dtype=np.int64), "r"))
    with pytest.raises(dt.Invalid, match=r"more than can be addressed"):
        load(result)(torch.ones(2, 3))


def test_external_data_without_a_path(tmp_path):
    path = external(tmp_path, "w.bin")
    with pytest.raises(dt.Invalid, match="give the model's path"):
        load(onnx.load(path, load_external_data=False))


def test_a_wrong_checksum(tmp_path):
    path = external(tmp_path, "w.bin")
    result = onnx.load(path, load_external_data=False)
    result.graph.initializer[0].external_data.add(key="checksum", value="0" * 40)
    path.write_bytes(result.SerializeToString())
    with pytest.raises(dt.Invalid, match="checksum of external data of 'w'"):
        load(path)


def changed(change):
    result = perceptron()
    change(result)
    return result


def unknown(result):
    result.graph.node[1].op_type = "Blur"
    result.graph.node[1].domain = "elsewhere"
    result.opset_import.append(helper.make_opsetid("elsewhere", 3))


def circle(result):
    result.graph.node[0].input[0] = "y"


def absurd(result):
    del result.graph.node[:]
    result.graph.node.append(helper.make_node("ConstantOfShape", ["huge"], ["y"]))
    for dim in result.graph.output[0].type.tensor_type.shape.dim:
        dim.Clear()
    result.graph.initializer.append(numpy_helper.from_array(np.array([1 << 40, 1 << 20]), "huge"))


def conflict(result):
    result.graph.initializer[0].dims[1] = 5
    result.graph.initializer[0].raw_data = random(8, 5).tobytes()


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        (unknown, dt.Unsupported, "no rule for this ONNX operator (at elsewhere:Blur version 3, /Relu)"),
        (circle, dt.Invalid, "no valid ONNX model"),
        (lambda m: m.graph.initializer.pop(), dt.Invalid, "head"),
        (
            lambda m: setattr(m.opset_import[0], "version", 999),
            dt.Unsupported,
            "operator set 999, the installed onnx knows",
        ),
        (lambda m: setattr(m.opset_import[0], "version", 3), dt.Unsupported, "the oldest that is read is 7"),
        (lambda m: setattr(m.graph.initializer[0], "raw_data", b"123"), dt.Invalid, "layers.0.weight"),
        (
            lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", TensorProto.INT64),
            dt.Invalid,
            "no valid|conflict",
        ),
        (lambda m: m.graph.node[1].attribute.append(helper.make_attribute("slope", 2.0)), dt.Invalid, "slope"),
        (absurd, dt.Invalid, "array of 1152921504606846976 elements"),
        (conflict, dt.Invalid, "conflict"),
        (lambda m: m.ClearField("graph"), dt.Invalid, "holds no graph|no valid"),
    ],
)
def test_a_broken_model_is_one_clear_error(change, kind, sentence):
    with pytest.raises(kind) as caught:
        load(changed(change).SerializeToString())
    assert any(part in str(caught.value) for part in sentence.split("|")), str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x00" * 40, b"not a model", perceptron().SerializeToString()[:200]])
def test_bytes_that_are_no_model(data):
    with pytest.raises(dt.Invalid):
        load(data)


def test_other_arguments(tmp_path):
    with pytest.raises(dt.Invalid, match="there is no ONNX file"):
        load(tmp_path / "absent.onnx")
    with pytest.raises(dt.Invalid, match="given int"):
        load(7)
    with pytest.raises(dt.Invalid, match="takes a torch.nn.Module"):
        dt.optimize(7)


def test_strings_are_refused_by_name():
    result = model(
        [helper.make_node("StringNormalizer", ["x"], ["y"])],
        [tensor("x", 2, element=TensorProto.STRING)],
        [tensor("y", 2, element=TensorProto.STRING)],
    )
    with pytest.raises(dt.Unsupported, match="input 'x' has ONNX element type STRING"):
        load(result)


def test_damaged_models_never_crash():
    result = mutations.run(300, 1, lambda: None)
    assert not result["crashes"] and not result["hangs"] and not result["unexpected"], result
