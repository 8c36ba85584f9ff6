"""Convolutions over any number of spatial dimensions, and the two halves of their gradient.

All three are one trilinear form <grad, convolution(x, w)>, so each is the derivative of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Array, Builder, Operator, Value
from daceml_train.tensor import (
    Dim,
    DType,
    Shape,
    Tensor,
    channels_last,
    product,
    same,
    same_memory,
    same_shape,
    show_shape,
    simplify,
)


def spatial_size(size: Dim, kernel: Dim, stride: int, padding: Dim, dilation: int) -> Dim:
    """The number of windows: `floor((size + 2 padding - dilation (kernel - 1) - 1) / stride) + 1`."""
    room = simplify(size + 2 * padding - dilation * (kernel - 1) - 1)
    return room // stride + 1 if isinstance(room, int) else simplify(sympy.floor(room / stride) + 1)


LIBRARY_TYPES = (DType.float32, DType.bfloat16, DType.float16)
"""Element types that oneDNN's convolutions support; others run in ATen's own loops."""


@dataclass(frozen=True, kw_only=True)
class Geometry(Operator):
    """Common base of the three operators; tuples have one entry per spatial dimension."""

    vendor = True
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...]
    groups: int = 1

    @property
    def common(self) -> dict[str, Any]:
        """The shared fields, for building the other operators."""
        names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
        return {name: getattr(self, name) for name in names}

    def output(self, x: Tensor, w: Tensor) -> Tensor:
        """The type of `convolution(x, w)`. Raises `Invalid` where they do not fit."""
        spatial = len(self.stride)
        if not x.rank == w.rank == spatial + 2 or len({*map(len, (self.stride, self.padding, self.dilation))}) != 1:
            raise Invalid(
                f"{self.label} expects x and w of rank {spatial + 2} and {spatial} entries each, given {x}, {w}, {self}"
            )
        if not all(s >= 1 for s in (*self.stride, *self.dilation, self.groups)) or min((*self.padding, 0)) < 0:
            raise Invalid(f"{self.label} expects stride, dilation, groups >= 1 and padding >= 0, given {self}")
        if x.dtype is not w.dtype:
            raise Invalid(f"{self.label} expects one element type, given {x} and {w}")
        into, out = (
            (w.shape[0], w.shape[1] * self.groups) if self.transposed else (w.shape[1] * self.groups, w.shape[0])
        )
        if not same(x.shape[1], into):
            raise Invalid(f"{self.label} with weight {w} and {self.groups} groups expects {into} channels, given {x}")
        sizes: list[Dim] = []
        for d in range(spatial):
            size, kernel, s, p, dil = x.shape[d + 2], w.shape[d + 2], self.stride[d], self.padding[d], self.dilation[d]
            if self.transposed:
                sizes.append(simplify((size - 1) * s - 2 * p + dil * (kernel - 1) + self.output_padding[d] + 1))
            else:
                sizes.append(spatial_size(size, kernel, s, p, dil))
        if any(isinstance(s, int) and s < 0 for s in sizes):
            raise Invalid(f"{self.label} expects windows that fit, given {x} and {w}: sizes {show_shape(sizes)}")
        order = channels_last(x.rank) if channels_last(x.rank) in (x.order, w.order) else None
        return Tensor((x.shape[0], simplify(out), *sizes), x.dtype, order)

    def multiply_adds(self, x: Tensor, w: Tensor) -> Dim:
        """Twice the number of multiplications."""
        side = x.size if self.transposed else self.output(x, w).size
        return simplify(2 * side * product(w.shape[1:]))

    def reorders(self, *operands: Tensor) -> Dim:
        """The bytes that oneDNN moves: row-major arrays are each reordered into its blocked layout or back; for
        channels-last arrays only the weight is, after a channels-last copy unless it is channels-last already.

        Source: `aten/src/ATen/native/mkldnn/Conv.cpp` (formats `any` or `nhwc`), and the layouts that oneDNN's
        convolutions take, https://uxlfoundation.github.io/oneDNN/dev_guide_convolution.html.
        """
        results = self.infer(*operands)
        arrays = [t for t in (*operands, *results) if t.rank == len(self.stride) + 2]
        if any(t.dtype not in LIBRARY_TYPES for t in arrays):
            return 0
        last = channels_last(arrays[0].rank)
        if last not in (t.order for t in arrays):
            return simplify(sum((2 * t.bytes for t in arrays), start=0))
        weight = results[0] if isinstance(self, ConvolutionWeightGrad) else operands[1]
        moved = isinstance(self, ConvolutionWeightGrad) or not same_memory(weight.shape, weight.order, last)
        again = moved and not same_memory(weight.shape, None, last)
        return simplify((4 if again else 2) * weight.bytes)

    def cudnn_reorders(self, *operands: Tensor) -> Dim:
        """The bytes that cuDNN moves: its kernels for matmul units read and write channels-last arrays, so others are
        each converted before or after.

        Source: NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts".
        """
        arrays = [t for t in (*operands, *self.infer(*operands)) if t.rank == len(self.stride) + 2]
        wrong = [t for t in arrays if not same_memory(t.shape, t.order, channels_last(t.rank))]
        return simplify(sum((2 * t.bytes for t in wrong), start=0))

    def gradient(self, grad: Array, x: Any, w: Any, want: int) -> Array:
        """ATen's gradient of the convolution for x (0) or w (1); the array that is not read is passed as a shape."""
        import torch

        g, x, w = (torch.empty(a).double() if isinstance(a, tuple) else torch.as_tensor(a.copy()) for a in (grad, x, w))
        mask = [want == 0, want == 1, False]
        result = torch.ops.aten.convolution_backward(
            g,
            x,
            w,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            mask,
        )
        return result[want].numpy()  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Convolution(Geometry):
    """Cross-correlation of x [N, C, *sizes] with w [K, C/groups, *kernel] plus bias [K], as ATen's `convolution`.

    Transposed, w is [C, K/groups, *kernel].
    """

    name = "convolution"
    operands = ("x", "w", "*bias")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, w, *bias = operands
        y = self.output(x, w)
        if len(bias) > 1 or any(not same_shape(t.shape, y.shape[1:2]) or t.dtype is not x.dtype for t in bias):
            raise Invalid(f"convolution expects one bias [{y.shape[1]}] of type {x.dtype.short}, given {bias}")
        return (y,)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        x, w, *bias = (torch.as_tensor(a.copy()) for a in operands)
        y = torch.ops.aten.convolution(
            x,
            w,
            bias[0] if bias else None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )
        return (y.numpy(),)

    def vjp(
        self, b: Builder, x: Value, w: Value, bias: tuple[Value, ...], grad_y: Value
    ) -> tuple[Value, Value, tuple[Value, ...]]:
        gx = grad_y.apply(ConvolutionInputGrad(input_shape=x.shape, **self.common), w)
        gw = grad_y.apply(ConvolutionWeightGrad(weight_shape=w.shape, **self.common), x)
        return gx, gw, tuple(grad_y.sum((0, *range(2, len(x.shape)))) for _ in bias)

    def flops(self, *operands: Tensor) -> Dim:
        x, w, *bias = operands
        return simplify(self.multiply_adds(x, w) + len(bias) * self.output(x, w).size)


