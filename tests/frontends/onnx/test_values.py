"""Values of operators where element types end, sizes are one or zero, and nodes leave results or attributes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import daceml_train as dt
from daceml_train.errors import Unsupported
from daceml_train.frontends.onnx import load
from tests.frontends.onnx.models import model, tensor

INF, NAN = float("inf"), float("nan")
Array = np.ndarray


def floats(*values: float) -> Array:
    return np.array(values, np.float32)


def node(text: str, **attributes: Any) -> onnx.NodeProto:
    """`Operator a b -> c d`; `_` stands for an argument or a result that is left out."""
    before, after = text.split(" -> ")
    operator, *operands = before.split()
    given, results = ([name.replace("_", "") for name in names] for names in (operands, after.split()))
    return helper.make_node(operator, given, results, **attributes)


def results(
    nodes: Sequence[onnx.NodeProto], x: Array, wanted: Sequence[Array], opset: int, **weights: Any
) -> list[Any]:
    """The results `y`, `z`, ... of a model of `x`, whose extents are free."""
    kinds = [helper.np_dtype_to_tensor_dtype(a.dtype) for a in (x, *wanted)]
    given = tensor("x", *(f"n{i}" for i in range(x.ndim)), element=kinds[0])
    free = [tensor("yz"[i], *(f"{i}{j}" for j in range(a.ndim)), element=kinds[i + 1]) for i, a in enumerate(wanted)]
    proto = model(nodes, [given], free, opset=opset, **{name: np.asarray(value) for name, value in weights.items()})
    found = load(proto)(torch.from_numpy(x))
    return [found] if isinstance(found, torch.Tensor) else list(found)


I64 = np.int64
SIZE = node("Shape x -> s")
WORDS = np.array([2**63, 2**64 - 1, 5, 2**63 + 9, 7], np.uint64)
DIVISORS = np.array([3, 2**63 + 1, 2**64 - 1, 1, 2], np.uint64)
SCALE = np.float32(0.001)
CASES: dict[str, tuple[Any, ...]] = {
    "the softplus of a large number": ([node("Softplus x -> y")], floats(-300, 0, 100), floats(0, np.log(2), 100)),
    "the sign of NaN": ([node("Sign x -> y")], floats(NAN, -2), floats(NAN, -1)),
    "a maximum of uint64": (
        [node("Max x c -> y")],
        np.array([2**63, 1], np.uint64),
        np.array([2**63, 5], np.uint64),
        {"c": np.array([1, 5], np.uint64)},
    ),
    "uint64 that is clipped": (
        [node("Clip x _ c -> y")],
        np.array([2**63 + 7, 1], np.uint64),
        np.array([100, 1], np.uint64),
        {"c": np.uint64(100)},
    ),
    "uint64 that is compared": (
        [node("Greater x c -> y")],
        np.array([2**63, 1], np.uint64),
        np.array([True, False]),
        {"c": np.array([1, 2**63 + 5], np.uint64)},
    ),
    "uint64 that is divided": (
        [node("Div x c -> y"), node("Mod x c -> z")],
        WORDS,
        WORDS // DIVISORS,
        WORDS % DIVISORS,
        {"c": DIVISORS},
    ),
    "uint64 that is reduced": (
        [node("ReduceMax x a -> y", keepdims=0), node("ReduceMean x a -> z", keepdims=0)],
        WORDS,
        np.uint64(2**64 - 1),
        np.uint64((sum(map(int, WORDS)) % 2**64) // len(WORDS)),
        {"a": np.array([0])},
    ),
    "the largest uint64": (
        [node("ArgMax x -> y", keepdims=0), node("TopK x k -> z u")],
        WORDS,
        np.array(1),
        np.sort(WORDS)[:1:-1].copy(),
        {"k": np.array([3])},
    ),
    "unique uint64": ([node("Unique x -> y _ _ z")], WORDS[[1, 0, 1]], WORDS[[0, 1]], np.array([1, 2])),
    "a running sum of uint32": (
        [node("CumSum x a -> y", exclusive=1)],
        np.array([2**32 - 1, 3, 5], np.uint32),
        np.array([0, 2**32 - 1, 2], np.uint32),
        {"a": np.array(0)},
    ),
    "a cast to uint64": ([node("Cast x -> y", to=13)], np.array([1e19, 5.0]), np.array([10**19, 5], np.uint64)),
    "a power of integers": ([node("Pow x c -> y")], np.array([3]), np.array([3**20]), {"c": floats(20)}),
    "a mean of integers": ([node("ReduceMean x -> y", keepdims=0)], np.array([-3, 0]), np.array(-1)),
    "a norm of integers": ([node("ReduceL2 x -> y", keepdims=0)], np.array([100000001]), np.array(100000001)),
    "integers that are resized": (
        [node("Resize x _ c -> y", mode="nearest")],
        np.array([[16777217, 2**31 - 1]], np.int32),
        np.array([[16777217, 16777217, 2**31 - 1, 2**31 - 1]], np.int32),
        {"c": floats(1, 2)},
    ),
    "a large integer around a tensor": (
        [node("Pad x p c -> y")],
        np.array([5]),
        np.array([2**63 - 1, 5]),
        {"p": np.array([1, 0]), "c": I64(2**63 - 1)},
    ),
    "large numbers that are quantized": (
        [node("QuantizeLinear x c -> y")],
        floats(1e30, -1e30, INF, -INF, 1e17),
        np.array([255, 0, 255, 0, 255], np.uint8),
        {"c": SCALE},
    ),
    "int32 with a scale of float16": (
        [node("DequantizeLinear x c -> y")],
        np.array([100000], np.int32),
        np.array([100000 * float(np.float16(0.001))], np.float16),
        {"c": np.float16(0.001)},
    ),
    "zeros that are quantized": (
        [node("DynamicQuantizeLinear x -> y z w")],
        floats(0, 0),
        np.zeros(2, np.uint8),
        np.float32(1 / 255),
    ),
    "powers of two": (
        [node("Cast x -> u", to=TensorProto.FLOAT8E8M0), node("Cast u -> y", to=1)],
        floats(1, 1.2, 2.9, 3e38),
        floats(1, 2, 4, 2.0**127),
        24,
    ),
    "scattered nothing": (
        [node("ScatterND x i u -> y")],
        np.arange(10.0).reshape(5, 2),
        np.arange(10.0).reshape(5, 2),
        {"i": np.zeros((0, 1), I64), "u": np.zeros((0, 2))},
    ),
    "a softmax of no rows": ([node("Softmax x -> y")], np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32), 11),
    "one result of several": ([node("Split x -> h", axis=0, num_outputs=1), node("Neg h -> y")], floats(1), floats(-1)),
    "more parts than there are": (
        [node("Split x -> a b c y", axis=0, num_outputs=4)],
        np.arange(5.0),
        np.zeros(0),
    ),
    "unique elements alone": ([node("Unique x -> y")], floats(3, 1, 3), floats(1, 3)),
    "a size that is divided by zero": (
        [
            SIZE,
            node("Cast s -> f", to=TensorProto.FLOAT),
            node("Div f z -> q"),
            node("Min q c -> m"),
            node("Cast m -> t", to=TensorProto.INT64),
            node("ConstantOfShape t -> y"),
        ],
        np.zeros(3),
        np.zeros(4, np.float32),
        {"z": floats(0), "c": floats(4)},
    ),
    "a size at an index, opset 11": (
        [SIZE, node("Gather s i -> t"), node("Unsqueeze t -> u", axes=[0]), node("ConstantOfShape u -> y")],
        np.zeros(3),
        np.zeros(3, np.float32),
        11,
        {"i": np.array(0)},
    ),
    "a part of the sizes, opset 9": (
        [SIZE, node("Slice s -> y", starts=[1], ends=[2])],
        np.zeros((3, 4)),
        np.array([4]),
        9,
    ),
    "a remainder of sizes": (
        [SIZE, node("Sub s c -> t"), node("Mod t d -> y", fmod=1)],
        np.zeros(10),
        np.array([-1]),
        {"c": np.array([17]), "d": np.array([3])},
    ),
    "sizes that are summed along an axis": (
        [SIZE, node("Unsqueeze s z -> u"), node("ReduceSum u z -> y", keepdims=0)],
        np.zeros((3, 4)),
        np.array([3, 4]),
        {"z": np.array([0])},
    ),
    "sizes that are not summed": (
        [SIZE, node("ReduceSum s -> y", noop_with_empty_axes=1)],
        np.zeros((3, 4)),
        np.array([3, 4]),
    ),
    "a size as a number": ([node("Size x -> s"), node("ReduceMax s -> y")], np.zeros((3, 4)), np.array(12)),
    "a fraction of a size": (
        [
            SIZE,
            node("Cast s -> f", to=1),
            node("Mul f c -> t"),
            node("Floor t -> u"),
            node("Cast u -> v", to=7),
            node("ConstantOfShape v -> y"),
        ],
        np.zeros(10),
        np.zeros(7, np.float32),
        {"c": floats(0.7)},
    ),
    "a size times infinity": (
        [SIZE, node("Cast s -> f", to=1), node("Mul f c -> y")],
        np.zeros(10),
        floats(INF),
        {"c": floats(INF)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    nodes, x, *rest = CASES[name]
    wanted = [np.asarray(a) for a in rest if isinstance(a, np.ndarray | np.generic)]
    opset = next((a for a in rest if isinstance(a, int) and not isinstance(a, np.generic)), 21)
    weights = next((a for a in rest if isinstance(a, dict)), {})
    for found, value in zip(results(nodes, x, wanted, opset, **weights), wanted, strict=True):
        assert found.dtype == torch.from_numpy(np.asarray(value)).dtype
        np.testing.assert_allclose(found.numpy(), value, rtol=1e-6 if value.dtype.kind == "f" else 0, err_msg=name)


UNSIGNED: dict[str, Any] = {
    "Abs": lambda xs: xs,
    "Sign": lambda xs: [int(x > 0) for x in xs],
    "ReduceL1": sum,
    "ReduceSumSquare": lambda xs: sum(x * x for x in xs),
    "ReduceMin": min,
    "ArgMin": lambda xs: xs.index(min(xs)),
}
"""Of Python's integers; reductions have no uint16."""


