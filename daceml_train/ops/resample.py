"""Linear operators over windows and between grids, each with its adjoint as another: unfolded windows, resampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.convolution import spatial_size
from daceml_train.ops.operator import Array, Builder, Operator, Value
from daceml_train.tensor import Dim, Shape, Tensor, channels_last, product, same_shape, show_shape, simplify

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Windows(Operator):
    """Common base of `im2col` and `col2im`; pairs are (height, width).

    With `last`, images have a batch dimension and are channels-last, and columns are stored one after the other, each
    dense: the layout of a matrix with a row per window. Passes emit this form, for which the CPU has its own kernels.
    """

    vendor = True
    kernel: Pair
    dilation: Pair = (1, 1)
    padding: Pair = (0, 0)
    stride: Pair = (1, 1)
    last: bool = False

    @property
    def geometry(self) -> tuple[Pair, Pair, Pair, Pair]:
        """Kernel, dilation, padding and stride, as PyTorch's calls order them."""
        return self.kernel, self.dilation, self.padding, self.stride

    @property
    def common(self) -> dict[str, Any]:
        """The shared fields but the layout, for building the adjoint."""
        return {"kernel": self.kernel, "dilation": self.dilation, "padding": self.padding, "stride": self.stride}

    def unfolded(self, x: Shape) -> Shape:
        """The sizes of the windows of an image [..., C, H, W]: [..., C * kernel, windows]."""
        return (*x[:-3], simplify(x[-3] * product(self.kernel)), product(self.counts(x)))

    def counts(self, x: Shape) -> tuple[Dim, Dim]:
        """The number of windows of an image [..., H, W], vertically and horizontally."""
        (h, w), *options = x[-2:], self.kernel, self.stride, self.padding, self.dilation
        rows, columns = ([option[d] for option in options] for d in (0, 1))
        return spatial_size(h, *rows), spatial_size(w, *columns)

    def ranks(self, *ranks: int) -> tuple[int, ...]:
        """The ranks that an operand may have: with `last`, only the one with a batch."""
        return ranks[-1:] if self.last else ranks


@dataclass(frozen=True, kw_only=True)
class Im2Col(Windows):
    """The windows of images x [N, C, H, W] or [C, H, W] as columns [N, C * kernel, windows]."""

    name = "im2col"

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        if x.rank not in self.ranks(3, 4):
            raise Invalid(f"im2col expects [N, C, H, W]{'' if self.last else ' or [C, H, W]'}, given {x}")
        return (Tensor(self.unfolded(x.shape), x.dtype, (0, 2, 1) if self.last else None),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        return (torch.ops.aten.im2col(torch.as_tensor(operands[0].copy()), *self.geometry).numpy(),)

    def vjp(self, b: Builder, x: Value, grad_y: Value) -> Value:
        return grad_y.apply(Col2Im(size=tuple(x.shape[-2:]), **self.common))

    def flops(self, *operands: Tensor) -> Dim:
        return 0


@dataclass(frozen=True, kw_only=True)
class Col2Im(Windows):
    """Columns [N, C * kernel, windows] added up at their positions in images [N, C, *size]."""

    name = "col2im"
    size: tuple[Dim, Dim]

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (x,) = operands
        channels = simplify(x.shape[-2] // product(self.kernel)) if isinstance(x.shape[-2], int) else None
        if x.rank not in self.ranks(2, 3) or channels is None:
            raise Invalid(f"col2im expects columns [N, C * {product(self.kernel)}, windows], given {x}")
        y = (*x.shape[:-2], channels, *self.size)
        if not same_shape(self.unfolded(y), x.shape):
            raise Invalid(f"col2im to {show_shape(y)} expects {show_shape(self.unfolded(y))}, given {x}")
        return (Tensor(y, x.dtype, channels_last(4) if self.last else None),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        size = [int(s) for s in self.size]
        return (torch.ops.aten.col2im(torch.as_tensor(operands[0].copy()), size, *self.geometry).numpy(),)

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(Im2Col(**self.common))

    def flops(self, *operands: Tensor) -> Dim:
        return operands[0].size


MODES = {
    "nearest": ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    "nearest_exact": ("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    "linear": ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
    "cubic": (None, "upsample_bicubic2d", None),
    "linear_smooth": (None, "_upsample_bilinear2d_aa", None),
    "cubic_smooth": (None, "_upsample_bicubic2d_aa", None),
}
"""Mode -> PyTorch's operator for one, two and three spatial dimensions; `smooth` ones are antialiased."""


@dataclass(frozen=True)
class Resampling(Operator):
    """Common base of `resample` and its adjoint.

    `source` and `target` are the spatial sizes of the two grids, `scales` the user's ratio of target to source per
    dimension, or None. `corners`: the corner elements' centres coincide rather than the edges.
    """

    vendor = True
    mode: str
    source: Shape
    target: Shape
    scales: tuple[float | None, ...]
    corners: bool = False

    @property
    def call(self) -> str:
        """PyTorch's operator for this mode and number of dimensions."""
        name = MODES[self.mode][len(self.source) - 1] if 1 <= len(self.source) <= 3 else None
        if name is None:
            raise Unsupported(f"resampling of {len(self.source)} dimensions by mode {self.mode}")
        return name

    @property
    def options(self) -> tuple[Any, ...]:
        """The last arguments of PyTorch's call."""
        return self.scales if self.mode.startswith("nearest") else (self.corners, *self.scales)

    def between(self, x: Tensor, given: Shape, results: Shape) -> tuple[Tensor, ...]:
        """The type of the result on the grid `made` for an operand on the grid `given`."""
        if x.rank != len(given) + 2 or not same_shape(x.shape[2:], given):
            raise Invalid(f"{self.label} expects [N, C] and {show_shape(given)}, given {x}")
        return (Tensor((*x.shape[:2], *results), x.dtype, x.order),)


@dataclass(frozen=True)
class Resample(Resampling):
    """Images x [N, C, *source] on the grid `target`."""

    name = "resample"

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return self.between(operands[0], self.source, self.target)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        run = getattr(torch.ops.aten, self.call)
        return (run(torch.as_tensor(operands[0].copy()), [int(s) for s in self.target], *self.options).numpy(),)

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(ResampleGrad(self.mode, self.source, self.target, self.scales, self.corners))

    def flops(self, *operands: Tensor) -> Dim:
        return 2 ** len(self.source) * self.infer(*operands)[0].size


@dataclass(frozen=True)
class ResampleGrad(Resampling):
    """The adjoint of `resample`: from the grid `target` to the grid `source`."""

    name = "resample_grad"

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return self.between(operands[0], self.target, self.source)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        (g,) = operands
        run = getattr(torch.ops.aten, f"{self.call}_backward")
        shape = [*g.shape[:2], *(int(s) for s in self.source)]
        result = run(torch.as_tensor(g.copy()), [int(s) for s in self.target], shape, *self.options)
        return (result.numpy(),)

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        return grad_y.apply(Resample(self.mode, self.source, self.target, self.scales, self.corners))

    def flops(self, *operands: Tensor) -> Dim:
        return 2 ** len(self.source) * operands[0].size
