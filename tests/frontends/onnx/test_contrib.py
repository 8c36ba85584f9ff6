"""Operators of `com.microsoft` against ONNX Runtime, which defines them."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from daceml_train.frontends.onnx import load
from tests.frontends.onnx.models import random

runtime = pytest.importorskip("onnxruntime")

X = random(2, 4, 8)
MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], np.int32)
CASES = {
    "Gelu": ([X], {}, 1),
    "QuickGelu": ([X], {"alpha": 1.5}, 1),
    "BiasGelu": ([X, random(8, seed=1)], {}, 1),
    "FastGelu": ([X, random(8, seed=1)], {}, 1),
    "FusedMatMul": ([X, random(2, 5, 8, seed=1)], {"transB": 1, "alpha": 0.5}, 1),
    "SkipLayerNormalization": (
        [X, random(2, 4, 8, seed=1), random(8, seed=2), random(8, seed=3), random(8, seed=4)],
        {"epsilon": 1e-5},
        1,
    ),
    "SkipSimplifiedLayerNormalization": ([X, random(2, 4, 8, seed=1), random(8, seed=2)], {"epsilon": 1e-5}, 1),
    "EmbedLayerNormalization": (
        [
            np.array([[1, 2, 3], [0, 4, 1]], np.int32),
            np.array([[0, 0, 1], [1, 0, 1]], np.int32),
            random(5, 8),
            random(6, 8, seed=1),
            random(2, 8, seed=2),
            random(8, seed=3),
            random(8, seed=4),
        ],
        {"epsilon": 1e-5},
        2,
    ),
    "Attention": ([X, random(8, 24, seed=1), random(24, seed=2)], {"num_heads": 2}, 1),
    "Attention causal": ([X, random(8, 24, seed=1), random(24, seed=2)], {"num_heads": 2, "unidirectional": 1}, 1),
    "Attention masked": ([X, random(8, 24, seed=1), random(24, seed=2), MASK], {"num_heads": 2}, 1),
    "MultiHeadAttention": (
        [X, random(2, 4, 8, seed=1), random(2, 4, 8, seed=2), random(24, seed=3)],
        {"num_heads": 2},
        1,
    ),
    "RotaryEmbedding": ([X, np.array([[0, 1, 2, 3], [1, 2, 3, 4]]), random(8, 4, seed=1), random(8, 4, seed=2)], {}, 1),
    "RotaryEmbedding interleaved": (
        [X, np.array([[0, 1, 2, 3], [1, 2, 3, 4]]), random(8, 4, seed=1), random(8, 4, seed=2)],
        {"interleaved": 1},
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_onnx_runtime(name):
    arrays, attributes, outputs = CASES[name]
    inputs = [f"x{i}" for i in range(len(arrays))]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(name.split()[0], inputs, results, domain="com.microsoft", **attributes)
    declared = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(inputs, arrays, strict=True)
    ]
    kinds = [TensorProto.FLOAT, TensorProto.INT32]
    created = [
        helper.make_tensor_value_info(r, k, list("abc")[: 3 - 2 * i])
        for i, (r, k) in enumerate(zip(results, kinds, strict=False))
    ]
    graph = helper.make_graph([node], "contrib", declared, created)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)], ir_version=8
    )
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(results[:1], dict(zip(inputs, arrays, strict=True)))[0]
    got = load(model)(*map(torch.from_numpy, arrays))
    got = got[0] if isinstance(got, tuple) else got
    torch.testing.assert_close(got, torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