@pytest.mark.parametrize("element", [np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("operator", UNSIGNED)
def test_unsigned_numbers(operator: str, element: type) -> None:
    elementwise = operator in ("Abs", "Sign")
    if element is np.uint16 and operator.startswith("Reduce"):
        return
    x = np.array([7, np.iinfo(element).max, 0, 200], element)
    value = np.array(UNSIGNED[operator](list(map(int, x))), object) % 2 ** (8 * x.itemsize)
    y = np.array(value, I64 if operator == "ArgMin" else element)
    attributes = {} if elementwise else {"keepdims": 0}
    (found,) = results([node(f"{operator} x -> y", **attributes)], x, [y], 18)
    assert found.numpy().dtype == y.dtype and np.array_equal(found.numpy(), y)


def test_the_gradient_of_a_softplus_of_a_large_number() -> None:
    module = load(model([node("Softplus x -> y")], [tensor("x", 2)], [tensor("y", 2)]))
    x = torch.tensor([100.0, -100.0], requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, pytest.approx(0.0)]


def test_zero_rows_are_normalized_to_zeros() -> None:
    normalizer = helper.make_node("Normalizer", ["x"], ["y"], domain="ai.onnx.ml", norm="L2")
    proto = model([normalizer], [tensor("x", 2, 2)], [tensor("y", 2, 2)])
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    assert load(proto)(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).tolist() == [
        [0.0, 0.0],
        [pytest.approx(0.6), pytest.approx(0.8)],
    ]


def test_results_that_a_rule_does_not_have() -> None:
    """They were rows of the first result where it had as many."""
    nodes = [helper.make_node("SimplifiedLayerNormalization", ["x", "s"], ["y", "z"], domain="com.microsoft")]
    outputs = [tensor("y", 2, 3), tensor("z", 2, 1)]
    proto = model(nodes, [tensor("x", 2, 3)], outputs, s=floats(1, 1, 1))
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(Unsupported, match="has one result, the node asks for 2"):
        load(proto)


def test_an_index_beyond_its_dimension_is_no_other_row() -> None:
    module = load(
        model(
            [node("ScatterND x i u -> y")],
            [tensor("x", 2, 3), tensor("i", 1, 2, element=TensorProto.INT64), tensor("u", 1)],
            [tensor("y", 2, 3)],
        )
    )
    x, u = torch.zeros(2, 3), torch.ones(1)
    assert module(x, torch.tensor([[-1, -3]]), u).tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    for called in (module, dt.optimize(module)):
        for index in ([0, 5], [0, -4], [2, 0]):
            with pytest.raises((IndexError, RuntimeError), match="out of range|out of bounds|index"):
                called(x, torch.tensor([index]), u)
