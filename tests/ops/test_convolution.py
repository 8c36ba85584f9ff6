import numpy as np
import pytest
import torch

from daceml_train.errors import Invalid
from daceml_train.ops.convolution import Convolution, ConvolutionInputGrad, ConvolutionWeightGrad
from daceml_train.tensor import DType, Tensor, symbol
from tests.ops.checking import check_op, numbers

CASES = {
    "plain": ((2, 3, 5, 6), (4, 3, 3, 2), {}),
    "strided": ((2, 3, 7, 6), (4, 3, 3, 3), {"stride": (2, 3), "padding": (1, 2)}),
    "dilated": ((1, 2, 7, 7), (2, 2, 2, 3), {"dilation": (3, 2)}),
    "grouped": ((2, 4, 4, 4), (6, 2, 3, 3), {"groups": 2, "padding": (1, 1)}),
    "depthwise": ((2, 3, 4, 4), (3, 1, 3, 3), {"groups": 3}),
    "one-dimensional": ((2, 3, 8), (4, 3, 3), {"padding": (1,)}),
    "three-dimensional": ((1, 2, 3, 4, 3), (2, 2, 2, 2, 2), {}),
    "transposed": (
        (2, 3, 4, 4),
        (3, 2, 3, 3),
        {"transposed": True, "stride": (2, 2), "output_padding": (1, 0), "padding": (1, 1)},
    ),
    "transposed grouped": ((1, 4, 3, 3), (4, 3, 2, 2), {"transposed": True, "groups": 2}),
    "no batch": ((0, 3, 5, 5), (4, 3, 3, 3), {}),
}


def fields(shape: tuple[int, ...], options: dict) -> dict:  # type: ignore[type-arg]
    n = len(shape) - 2
    return {
        "stride": (1,) * n,
        "padding": (0,) * n,
        "dilation": (1,) * n,
        "transposed": False,
        "output_padding": (0,) * n,
        "groups": 1,
    } | options


def convolve(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, f: dict) -> torch.Tensor:  # type: ignore[type-arg]
    args = (f["stride"], f["padding"], f["dilation"], f["transposed"], f["output_padding"], f["groups"])
    return torch.ops.aten.convolution(x, w, bias, *args)


@pytest.mark.parametrize("case", CASES)
def test_convolution(case: str) -> None:
    shape, weight, options = CASES[case]
    f = fields(shape, options)
    x, w = numbers(*shape), numbers(*weight, seed=1)
    outputs = weight[1] * f["groups"] if f["transposed"] else weight[0]
    check_op(Convolution(**f), x, w, reference=lambda x, w: convolve(x, w, None, f), symbolic=False)
    check_op(Convolution(**f), x, w, numbers(outputs), reference=lambda x, w, c: convolve(x, w, c, f), symbolic=False)


