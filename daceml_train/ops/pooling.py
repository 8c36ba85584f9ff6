"""Two-dimensional pooling over the last two dimensions of x [N, C, H, W] or [C, H, W], and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.convolution import spatial_size
from daceml_train.ops.fallback import Aten, Operand
from daceml_train.ops.operator import Array, Builder, Operator, Value
from daceml_train.tensor import Dim, DType, Shape, Tensor, product, same_shape, show_shape, simplify


def _torch(*arrays: Array) -> tuple[Any, ...]:
    import torch

    return tuple(torch.as_tensor(a.copy()) for a in arrays)


@dataclass(frozen=True, kw_only=True)
class Window(Operator):
    """Common base of the four operators; pairs are (height, width)."""

    vendor = True
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    ceil_mode: bool = False

    def pooled(self, x: Tensor, dilation: tuple[int, int] = (1, 1)) -> Tensor:
        """The type of the pooled `x`: with `ceil_mode`, the last window may extend beyond the end but starts inside."""
        if x.rank not in (3, 4):
            raise Invalid(f"{self.label} expects [N, C, H, W] or [C, H, W], given {x}")
        if any(2 * p > k for p, k in zip(self.padding, self.kernel, strict=True)):
            raise Invalid(f"{self.label} expects a padding of at most half the kernel, given {self}")
        sizes: list[Dim] = []
        for size, k, s, p, d in zip(x.shape[-2:], self.kernel, self.stride, self.padding, dilation, strict=True):
            count = spatial_size(size, k, s, p, d)
            if self.ceil_mode and s > 1:
                if not isinstance(size, int) or not isinstance(count, int):
                    raise Unsupported(f"{self.label} with ceil_mode on the symbolic size {size}")
                fits = (count - 1) * s + d * (k - 1) + 1 == size + 2 * p
                count += not fits and count * s < size + p
            if isinstance(count, int) and count < 1:
                raise Invalid(f"{self.label} expects an input of at least one window, given {x} for {self}")
            sizes.append(count)
        return Tensor((*x.shape[:-2], *sizes), x.dtype, x.order)


@dataclass(frozen=True, kw_only=True)
class MaxPool2d(Window):
    """The largest element of each window, and its int64 index in the H * W plane; NaN is largest."""

    name = "max_pool2d"
    results = ("y", "indices")
    dilation: tuple[int, int] = (1, 1)

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        y = self.pooled(operands[0], self.dilation)
        return y, Tensor(y.shape, DType.int64, y.order)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        (x,) = _torch(*operands)
        y, indices = torch.ops.aten.max_pool2d_with_indices(
            x, self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode
        )
        return y.numpy(), indices.numpy()

    def vjp(self, b: Builder, x: Value, indices: Value, grad_y: Value) -> Value:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return grad_y.apply(MaxPool2dGrad(input_shape=x.shape, **fields), indices)

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(product(self.kernel) * self.infer(*operands)[0].size)


@dataclass(frozen=True, kw_only=True)
class MaxPool2dGrad(Window):
    """The gradient of `max_pool2d` for its x of `input_shape`: cotangents are added to the elements at the indices.

    ATen's call also requires x, as a tensor of arbitrary content.
    """

    name = "max_pool2d_grad"
    operands = ("grad", "indices")
    dilation: tuple[int, int] = (1, 1)
    input_shape: Shape

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        grad, indices = operands
        x = Tensor(self.input_shape, grad.dtype, grad.order)
        shape = self.pooled(x, self.dilation).shape
        if not same_shape(grad.shape, shape) or not same_shape(indices.shape, shape):
            raise Invalid(f"max_pool2d_grad expects {show_shape(shape)} for grad and indices, given {grad}, {indices}")
        return (x,)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        grad, indices = _torch(*operands)
        x = torch.empty(tuple(int(s) for s in self.input_shape), dtype=grad.dtype)
        gx = torch.ops.aten.max_pool2d_with_indices_backward(
            grad, x, self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode, indices
        )
        return (gx.numpy(),)

    def vjp(self, b: Builder, indices: Value, grad_y: Value) -> tuple[Value, None]:
        outer = indices.shape[:-2]
        flat, places = (v.view((*outer, product(v.shape[-2:]))) for v in (grad_y, indices))
        gather = Aten(
            target="aten.gather.default",
            arguments=(Operand(0), len(outer), Operand(1)),
            types=(Tensor(places.shape, grad_y.dtype),),
        )
        return flat.apply(gather, places).view(indices.shape), None

    def flops(self, *operands: Tensor) -> Dim:
        return operands[0].size


@dataclass(frozen=True, kw_only=True)
class AvgPool2d(Window):
    """The mean of each window, by `divisor`, or by its size, which counts padding if `count_include_pad`."""

    name = "avg_pool2d"
    count_include_pad: bool = True
    divisor: int | None = None

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return (self.pooled(operands[0]),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        (x,) = _torch(*operands)
        y = torch.ops.aten.avg_pool2d(
            x, self.kernel, self.stride, self.padding, self.ceil_mode, self.count_include_pad, self.divisor
        )
        return (y.numpy(),)

    def vjp(self, b: Builder, x: Value, grad_y: Value) -> Value:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return grad_y.apply(AvgPool2dGrad(input_shape=x.shape, **fields))

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((product(self.kernel) + 1) * self.infer(*operands)[0].size)


@dataclass(frozen=True, kw_only=True)
class AvgPool2dGrad(Window):
    """The gradient of `avg_pool2d` for its x of `input_shape`; ATen's call requires x with arbitrary content."""

    name = "avg_pool2d_grad"
    operands = ("grad",)
    count_include_pad: bool = True
    divisor: int | None = None
    input_shape: Shape

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (grad,) = operands
        x = Tensor(self.input_shape, grad.dtype, grad.order)
        if not same_shape(grad.shape, self.pooled(x).shape):
            raise Invalid(f"avg_pool2d_grad expects a cotangent {show_shape(self.pooled(x).shape)}, given {grad}")
        return (x,)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        (grad,) = _torch(*operands)
        x = torch.empty(tuple(int(s) for s in self.input_shape), dtype=grad.dtype)
        gx = torch.ops.aten.avg_pool2d_backward(
            grad, x, self.kernel, self.stride, self.padding, self.ceil_mode, self.count_include_pad, self.divisor
        )
        return (gx.numpy(),)

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "input_shape"}
        return grad_y.apply(AvgPool2d(**fields))

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((product(self.kernel) + 1) * operands[0].size)
