"""The windows of images as rows of a matrix, and back: hand-written loop nests (`native/im2col.h`).

Libraries put windows into columns of row-major images only. These read images in any layout, so that a convolution
whose weight outweighs its images can be one matrix product.
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
"""Kernel elements up to which there is code of our own: each is a pointer at hand."""
GROUP = 64
"""Channels that one block adds up, as in `native/im2col.h`."""


def supported(op: Windows, dtype: DType) -> bool:
    """Whether there is code for windows of this size and type."""
    return dtype in (DType.float32, DType.float64) and product(op.kernel) <= LARGEST


def windows_of(op: Operator, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode | None:
    """The code of `im2col` whose windows lie one after the other; None leaves it to the library."""
    assert isinstance(op, Im2Col)
    (x,), (y,) = operands, results
    if not op.last or not supported(op, x.dtype):
        return None
    rows, columns = op.counts(x.shape)
    return _launch("gather", op, x, (rows, columns), simplify(x.shape[0] * rows), product(y.shape))


def sums_of(op: Operator, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode | None:
    """The code of `col2im` from windows that lie one after the other; None leaves it to the library."""
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
