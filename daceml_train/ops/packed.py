"""Matmuls and convolutions with a matrix that was packed in advance into panels of 32 columns.

They occur only inside kernels, where elementwise operators form their epilogue while the result is in cache. Passes
emit them for weights that do not change from call to call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.ops.convolution import Convolution
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.movement import Pad, Reorder
from daceml_train.ops.operator import Array, Operator, Value
from daceml_train.tensor import Dim, Tensor, channels_last, product, same_shape, simplify

PANEL = 32
"""Columns of a panel."""


def packed(matrix: Value) -> Value:
    """The matrix [K, N] as panels [ceil(N / 32), K, 32], zero-padded after its last column; N is a number."""
    depth, columns = matrix.shape
    assert isinstance(columns, int)
    missing = -columns % PANEL
    if missing:
        matrix = matrix.apply(Pad(pads=((0, 0), (0, missing))))
    panels = matrix.view((depth, (columns + missing) // PANEL, PANEL)).permute((1, 0, 2))
    return panels.apply(Reorder((0, 1, 2)))


def packed_filter(weight: Value) -> Value:
    """A convolution's weight [K, C, H, W] as panels of the matrix [H W C, K]."""
    rows = weight.permute((2, 3, 1, 0))
    return packed(rows.view((product(rows.shape[:3]), rows.shape[3])))


def packed_filters(weight: Value) -> Value:
    """The weight [C, 1, H, W] of a depthwise convolution as [H W, C]."""
    rows = weight.permute((2, 3, 1, 0))
    return rows.view((product(rows.shape[:3]), rows.shape[3])).apply(Reorder((0, 1)))


@dataclass(frozen=True, kw_only=True)
class Packed(Operator):
    """Common base of both: `columns` counts the matrix's own columns, without the padding of the last panel."""

    columns: int

    def check(self, x: Tensor, panels: Tensor, depth: Dim) -> None:
        """Raise `Invalid` unless the panels are those of a float32 matrix with this number of rows."""
        wanted = (-(-self.columns // PANEL), depth, PANEL)
        if not same_shape(panels.shape, wanted) or x.dtype is not panels.dtype or not x.dtype.is_float:
            raise Invalid(f"{self.label} of {self.columns} columns expects panels {wanted}, given {x} and {panels}")

    def matrix(self, panels: Array) -> Array:
        """The matrix [K, N] that the panels store."""
        return np.moveaxis(panels, 0, 1).reshape(panels.shape[1], -1)[:, : self.columns]


@dataclass(frozen=True, kw_only=True)
class PackedMatmul(Packed):
    """`a @ b` for a [M, K] and b [K, N], which is stored in panels [P, K, 32]."""

    name = "packed_matmul"
    operands = ("a", "panels")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        a, panels = operands
        if a.rank != 2:
            raise Invalid(f"packed_matmul expects a matrix, given {a}")
        self.check(a, panels, a.shape[1])
        return (Tensor((a.shape[0], self.columns), a.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        a, panels = operands
        return (np.matmul(a, self.matrix(panels)),)

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(2 * operands[0].size * self.columns)


@dataclass(frozen=True, kw_only=True)
class Images(Packed):
    """Common base of convolutions of images: the window; the result is channels-last."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    groups: ClassVar[bool] = False

    @property
    def plain(self) -> Convolution:
        """The convolution with a weight in the user's layout."""
        count = self.columns if self.groups else 1
        dilation: tuple[int, int] = getattr(self, "dilation", (1, 1))
        return Convolution(
            stride=self.stride, padding=self.padding, dilation=dilation, output_padding=(0, 0), groups=count
        )

    def result(self, x: Tensor) -> Tensor:
        """The type of the result."""
        if x.rank != 4:
            raise Invalid(f"{self.label} expects images [N, C, H, W], given {x}")
        channels = 1 if self.groups else x.shape[1]
        y = self.plain.output(x, Tensor((self.columns, channels, *self.kernel), x.dtype))
        return Tensor(y.shape, y.dtype, channels_last(4))

    def flops(self, *operands: Tensor) -> Dim:
        channels = 1 if self.groups else operands[0].shape[1]
        return simplify(2 * self.result(operands[0]).size * product(self.kernel) * channels)


@dataclass(frozen=True, kw_only=True)
class PackedConvolution(Images):
    """The convolution of images [N, C, H, W] with a weight in panels, each column its elements in the order H, W, C.

    With `tiled`, it is computed in tiles of 2x2 results from the output of `winograd_filter` for a 3x3 weight:
    F(2x2, 3x3) of https://arxiv.org/abs/1509.09308.
    """

    name = "packed_convolution"
    operands = ("x", "panels")
    dilation: tuple[int, int]
    tiled: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, panels = operands
        y = self.result(x)
        three = (self.kernel, self.stride, self.dilation) == ((3, 3), (1, 1), (1, 1))
        if self.tiled and not three:
            raise Invalid(f"packed_convolution in tiles expects windows of 3x3, each once, given {self}")
        self.check(x, panels, simplify((16 if self.tiled else product(self.kernel)) * x.shape[1]))
        return (y,)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        x, panels = operands
        rows = self.matrix(panels)
        if self.tiled:  # elements (0, 0), (0, 3), ... of G w G^T, and sums and differences of those in between
            back = np.array([[1, 0, 0, 0], [0, 1, -1, 0], [0, 0, 0, 1]])
            tiles = rows.reshape(4, 4, -1)
            rows = np.einsum("ai,bj,ijn->abn", back, back, tiles)
        weight = rows.reshape(*self.kernel, x.shape[1], self.columns)
        return self.plain.evaluate(x, weight.transpose(3, 2, 0, 1))


@dataclass(frozen=True, kw_only=True)
class PackedDepthwise(Images):
    """A depthwise convolution, whose weight is stored as [H W, C]."""

    name = "packed_depthwise"
    operands = ("x", "weight")
    groups = True

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, weight = operands
        y = self.result(x)
        wanted = (product(self.kernel), self.columns)
        if not same_shape(weight.shape, wanted) or weight.dtype is not x.dtype:
            raise Invalid(f"packed_depthwise expects a weight {wanted} of {x.dtype.short}, given {weight}")
        return (y,)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        x, weight = operands
        return self.plain.evaluate(x, weight.reshape(*self.kernel, 1, self.columns).transpose(3, 2, 0, 1))


def has_product(op: Operator) -> bool:
    """Whether an operator is a packed matmul or convolution, or a kernel around one. Its result is dense."""
    statements = op.statements if isinstance(op, Kernel) else ()
    return isinstance(op, Packed) or any(isinstance(s.op, Packed) for s in statements)
