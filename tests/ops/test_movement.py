import numpy as np
import pytest
import torch
import torch.nn.functional as F

from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.ops.movement import Concat, Expand, Flip, Pad, Permute, Reorder, Slice, View
from daceml_train.tensor import DType, Tensor, symbol
from tests.ops.checking import check_op, numbers


@pytest.mark.parametrize(
    ("shape", "target"),
    [((3, 4), (12,)), ((3, 4), (2, 6)), ((1, 1), ()), ((2, 0, 3), (0, 7)), ((5,), (1, 5, 1)), ((4,), (4,))],
)
def test_view(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    check_op(View(target), numbers(*shape), reference=lambda x: x.reshape(target), symbolic=False)


@pytest.mark.parametrize("dims", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_permute(dims: tuple[int, ...]) -> None:
    check_op(Permute(dims), numbers(3, 4, 5), reference=lambda x: x.permute(dims))
    check_op(Permute(dims), numbers(3, 3, 3), reference=lambda x: x.permute(dims))
    check_op(Permute(dims), numbers(0, 1, 2), reference=lambda x: x.permute(dims), smooth=False)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_reorder(order: tuple[int, ...]) -> None:
    check_op(Reorder(order), numbers(2, 3, 4), reference=lambda x: x)
    assert Reorder(order).infer(Tensor((2, 3, 4)))[0].order == (None if order == (0, 1, 2) else order)
    with pytest.raises(Invalid, match=r"reorder expects a permutation of 0\.\.1 .* given \(0, 0\)"):
        Reorder((0, 0)).infer(Tensor((2, 3)))


def test_permute_carries_the_memory_order() -> None:
    x = Tensor((2, 3, 4, 5))
    (y,) = Permute((0, 3, 1, 2)).infer(x)
    assert (y.shape, y.order, y.strides) == ((2, 5, 3, 4), (0, 2, 3, 1), (60, 1, 20, 5))
    assert Permute((0, 2, 3, 1)).infer(y)[0] == x


@pytest.mark.parametrize(
    ("shape", "target"), [((3, 1), (3, 4)), ((4,), (2, 3, 4)), ((1, 1), (0, 5)), ((), (2,)), ((2, 3), (2, 3))]
)
def test_expand(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    check_op(Expand(target), numbers(*shape), reference=lambda x: x.expand(target), symbolic=False)


@pytest.mark.parametrize(
    ("dim", "start", "stop", "step"),
    [(0, 0, 7, 1), (0, 2, 5, 1), (1, 3, 3, 1), (0, 0, 7, 2), (0, 1, 6, 3), (0, 6, 7, 4), (1, 1, 3, 1), (0, 2, 2, 3)],
)
def test_slice(dim: int, start: int, stop: int, step: int) -> None:
    index = (slice(None),) * dim + (slice(start, stop, step),)
    check_op(Slice(dim, start, stop, step), numbers(7, 3), reference=lambda x: x[index], symbolic=False)


def test_slice_of_symbolic_size() -> None:
    s = symbol("s7")
    assert Slice(0, 0, s - 1).infer(Tensor((s, 3)))[0].shape == (s - 1, 3)
    graph = Graph()
    x = graph.input("x", Tensor((s, 3)))
    y = x.slice(0, 1, s, 2)
    g = graph.input("g", y.tensor)
    (gradient,) = [Slice(0, 1, s, 2).vjp(graph, x, g)]
    assert gradient.shape == (s, 3)


@pytest.mark.parametrize("pads", [((0, 0), (1, 2)), ((2, 0), (0, 0)), ((1, 1), (1, 1))])
def test_pad(pads: tuple[tuple[int, int], ...]) -> None:
    flat = [p for pair in reversed(pads) for p in pair]
    check_op(Pad(pads, 1.5), numbers(3, 4), reference=lambda x: F.pad(x, flat, value=1.5))
    check_op(Pad(pads), numbers(0, 4), reference=lambda x: F.pad(x, flat), smooth=False)


@pytest.mark.parametrize("sizes", [(2,), (2, 3), (1, 0, 4), (2, 2, 2)])
def test_concat(sizes: tuple[int, ...]) -> None:
    xs = [numbers(3, size, seed=i) for i, size in enumerate(sizes)]
    check_op(Concat(1), *xs, reference=lambda *xs: torch.cat(xs, 1))


def test_concat_of_integers() -> None:
    check_op(Concat(0), np.arange(3), np.arange(2), reference=lambda *xs: torch.cat(xs))


@pytest.mark.parametrize("dims", [(), (0,), (0, 2)])
def test_flip(dims: tuple[int, ...]) -> None:
    check_op(Flip(dims), numbers(3, 1, 4), reference=lambda x: x.flip(dims))


def test_errors() -> None:
    x = Tensor((3, 4))
    with pytest.raises(Invalid, match=r"view to \[5, 2\] expects 10 elements, given 12 in f32\[3, 4\]"):
        View((5, 2)).infer(x)
    with pytest.raises(Invalid, match=r"permutation of 0\.\.1 .* given \(0, 0\)"):
        Permute((0, 0)).infer(x)
    for shape in ((3, 5), (4,), (1, 4)):
        with pytest.raises(Invalid, match=r"expand to|do not broadcast"):
            Expand(shape).infer(x)
    for op in (Slice(0, 2, 1), Slice(0, 0, 4), Slice(0, -1, 2)):
        with pytest.raises(Invalid, match="expects 0 <= start <= stop <= 3"):
            op.infer(x)
    with pytest.raises(Invalid, match="use slice to crop"):
        Pad(((0, 0), (-1, 0))).infer(x)
    with pytest.raises(Invalid, match="expects operands equal in all else"):
        Concat(0).infer(x, Tensor((3, 5)))
    with pytest.raises(Invalid, match="expects operands equal in all else"):
        Concat(0).infer(x, Tensor((3, 4), DType.float64))