@dataclass(frozen=True, kw_only=True)
class ConvolutionInputGrad(Geometry):
    """The gradient of a convolution for its x of `input_shape`, from the cotangent `grad` and the weight."""

    name = "convolution_input_grad"
    operands = ("grad", "w")
    input_shape: Shape

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        grad, w = operands
        x = Tensor(self.input_shape, grad.dtype, grad.order)
        _check_grad(self, grad, self.output(x, w))
        return (
            Tensor(x.shape, x.dtype, channels_last(x.rank) if channels_last(x.rank) in (x.order, w.order) else None),
        )

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        grad, w = operands
        return (self.gradient(grad, self.input_shape, w, 0),)

    def vjp(self, b: Builder, grad: Value, w: Value, grad_y: Value) -> tuple[Value, Value]:
        ggrad = grad_y.apply(Convolution(**self.common), w)
        return ggrad, grad.apply(ConvolutionWeightGrad(weight_shape=w.shape, **self.common), grad_y)

    def flops(self, *operands: Tensor) -> Dim:
        return self.multiply_adds(Tensor(self.input_shape, operands[0].dtype), operands[1])


@dataclass(frozen=True, kw_only=True)
class ConvolutionWeightGrad(Geometry):
    """The gradient of a convolution for its weight of `weight_shape`, from the cotangent `grad` and x."""

    name = "convolution_weight_grad"
    operands = ("grad", "x")
    weight_shape: Shape

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        grad, x = operands
        w = Tensor(self.weight_shape, grad.dtype)
        _check_grad(self, grad, self.output(x, w))
        order = channels_last(w.rank) if channels_last(w.rank) in (grad.order, x.order) else None
        return (Tensor(w.shape, w.dtype, order),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        grad, x = operands
        return (self.gradient(grad, x, self.weight_shape, 1),)

    def vjp(self, b: Builder, grad: Value, x: Value, grad_y: Value) -> tuple[Value, Value]:
        ggrad = x.apply(Convolution(**self.common), grad_y)
        return ggrad, grad.apply(ConvolutionInputGrad(input_shape=x.shape, **self.common), grad_y)

    def flops(self, *operands: Tensor) -> Dim:
        return self.multiply_adds(operands[1], Tensor(self.weight_shape, operands[0].dtype))


def _check_grad(op: Operator, grad: Tensor, y: Tensor) -> None:
    if not same_shape(grad.shape, y.shape):
        raise Invalid(f"{op.label} expects a cotangent {show_shape(y.shape)}, given {grad}")
