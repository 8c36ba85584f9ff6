"""F(2x2, 3x3) of weights, and the gradient for weights in tiles: hand-written loop nests (`native/winograd_*.h`).

`codegen.library.matmul_epilogue` has the convolution itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from daceml_train.codegen.cpu.launch import KernelCode, groups
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.launch import launch_of
from daceml_train.errors import Refused
from daceml_train.ops.operator import Operator
from daceml_train.ops.packed import PANEL
from daceml_train.ops.winograd import WinogradFilter
from daceml_train.tensor import DType, product

AT_ONCE = 16
"""Filters of a column that are transformed at a time, as in `native/winograd_filter.h`."""


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
