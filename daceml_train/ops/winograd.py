"""F(2x2, 3x3): 3x3 convolutions in tiles of 2x2 results, with 16 multiplications instead of 36.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016, https://arxiv.org/abs/1509.09308. A tile d of
4x4 pixels, a filter g, and a tile y of results: `y = A^T ((G g G^T) * (B^T d B)) A`, so 16 matmuls over all tiles. The
gradient for the filter is the adjoint: `G^T ((A y A^T) * (B^T d B)) G`. `ops.packed` has the convolution itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.ops.convolution import Convolution, ConvolutionWeightGrad
from daceml_train.ops.operator import Array, Operator
from daceml_train.ops.packed import PANEL
from daceml_train.tensor import Dim, Shape, Tensor, same_shape, show_shape, simplify

G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


@dataclass(frozen=True, kw_only=True)
class WinogradFilter(Operator):
    """`G w G^T` of a weight [K, C, 3, 3], as panels [ceil(K / 32), 16 C, 32] of the 16 matrices [C, K].

    With `input_gradient`, the filters are those of the gradient for the images, itself a convolution: turned by 180
    degrees, with C and K exchanged.
    """

    name = "winograd_filter"
    operands = ("w",)
    vendor = True
    input_gradient: bool = False

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (w,) = operands
        known = w.rank == 4 and all(isinstance(n, int) and n > 0 for n in w.shape)
        if not known or not same_shape(w.shape[2:], (3, 3)) or not w.dtype.is_float:
            raise Invalid(f"winograd_filter expects a weight [K, C, 3, 3] of known sizes, given {w}")
        columns, rows = self.sides(w.shape)
        return (Tensor((-(-columns // PANEL), 16 * rows, PANEL), w.dtype),)

    def sides(self, weight: Shape) -> tuple[int, int]:
        """Columns and rows of the 16 matrices."""
        columns, rows = weight[:2] if not self.input_gradient else weight[1::-1]
        assert isinstance(columns, int)
        assert isinstance(rows, int)
        return columns, rows

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        (w,) = operands
        if self.input_gradient:
            w = w[:, :, ::-1, ::-1].transpose(1, 0, 2, 3)
        matrix = np.einsum("ai,bj,kcij->abck", G.astype(w.dtype), G.astype(w.dtype), w).reshape(-1, w.shape[0])
        matrix = np.pad(matrix, ((0, 0), (0, -w.shape[0] % PANEL)))
        panels = matrix.reshape(len(matrix), -1, PANEL)
        return (np.ascontiguousarray(np.moveaxis(panels, 1, 0)),)

    def flops(self, *operands: Tensor) -> Dim:
        (w,) = operands
        return simplify(28 * w.shape[0] * w.shape[1])


@dataclass(frozen=True, kw_only=True)
class WinogradWeightGrad(Operator):
    """The gradient of a 3x3 convolution with stride 1 for its weight, from the cotangent `grad` and x, in tiles."""

    name = "winograd_weight_grad"
    operands = ("grad", "x")
    vendor = True
    padding: tuple[int, int]

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        grad, x = operands
        if grad.rank != 4 or x.rank != 4 or grad.dtype is not x.dtype:
            raise Invalid(f"winograd_weight_grad expects images [N, C, H, W], given {grad} and {x}")
        w = Tensor((grad.shape[1], x.shape[1], 3, 3), x.dtype)
        if not same_shape(self.plain(w.shape).output(x, w).shape, grad.shape):
            raise Invalid(f"winograd_weight_grad of {x} with padding {self.padding} given {show_shape(grad.shape)}")
        return (w,)

    def plain(self, weight: Shape) -> ConvolutionWeightGrad:
        """The operator that computes the same directly."""
        return ConvolutionWeightGrad(weight_shape=weight, **_window(self.padding).common)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        grad, x = operands
        return self.plain((grad.shape[1], x.shape[1], 3, 3)).evaluate(grad, x)

    def flops(self, *operands: Tensor) -> Dim:
        grad, x = operands
        return self.plain((grad.shape[1], x.shape[1], 3, 3)).flops(grad, x)


def _window(padding: tuple[int, int]) -> Convolution:
    """The convolution with windows of 3x3, each once."""
    return Convolution(stride=(1, 1), padding=padding, dilation=(1, 1), output_padding=(0, 0))