@pytest.mark.parametrize("case", [c for c in CASES if c != "no batch"])
def test_gradients(case: str) -> None:
    """The two gradients as operators, against autograd of the gradient of a convolution."""
    shape, weight, options = CASES[case]
    f = fields(shape, options)
    x, w = numbers(*shape), numbers(*weight, seed=1)
    g = numbers(*convolve(torch.as_tensor(x), torch.as_tensor(w), None, f).shape, seed=2)

    def input_grad(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        leaf = torch.as_tensor(x).requires_grad_()
        return torch.autograd.grad(convolve(leaf, w, None, f), leaf, g, create_graph=True)[0]

    def weight_grad(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        leaf = torch.as_tensor(w).requires_grad_()
        return torch.autograd.grad(convolve(x, leaf, None, f), leaf, g, create_graph=True)[0]

    second = not any(f["output_padding"])  # PyTorch's third derivative refuses it
    check_op(ConvolutionInputGrad(input_shape=shape, **f), g, w, reference=input_grad, symbolic=False, second=second)
    check_op(
        ConvolutionWeightGrad(weight_shape=weight, **f), g, x, reference=weight_grad, symbolic=False, second=second
    )


def test_symbolic_sizes() -> None:
    n, s = symbol("n"), symbol("s")
    f = fields((1, 1, 1, 1), {"padding": (1, 1)})
    x, w = Tensor((n, 3, s, s)), Tensor((8, 3, 3, 3))
    assert Convolution(**f).infer(x, w)[0].shape == (n, 8, s, s)
    (y,) = Convolution(**(f | {"stride": (2, 2)})).infer(x, w)
    assert [y.shape[2].subs(s, size) for size in (4, 5, 6)] == [2, 3, 3]
    assert Convolution(**f).flops(x, w) == 2 * n * 8 * s * s * 27


def test_channels_last_follows_the_operands() -> None:
    f = fields((1, 1, 1, 1), {})
    x, w = Tensor((2, 3, 5, 5), order=(0, 2, 3, 1)), Tensor((4, 3, 3, 3))
    assert Convolution(**f).infer(x, w)[0].order == (0, 2, 3, 1)
    assert Convolution(**f).infer(Tensor(x.shape), w)[0].order is None


def test_what_the_library_reorders_within_its_calls() -> None:
    f = fields((1, 1, 1, 1), {"padding": (1, 1)})
    last = (0, 2, 3, 1)
    x, w = Tensor((2, 3, 5, 5)), Tensor((4, 3, 3, 3))
    y = Convolution(**f).infer(x, w)[0]
    everything = 2 * (x.bytes + w.bytes + y.bytes)
    assert Convolution(**f).reorders(x, w) == everything
    assert ConvolutionInputGrad(input_shape=x.shape, **f).reorders(y, w) == everything
    assert ConvolutionWeightGrad(weight_shape=w.shape, **f).reorders(y, x) == everything
    xl, wl, yl = (Tensor(t.shape, order=last) for t in (x, w, y))
    assert Convolution(**f).reorders(xl, w) == 4 * w.bytes
    assert Convolution(**f).reorders(xl, wl) == 2 * w.bytes
    assert ConvolutionInputGrad(input_shape=x.shape, **f).reorders(yl, wl) == 2 * w.bytes
    assert ConvolutionWeightGrad(weight_shape=w.shape, **f).reorders(yl, xl) == 4 * w.bytes
    assert Convolution(**f).reorders(*(Tensor(t.shape, DType.float64) for t in (x, w))) == 0


def test_errors() -> None:
    f = fields((1, 1, 1, 1), {})
    with pytest.raises(Invalid, match="expects 4 channels, given"):
        Convolution(**f).infer(Tensor((1, 3, 5, 5)), Tensor((2, 4, 3, 3)))
    with pytest.raises(Invalid, match="expects x and w of rank 4"):
        Convolution(**f).infer(Tensor((3, 5, 5)), Tensor((2, 4, 3, 3)))
    with pytest.raises(Invalid, match="windows that fit"):
        Convolution(**f).infer(Tensor((1, 3, 1, 1)), Tensor((2, 3, 3, 3)))
    with pytest.raises(Invalid, match=r"one bias \[2\]"):
        Convolution(**f).infer(Tensor((1, 3, 5, 5)), Tensor((2, 3, 3, 3)), Tensor((3,)))
    with pytest.raises(Invalid, match="expects a cotangent"):
        ConvolutionInputGrad(input_shape=(1, 3, 5, 5), **f).infer(Tensor((1, 2, 5, 5)), Tensor((2, 3, 3, 3)))


def test_multiply_adds_are_the_same_for_the_three() -> None:
    f = fields((1, 1, 1, 1), {"stride": (2, 2)})
    x, w = Tensor((2, 3, 9, 9)), Tensor((4, 3, 3, 3))
    (y,) = Convolution(**f).infer(x, w)
    counts = {
        Convolution(**f).flops(x, w),
        ConvolutionInputGrad(input_shape=x.shape, **f).flops(y, w),
        ConvolutionWeightGrad(weight_shape=w.shape, **f).flops(y, x),
    }
    assert counts == {2 * int(np.prod(y.shape)) * 27}
