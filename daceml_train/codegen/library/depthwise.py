"""The weight gradient of depthwise convolutions where libraries are several times slower than necessary.

A hand-written loop nest (`native/depthwise.h`), compiled for the kernel's size and element type; other parameters are
arguments. On one core, it takes 0.5 ms for 8 images of 20x20 with 240 channels and filters of 5x5, where oneDNN takes
6.4. For dense filters of 3x3 in float32 oneDNN has specialized code, which is as fast or faster.
"""

from __future__ import annotations

from collections.abc import Sequence

from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.launch import launch_of
from daceml_train.ops.convolution import ConvolutionWeightGrad
from daceml_train.ops.operator import Operator
from daceml_train.tensor import DType, same, simplify, symbol

FAST = 9
"""Elements of a dense float32 filter up to which oneDNN is as fast."""
LARGEST = 121
"""The largest number of kernel elements that is supported."""


def depthwise_weight_gradient(
    op: Operator, operands: Sequence[Layout], results: Sequence[Layout] = ()
) -> KernelCode | None:
    """The code for a cotangent and an input with these layouts; None if the library computes the gradient.

    Supported are one filter per channel over images, float32 or float64, both arrays channels-last, and filters for
    which oneDNN has no fast code: larger than 3x3, or dilated, or of float64. Its pointers are cotangent,
    input, result (dense in the weight's row-major order), scratch.
    """
    assert isinstance(op, ConvolutionWeightGrad)
    grad, x = operands
    if len(op.weight_shape) != 4 or op.transposed or grad.dtype not in (DType.float32, DType.float64):
        return None
    channels, one, height, width = op.weight_shape
    if not (isinstance(height, int) and isinstance(width, int) and 0 < height * width <= LARGEST):
        return None
    depthwise = same(one, 1) and same(channels, op.groups) and same(channels, x.shape[1])
    innermost = same(grad.strides[1], 1) and same(x.strides[1], 1)
    if not (depthwise and innermost) or same(channels, 1):
        return None
    fast = height * width <= FAST and all(d == 1 for d in op.dilation) and grad.dtype is DType.float32
    if fast:
        return None
    images, rows, columns = grad.shape[0], grad.shape[2], grad.shape[3]
    integers = (
        *(images, channels, x.shape[2], x.shape[3], rows, columns),
        *(x.strides[d] for d in (0, 2, 3)),
        *(grad.strides[d] for d in (0, 2, 3)),
        *(*op.stride, *op.padding, *op.dilation),
    )
    elements = simplify(channels * height * width)
    work = simplify(images * rows * columns * elements)
    call = f"depthwise::weight_gradient<{grad.dtype.c}, {height}, {width}>"
    return launch_of("depthwise.h", call, integers, images * rows, work, (8 * symbol("blocks") * elements,))
