"""The weight gradient of depthwise convolutions: code of our own against PyTorch's, in double precision."""

from pathlib import Path

import pytest
import torch

from daceml_train.codegen.cpu.compile import compile_kernels
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library import depthwise
from daceml_train.codegen.library.depthwise import depthwise_weight_gradient
from daceml_train.ops.convolution import ConvolutionWeightGrad
from daceml_train.tensor import DType, Tensor, symbol
from tests.codegen.running import launch

CASES = [  # images, channels, height, width, kernel, stride, padding, dilation
    (2, 24, 9, 7, (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 19, 8, 11, (3, 3), (2, 2), (1, 1), (1, 1)),
    (1, 37, 10, 10, (5, 5), (1, 1), (2, 2), (1, 1)),
    (3, 16, 11, 6, (5, 3), (2, 1), (1, 2), (1, 1)),
    (2, 20, 12, 13, (3, 3), (1, 1), (2, 2), (2, 2)),
    (2, 16, 9, 9, (7, 7), (1, 1), (3, 3), (1, 1)),
    (2, 5, 4, 4, (3, 3), (1, 1), (0, 0), (1, 1)),
    (1, 8, 2, 2, (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 33, 6, 6, (1, 1), (1, 1), (0, 0), (1, 1)),
    (2, 18, 7, 9, (3, 3), (3, 2), (4, 0), (1, 3)),
]
NAMES = {torch.float32: DType.float32, torch.float64: DType.float64}


def layout(t: torch.Tensor) -> Layout:
    return Layout(tuple(t.shape), t.stride(), NAMES[t.dtype])


def operator(c: int, kernel, stride, padding, dilation) -> ConvolutionWeightGrad:
    shape = (c, 1, *kernel)
    return ConvolutionWeightGrad(
        weight_shape=shape, stride=stride, padding=padding, dilation=dilation, output_padding=(0, 0), groups=c
    )


@pytest.mark.compiled
def test_equals_pytorch(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes with remainders, all strides, dilations, paddings; blocks; slices as operands; 32 and 64 bits."""
    torch.manual_seed(0)
    monkeypatch.setattr(depthwise, "FAST", 0)
    results = []
    for number, (n, c, h, w, kernel, *window) in enumerate(CASES):
        dtype = torch.float64 if number % 3 == 2 else torch.float32
        whole = torch.randn(n, c + 6, h, w, dtype=dtype).contiguous(memory_format=torch.channels_last)
        x = whole[:, 3 : c + 3] if number % 2 else whole[:, :c].contiguous(memory_format=torch.channels_last)
        stride, padding, dilation = window
        y = torch.nn.functional.conv2d(x, torch.zeros(c, 1, *kernel, dtype=dtype), None, stride, padding, dilation, c)
        g = torch.randn_like(y).contiguous(memory_format=torch.channels_last)
        code = depthwise_weight_gradient(operator(c, kernel, *window), [layout(g), layout(x)])
        assert code is not None
        results.append((code, g, x, kernel, window))
    paths = compile_kernels([m[0] for m in results], tmp_path, compiler=compiler)
    for code, g, x, kernel, (stride, padding, dilation) in results:
        c = x.shape[1]
        expected = torch.ops.aten.convolution_backward(
            g.double(),
            x.double(),
            torch.zeros(c, 1, *kernel).double(),
            None,
            stride,
            padding,
            dilation,
            False,
            (0, 0),
            c,
            (False, True, False),
        )[1]
        for blocks in (1, 3):
            result = torch.full((c, 1, *kernel), float("nan"), dtype=x.dtype)
            launch(code, paths[code.key], [g, x, result], blocks)
            scale = float(expected.abs().max()) or 1.0
            error = float((result.double() - expected).abs().max()) / scale
            assert error < (1e-13 if x.dtype is torch.float64 else 1e-6), (code, blocks)


def test_sizes_are_arguments() -> None:
    """One text for every batch and image, also where they are symbols."""
    last = (0, 2, 3, 1)
    op = operator(8, (5, 5), (1, 1), (2, 2), (1, 1))
    sizes = [(2, 8, 9, 9), (symbol("s0"), 8, symbol("s1"), 7)]
    layouts = [Tensor(shape, DType.float32, last) for shape in sizes]
    codes = [depthwise_weight_gradient(op, [Layout(t.shape, t.strides, t.dtype)] * 2) for t in layouts]
    assert all(codes)
    assert len({code.key for code in codes if code}) == 1


@pytest.mark.parametrize(
    ("change", "order"),
    [
        ({}, None),
        ({"groups": 4, "weight_shape": (8, 2, 5, 5)}, (0, 2, 3, 1)),
        ({"transposed": True}, (0, 2, 3, 1)),
        ({"weight_shape": (16, 1, 5, 5)}, (0, 2, 3, 1)),
        ({"weight_shape": (8, 1, 3, 3)}, (0, 2, 3, 1)),
        ({"weight_shape": (8, 1, 12, 12)}, (0, 2, 3, 1)),
    ],
)
def test_all_else_is_the_librarys(change, order) -> None:
    fields = {"weight_shape": (8, 1, 5, 5), "groups": 8} | change
    op = ConvolutionWeightGrad(stride=(1, 1), padding=(2, 2), dilation=(1, 1), output_padding=(0, 0), **fields)
    t = Tensor((2, 8, 9, 9), DType.float32, order)
    assert depthwise_weight_gradient(op, [Layout(t.shape, t.strides, t.dtype)] * 2) is None


def test_16_bit_types_are_the_librarys() -> None:
    t = Tensor((2, 8, 9, 9), DType.bfloat16, (0, 2, 3, 1))
    op = operator(8, (5, 5), (1, 1), (2, 2), (1, 1))
    assert depthwise_weight_gradient(op, [Layout(t.shape, t.strides, t.dtype)] * 2) is None
