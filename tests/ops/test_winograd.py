"""Convolutions in tiles, and their gradients: what the operators mean, against PyTorch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Value
from daceml_train.ops.packed import PackedConvolution
from daceml_train.ops.winograd import WinogradFilter, WinogradWeightGrad
from daceml_train.tensor import Tensor
from tests.ops.checking import numbers
from tests.ops.test_packed import value

PADDINGS = [(1, 1), (0, 2), (2, 1)]


def in_tiles(columns: int, padding: tuple[int, int]) -> PackedConvolution:
    window = {"kernel": (3, 3), "stride": (1, 1), "dilation": (1, 1)}
    return PackedConvolution(columns=columns, padding=padding, tiled=True, **window)


@pytest.mark.parametrize("padding", PADDINGS)
def test_a_convolution_and_its_gradients(padding: tuple[int, int]) -> None:
    x, w = (torch.as_tensor(a).requires_grad_() for a in (numbers(2, 5, 6, 7), numbers(40, 5, 3, 3)))
    y = F.conv2d(x, w, padding=padding)
    g = torch.as_tensor(numbers(*y.shape))
    y.backward(g)
    back = (2 - padding[0], 2 - padding[1])

    def forward(x: Value, w: Value) -> Value:
        return x.apply(in_tiles(40, padding), w.apply(WinogradFilter()))

    def of_images(g: Value, w: Value) -> Value:
        return g.apply(in_tiles(5, back), w.apply(WinogradFilter(input_gradient=True)))

    def of_weight(g: Value, x: Value) -> Value:
        return g.apply(WinogradWeightGrad(padding=padding), x)

    x_, w_, g_ = (t.detach().numpy() for t in (x, w, g))
    for build, operands, want in ((forward, (x_, w_), y), (of_images, (g_, w_), x.grad), (of_weight, (g_, x_), w.grad)):
        assert want is not None
        np.testing.assert_allclose(value(build, *operands), want.detach(), rtol=1e-11, atol=1e-11)


def test_sizes_and_what_they_cost() -> None:
    w, x = Tensor((40, 5, 3, 3)), Tensor((2, 5, 6, 7))
    assert [t.shape for t in WinogradFilter().infer(w)] == [(2, 80, 32)]
    assert [t.shape for t in WinogradFilter(input_gradient=True).infer(w)] == [(1, 640, 32)]
    op = WinogradWeightGrad(padding=(1, 1))
    assert op.infer(Tensor((2, 40, 6, 7)), x) == (w,)
    assert op.flops(Tensor((2, 40, 6, 7)), x) == 2 * 9 * 5 * 40 * 2 * 42


def test_operands_that_do_not_fit() -> None:
    with pytest.raises(Invalid, match=r"expects a weight \[K, C, 3, 3\]"):
        WinogradFilter().infer(Tensor((40, 5, 3, 2)))
    with pytest.raises(Invalid, match=r"expects images \[N, C, H, W\]"):
        WinogradWeightGrad(padding=(1, 1)).infer(Tensor((2, 40, 6)), Tensor((2, 5, 6)))
    with pytest.raises(Invalid, match=r"with padding \(0, 0\) given \[2, 40, 6, 7\]"):
        WinogradWeightGrad(padding=(0, 0)).infer(Tensor((2, 40, 6, 7)), Tensor((2, 5, 6, 7)))
