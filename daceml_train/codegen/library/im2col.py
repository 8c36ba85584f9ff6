"""The windows of images as rows of a matrix, and back: hand-written loop nests (`native/im2col.h`).

Libraries implement im2col for row-major images only. These kernels read images in any layout, so a convolution whose
weight is larger than its images can be one matmul.
"""

from __future__ import annotations

from collections.abc import Sequence

from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.launch import launch_of
from daceml_train.ops.operator import Operator
from daceml_train.ops.resample import Col2Im, Im2Col, Windows
from daceml_train.tensor import Dim, DType, Tensor, product, same, simplify

LARGEST = 256
"""The largest number of kernel elements that is supported: each needs a pointer."""
GROUP = 64
"""Channels that one block adds up, as in `native/im2col.h`."""


def supported(op: Windows, dtype: DType) -> bool:
    """Whether there is code for windows of this size and type."""
    return dtype in (DType.float32, DType.float64) and product(op.kernel) <= LARGEST


def windows_of(op: Operator, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode | None:
    """The code of `im2col` with consecutive windows; None leaves it to the library."""
    assert isinstance(op, Im2Col)
    (x,), (y,) = operands, results
    if not op.last or not supported(op, x.dtype):
        return None
    rows, columns = op.counts(x.shape)
    return _launch("gather", op, x, (rows, columns), simplify(x.shape[0] * rows), product(y.shape))


def sums_of(op: Operator, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode | None:
    """The code of `col2im` from consecutive windows; None leaves it to the library."""
    assert isinstance(op, Col2Im)
    (x,), (y,) = operands, results
    wanted = Tensor(x.shape, x.dtype, (0, 2, 1)).strides
    dense = all(same(a, b) or same(size, 1) for size, a, b in zip(x.shape, x.strides, wanted, strict=True))
    if not op.last or not supported(op, x.dtype) or not dense:
        return None
    groups = -(-y.shape[1] // GROUP)
    return _launch("scatter", op, y, op.counts(y.shape), simplify(y.shape[0] * groups), product(x.shape))


def _launch(name: str, op: Windows, image: Layout, counts: tuple[Dim, Dim], rows: Dim, work: Dim) -> KernelCode:
    shape, strides = image.shape, image.strides
    integers = (*shape, *counts, *strides, *op.stride, *op.padding, *op.dilation)
    height, width = op.kernel
    return launch_of("im2col.h", f"columns::{name}<{image.dtype.c}, {height}, {width}>", integers, rows, work)
