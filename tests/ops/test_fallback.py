import numpy as np
import pytest
import torch

from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Invalid, Unsupported
from daceml_train.graph.graph import Graph
from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.fallback import Aten, Body, Operand
from daceml_train.ops.kernel import Statement
from daceml_train.ops.movement import Flip
from daceml_train.tensor import DType, Tensor, symbol
from tests.ops.checking import check_op, numbers

F64 = Tensor((3, 4), DType.float64)


def cumsum(body: Body | None = None) -> Aten:
    return Aten("aten.cumsum.default", (Operand(0), 1), (F64,), backward=body)


def cumsum_derivative() -> Body:
    """flip(cumsum(flip(g)))."""
    steps = (
        Statement(Flip((1,)), ("g",), ("a",)),
        Statement(cumsum(), ("a",), ("b",)),
        Statement(Flip((1,)), ("b",), ("c",)),
    )
    return Body(("x", "y", "g"), steps, ("c",))


def test_with_a_derivative() -> None:
    op = cumsum(cumsum_derivative())
    check_op(op, numbers(3, 4), reference=lambda x: x.cumsum(1), second=False, symbolic=False)
    assert op == cumsum() and op.label == "aten.cumsum"


def test_without_a_derivative() -> None:
    graph = Graph()
    (y,) = graph.emit(cumsum(), graph.input("x", F64))
    with pytest.raises(Unsupported, match=r"operator aten.cumsum has no derivative but a gradient flows through it"):
        differentiate(graph, {y.name: graph.input("g", F64)}, ["x"])


def test_results_without_cotangent_count_as_zero() -> None:
    """Two results; the body takes the cotangents of the floating-point ones only."""
    types = (Tensor((3, 4), DType.float64), Tensor((3, 4), DType.int64))
    steps = (Statement(Elementwise("neg"), ("g",), ("n",)), Statement(Elementwise("neg"), ("n",), ("c",)))
    op = Aten("aten.sort.default", (Operand(0),), types, backward=Body(("x", "y", "i", "g"), steps, ("c",)))
    x = np.sort(numbers(3, 4))
    check_op(op, x, reference=lambda x: tuple(x.sort()), second=False, symbolic=False)


def test_arguments_of_every_kind() -> None:
    n = symbol("n")
    cases = [
        (Aten("aten.stack.default", ((Operand(0), Operand(1)), 1), (Tensor((3, 2, 4), DType.float64),)), 2),
        (
            Aten(
                "aten.sum.dim_IntList",
                (Operand(0), (1,), True),
                (Tensor((3, 1), DType.float64),),
                (("dtype", DType.float32),),
            ),
            1,
        ),
        (Aten("aten.clone.default", (Operand(0),), (F64,), (("memory_format", "contiguous_format"),)), 1),
        (Aten("aten.div.Tensor_mode", (Operand(0), Operand(1)), (F64,), (("rounding_mode", "floor"),)), 2),
        (Aten("aten.clamp.default", (Operand(0), None, 0.5), (F64,)), 1),
        (Aten("aten.scalar_tensor.default", (2.0,), (Tensor((), DType.float64),), (("dtype", DType.float64),)), 0),
    ]
    xs = [numbers(3, 4), numbers(3, 4, seed=1)]
    for op, count in cases:
        (tensor,) = op.infer(*[F64] * count)
        (value,) = op.evaluate(*xs[:count])
        assert (value.shape, value.dtype) == (tensor.shape, np.dtype("float64")), op.label
    with pytest.raises(Invalid, match="with the symbolic size n"):
        Aten("aten.narrow.default", (Operand(0), 1, 0, n), (Tensor((3, n)),)).evaluate(xs[0])


def test_operand_count() -> None:
    with pytest.raises(Invalid, match=r"aten.cumsum as captured takes 1 operands, given 2"):
        cumsum().infer(F64, F64)


def test_registered_operators() -> None:
    with torch.library._scoped_library("daceml_train_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: 2 * x, "CPU")
        op = Aten("daceml_train_test.double.default", (Operand(0),), (F64,))
        np.testing.assert_array_equal(op.evaluate(numbers(3, 4))[0], 2 * numbers(3, 4))


def test_integer_results_cut_the_gradient() -> None:
    assert Aten("aten.argmax.default", (Operand(0),), (Tensor((), DType.int64),)).zero_gradient
