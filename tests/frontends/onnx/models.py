"""Small ONNX models for tests, written node by node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def tensor(name: str, *shape: int | str, element: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    *,
    opset: int = 21,
    **weights: np.ndarray,
) -> onnx.ModelProto:
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(list(nodes), "small", list(inputs), list(outputs), initializers)
    result = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return result


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def perceptron(**kinds: object) -> onnx.ModelProto:
    """Two layers: relu(x A + a) B, with a batch of any size."""
    nodes = [
        helper.make_node("Gemm", ["x", "layers.0.weight", "layers.0.bias"], ["h"], "/layers.0/Gemm", transB=1),
        helper.make_node("Relu", ["h"], ["r"], "/Relu"),
        helper.make_node("MatMul", ["r", "head"], ["y"], "/MatMul"),
    ]
    result = model(nodes, [tensor("x", "batch", 4)], [tensor("y", "batch", 3)])
    for name, value in (
        ("layers.0.weight", random(8, 4)),
        ("layers.0.bias", random(8, seed=1)),
        ("head", random(8, 3)),
    ):
        result.graph.initializer.append(numpy_helper.from_array(value, name))
    result.producer_name, result.doc_string = "tests", "two layers"
    helper.set_model_props(result, {"licence": "none"})
    return result
