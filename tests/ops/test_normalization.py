from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from daceml_train.analysis.interpret import interpret
from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.ops.normalization import BatchNorm, BatchNormInference, GroupNorm, LayerNorm, running_statistics
from daceml_train.tensor import DType, Tensor
from tests.ops.checking import check_op, numbers


def statistics(x: torch.Tensor, dims: tuple[int, ...], eps: float) -> tuple[torch.Tensor, ...]:
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return mean, (variance + eps).rsqrt(), variance


@pytest.mark.filterwarnings("ignore:var_mean")
@pytest.mark.parametrize("parameters", [0, 1, 2])
@pytest.mark.parametrize(
    ("shape", "dims"), [((4, 6), 1), ((2, 3, 5), 2), ((2, 3, 5), 1), ((7,), 1), ((0, 4), 1), ((3, 1), 1)]
)
def test_layer_norm(shape: tuple[int, ...], dims: int, parameters: int) -> None:
    axes = tuple(range(len(shape) - dims, len(shape)))
    wb = [numbers(*shape[-dims:], seed=i) for i in range(parameters)]

    def reference(x: torch.Tensor, *wb: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.layer_norm(x, shape[-dims:], *wb, eps=1e-3)
        return y, *statistics(x, axes, 1e-3)[:2]

    check_op(LayerNorm(dims, 1e-3), numbers(*shape), *wb, reference=reference, second=shape[-1] > 1)


def test_statistics_are_those_of_aten() -> None:
    x = torch.randn(2, 3, 4, 5)
    for op, aten in (
        (LayerNorm(2), torch.ops.aten.native_layer_norm(x, [4, 5], None, None, 1e-5)),
        (GroupNorm(3), torch.ops.aten.native_group_norm(x, None, None, 2, 3, 20, 3, 1e-5)),
    ):
        assert [t.shape for t in op.infer(Tensor((2, 3, 4, 5)))] == [tuple(t.shape) for t in aten]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("parameters", [0, 1, 2])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (2, 3, 4, 2), (2, 1, 3, 3)])
def test_batch_norm(shape: tuple[int, ...], parameters: int, at_once: bool) -> None:
    axes = tuple(d for d in range(len(shape)) if d != 1)
    wb = [numbers(shape[1], seed=i) for i in range(parameters)]

    def reference(x: torch.Tensor, *wb: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.batch_norm(x, None, None, *wb, training=True, eps=1e-3)
        return y, *(t.reshape(-1) for t in statistics(x, axes, 1e-3))

    check_op(BatchNorm(1e-3, at_once), numbers(*shape), *wb, reference=reference)


def test_running_statistics() -> None:
    graph = Graph()
    x = graph.input("x", Tensor((5, 3, 2), DType.float64))
    old = [graph.input(name, Tensor((3,), DType.float64)) for name in ("mean", "var")]
    _, mean, _, variance = graph.emit(BatchNorm(), x)
    graph.output(*running_statistics(graph, *old, mean, variance, 0.3, 10))
    arrays = {"x": numbers(5, 3, 2), "mean": numbers(3), "var": numbers(3, low=0.1)}
    means, variances = (torch.as_tensor(arrays[n].copy()) for n in ("mean", "var"))
    F.batch_norm(torch.as_tensor(arrays["x"]), means, variances, training=True, momentum=0.3)
    results = interpret(graph, arrays).outputs
    np.testing.assert_allclose(results[0], means)
    np.testing.assert_allclose(results[1], variances)


@pytest.mark.parametrize("parameters", [0, 1, 2])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4, 2), (0, 3, 2)])
def test_batch_norm_inference(shape: tuple[int, ...], parameters: int) -> None:
    wb = [numbers(3, seed=i) for i in range(parameters)]
    given = numbers(3), numbers(3, low=0.1)
    wrt = [0, *range(3, 3 + parameters)]
    reference = lambda x, m, v, *wb: F.batch_norm(x, m, v, *wb, training=False, eps=1e-3)  # noqa: E731
    check_op(BatchNormInference(1e-3), numbers(*shape), *given, *wb, reference=reference, wrt=wrt)


@pytest.mark.parametrize("parameters", [0, 1, 2])
@pytest.mark.parametrize(("shape", "groups"), [((2, 4, 3), 2), ((2, 6, 2, 2), 3), ((3, 4), 1), ((2, 4, 3), 4)])
def test_group_norm(shape: tuple[int, ...], groups: int, parameters: int) -> None:
    wb = [numbers(shape[1], seed=i) for i in range(parameters)]

    def reference(x: torch.Tensor, *wb: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.group_norm(x, groups, *wb, eps=1e-3)
        grouped = x.reshape(shape[0], groups, -1)
        return y, *(t[..., 0] for t in statistics(grouped, (2,), 1e-3)[:2])

    check_op(GroupNorm(groups, 1e-3), numbers(*shape), *wb, reference=reference, symbolic=False)


@pytest.mark.parametrize("op", [LayerNorm(1), BatchNorm(), GroupNorm(2)])
def test_backward_reads_x_and_statistics(op: Any) -> None:
    """Not the result, not the normalized values."""
    graph = Graph()
    results = graph.emit(
        op, graph.input("x", Tensor((4, 6))), graph.input("w", Tensor((6,))), graph.input("b", Tensor((6,)))
    )
    forward = set(graph.tensors)
    g = graph.input("g", results[0].tensor)
    before = len(graph.nodes)
    differentiate(graph, {results[0].name: g}, ["x", "w", "b"])
    read = {i for node in graph.nodes[before:] for i in node.inputs} & forward
    assert read == {"x", "w", results[1].name, results[2].name}


def test_sixteen_bits_have_statistics_of_thirty_two() -> None:
    x = Tensor((4, 6), DType.bfloat16)
    assert [t.dtype.short for t in LayerNorm(1).infer(x)] == ["bf16", "f32", "f32"]


def test_errors() -> None:
    x = Tensor((2, 6, 3))
    with pytest.raises(Invalid, match=r"a weight and a bias of shape \[3\], given f32\[6\]"):
        LayerNorm(1).infer(x, Tensor((6,)))
    with pytest.raises(Invalid, match="over the last 4 dimensions expects at least as many"):
        LayerNorm(4).infer(x)
    with pytest.raises(Invalid, match="of 4 groups expects channels in whole groups"):
        GroupNorm(4).infer(x)
    with pytest.raises(Invalid, match=r"batch_norm expects \[N, C, ...\], given f32\[6\]"):
        BatchNorm().infer(Tensor((6,)))
    with pytest.raises(Invalid, match="layer_norm expects floating-point"):
        LayerNorm(1).infer(Tensor((2, 3), DType.int64))
