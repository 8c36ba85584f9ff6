"""F(2x2, 3x3) of weights, and the gradient for weights in tiles: hand-written loop nests (`native/winograd_*.h`).

`codegen.library.matmul_epilogue` has the convolution itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from daceml_train.codegen.cpu.launch import KernelCode, groups
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.launch import launch_of
from daceml_train.codegen.library.matmul_epilogue import WIDEST
from daceml_train.errors import Refused
from daceml_train.ops.operator import Operator
from daceml_train.ops.packed import PANEL
from daceml_train.ops.winograd import WinogradFilter, WinogradWeightGrad
from daceml_train.tensor import Dim, DType, Shape, Tensor, hint, product, same, simplify, symbol

AT_ONCE = 16
"""Filters of a column that are transformed at a time, as in `native/winograd_filter.h`."""
SIDE, CHUNK = 64, 96
"""Channels that a unit of work has, and tiles at a time, as in `native/winograd_gradient.h`."""
SUM = 16 * SIDE * SIDE
"""Elements of the sums of a unit."""
FEWEST, UNITS = 512, 64
"""Tiles that are worth a sum of their own, and units of work that are enough."""


def transformed_filters(op: Operator, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode:
    """The code of `winograd_filter`. Raises `Refused` for other types than float32."""
    assert isinstance(op, WinogradFilter)
    (w,), _ = operands, results
    if w.dtype is not DType.float32:
        raise Refused(f"winograd_filter is of f32, not of {w.dtype.short}")
    columns, rows = op.sides(w.shape)
    steps = w.strides[:2] if not op.input_gradient else w.strides[1::-1]
    elements = 1 + sum((n - 1) * s for n, s in zip(w.shape, w.strides, strict=True))
    numbers = (columns, rows, *steps, *w.strides[2:], int(op.input_gradient), elements)
    units = groups(columns, PANEL) * groups(rows, AT_ONCE)
    return launch_of("winograd_filter.h", "product::transform_filters", numbers, units, 28 * product(w.shape[:2]))


def weight_gradient(op: Operator, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode:
    """The code of `winograd_weight_grad`; its pointers are cotangent, images, result, scratch.

    Raises `Refused` for other types than float32, and for channels that are not adjacent or do not fill vectors.
    """
    assert isinstance(op, WinogradWeightGrad)
    (grad, x), (w,) = operands, results
    for images in operands:
        if images.dtype is not DType.float32:
            raise Refused(f"winograd_weight_grad is of f32, not of {images.dtype.short}")
        channels = images.shape[1]
        if not (isinstance(channels, int) and channels % WIDEST == 0 and same(images.strides[1], 1)):
            raise Refused(f"{channels} channels do not fill vectors, or are not adjacent")
    squares = groups(x.shape[1], SIDE) * groups(grad.shape[1], SIDE)
    rows, columns = grad.shape[2:]
    parts = split_count(hint(tiles_of(grad.shape)), squares)
    steps = (strides[d] for strides in (x.strides, grad.strides) for d in (0, 2, 3))
    held = 4 * (SUM + SIDE + 2 * 16 * CHUNK * (SIDE + WIDEST))
    sizes = (x.shape[0], x.shape[1], *x.shape[2:], grad.shape[1], rows, columns, *op.padding, parts)
    work = simplify(op.flops(*(Tensor(o.shape, o.dtype) for o in operands)))
    scratch = [held * symbol("blocks")] + [4 * SUM * squares * parts] * (parts > 1)
    call, units = "product::weight_gradient", squares * parts
    return launch_of("winograd_gradient.h", call, (held, *sizes, *steps, *w.strides), units, work, scratch)


def split_count(tiles: float, squares: int) -> int:
    """How many sums there are over parts of the tiles: as many units of work as many cores have use for."""
    return max(1, min(int(tiles // FEWEST), -(-UNITS // squares)))


def tiles_of(images: Shape) -> Dim:
    """The number of tiles of 2x2 pixels in images [N, C, H, W]."""
    n, _, height, width = images
    return simplify(n * groups(height, 2) * groups(width, 2))
