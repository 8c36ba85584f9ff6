from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from daceml_train.analysis.interpret import interpret
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.ops.operator import Value
from daceml_train.ops.packed import (
    PackedConvolution,
    PackedDepthwise,
    PackedMatmul,
    packed,
    packed_filter,
    packed_filters,
)
from daceml_train.tensor import DType, Tensor
from tests.ops.checking import numbers

WINDOWS: list[dict[str, Any]] = [
    {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)},
    {"kernel": (1, 1), "stride": (2, 1), "padding": (0, 0), "dilation": (1, 1)},
    {"kernel": (2, 3), "stride": (1, 2), "padding": (0, 2), "dilation": (2, 1)},
]


def value(build: Any, *inputs: np.ndarray) -> np.ndarray:
    """What a function of values makes of these arrays."""
    graph = Graph()
    given = [graph.input(f"x{i}", Tensor(x.shape, DType.float64)) for i, x in enumerate(inputs)]
    graph.output(build(*given))
    (result,) = interpret(graph, {f"x{i}": x for i, x in enumerate(inputs)}).outputs
    return result


@pytest.mark.parametrize("columns", [1, 32, 33, 70])
def test_matmul(columns: int) -> None:
    a, b = numbers(5, 7), numbers(7, columns)
    result = value(lambda a, b: a.apply(PackedMatmul(columns=columns), packed(b)), a, b)
    np.testing.assert_allclose(result, a @ b, rtol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
def test_convolution(window: dict[str, Any]) -> None:
    x, w = numbers(2, 5, 6, 7), numbers(40, 5, *window["kernel"])

    def build(x: Value, w: Value) -> Value:
        return x.apply(PackedConvolution(columns=40, **window), packed_filter(w))

    want = F.conv2d(
        torch.as_tensor(x), torch.as_tensor(w), None, window["stride"], window["padding"], window["dilation"]
    )
    np.testing.assert_allclose(value(build, x, w), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kernel", [(3, 3), (1, 2)])
def test_depthwise(kernel: tuple[int, int]) -> None:
    x, w = numbers(2, 5, 6, 7), numbers(5, 1, *kernel)
    op = PackedDepthwise(columns=5, kernel=kernel, stride=(2, 1), padding=(1, 0))
    want = F.conv2d(torch.as_tensor(x), torch.as_tensor(w), None, (2, 1), (1, 0), groups=5)
    result = value(lambda x, w: x.apply(op, packed_filters(w)), x, w)
    np.testing.assert_allclose(result, want, rtol=1e-11, atol=1e-12)


def test_results_have_their_channels_last_and_say_what_they_cost() -> None:
    x = Tensor((2, 5, 6, 7))
    (y,) = (op := PackedConvolution(columns=40, **WINDOWS[0])).infer(x, Tensor((2, 45, 32)))
    assert y == Tensor((2, 40, 6, 7), DType.float32, (0, 2, 3, 1))
    assert op.flops(x, Tensor((2, 45, 32))) == 2 * 9 * 5 * 2 * 40 * 42
    tiled = PackedConvolution(columns=40, tiled=True, **WINDOWS[0])
    assert tiled.flops(x, Tensor((2, 80, 32))) == op.flops(x, Tensor((2, 45, 32)))


def test_operands_that_do_not_fit() -> None:
    x = Tensor((2, 5, 6, 7))
    with pytest.raises(Invalid, match=r"expects panels \(2, 7, 32\)"):
        PackedMatmul(columns=40).infer(Tensor((3, 7)), Tensor((2, 6, 32)))
    with pytest.raises(Invalid, match="expects a matrix"):
        PackedMatmul(columns=40).infer(x, Tensor((2, 7, 32)))
    with pytest.raises(Invalid, match="expects images"):
        PackedConvolution(columns=40, **WINDOWS[0]).infer(Tensor((3, 7)), Tensor((2, 63, 32)))
    with pytest.raises(Invalid, match="windows of 3x3"):
        PackedConvolution(columns=40, tiled=True, **WINDOWS[1]).infer(x, Tensor((2, 80, 32)))
    with pytest.raises(Invalid, match=r"expects a weight \(9, 5\)"):
        PackedDepthwise(columns=5, kernel=(3, 3), stride=(1, 1), padding=(1, 1)).infer(x, Tensor((9, 4)))
