import numpy as np
import pytest

from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.ops.softmax import LogSoftmax, Softmax
from daceml_train.tensor import DType, Tensor
from tests.ops.checking import check_op, numbers


@pytest.mark.parametrize("kind", [Softmax, LogSoftmax])
@pytest.mark.parametrize(("shape", "dim"), [((3, 5), 1), ((3, 5), 0), ((2, 1, 3), 1), ((4,), 0), ((2, 3, 4), 1)])
def test_softmax(kind: type, shape: tuple[int, ...], dim: int) -> None:
    reference = lambda x: (x.softmax if kind is Softmax else x.log_softmax)(dim)  # noqa: E731
    check_op(kind(dim), numbers(*shape), reference=reference)
    check_op(kind(dim), 1000 * numbers(*shape), reference=reference, smooth=False, second=False)


@pytest.mark.parametrize("kind", [Softmax, LogSoftmax])
def test_masks_and_nothing(kind: type) -> None:
    reference = lambda x: (x.softmax if kind is Softmax else x.log_softmax)(1)  # noqa: E731
    x = numbers(4, 3)
    x[0], x[1, 1] = -np.inf, -np.inf
    check_op(kind(1), x, reference=reference, smooth=False, second=False)
    check_op(kind(1), numbers(0, 3), reference=reference, smooth=False)
    check_op(kind(1), numbers(3, 0), reference=reference, smooth=False)


def test_backward_reads_the_result_only() -> None:
    graph = Graph()
    (y,) = graph.emit(Softmax(1), graph.input("x", Tensor((3, 4))))
    before = len(graph.nodes)
    differentiate(graph, {y.name: graph.input("g", y.tensor)}, ["x"])
    assert "x" not in {i for node in graph.nodes[before:] for i in node.inputs}


def test_errors() -> None:
    with pytest.raises(Invalid, match="softmax expects floating-point"):
        Softmax(0).infer(Tensor((3,), DType.int64))
    with pytest.raises(Invalid, match=r"ascending dimensions in 0\.\.0 for f32\[3\], given \(1,\)"):
        LogSoftmax(1).infer(Tensor((3,)))
