"""Normalizations: layer, batch and group norm. Each returns the statistics that its gradient reads.

With x^ = (x - mean) rstd over n elements and h the cotangent of x^, the gradient for x is
rstd (h - mean(h) - x^ mean(h x^)) (Ioffe and Szegedy, "Batch Normalization", 2015, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Builder, Operator, Value, make
from daceml_train.ops.reduction import reduced, require_float, scalar, wide, wide_type
from daceml_train.tensor import Dim, DType, Shape, Tensor, product, same, same_shape, show_shape, simplify


def check_affine(label: str, weight_bias: Sequence[Tensor], shape: Sequence[Dim]) -> None:
    """Raise `Invalid` unless there are at most a weight and a bias, each of `shape`."""
    if len(weight_bias) > 2 or any(not same_shape(t.shape, shape) or not t.dtype.is_float for t in weight_bias):
        given = ", ".join(map(str, weight_bias))
        raise Invalid(f"{label} expects at most a weight and a bias of shape {show_shape(shape)}, given {given}")


def statistics(b: Builder, v: Value, dims: Sequence[int], eps: float) -> tuple[Value, Value, Value, Value]:
    """(centered, mean, rstd, biased variance) over `dims`, which are kept with size 1. Two passes."""
    mean = v.mean(dims, keepdim=True)
    centered = v - mean
    variance = centered.unary("square").mean(dims, keepdim=True)
    return centered, mean, (variance + eps).unary("rsqrt"), variance


def statistics_at_once(b: Builder, v: Value, dims: Sequence[int], eps: float) -> tuple[Value, Value, Value, Value]:
    """The same in one pass: sums of float32 values and of their squares, both in float64.

    Squares of float32 values are exact there, so the variance loses less than by centering with a float32 mean.
    """
    w = v.cast(DType.float64)
    mean = w.mean(dims, keepdim=True)
    spread = w.unary("square").mean(dims, keepdim=True) - mean.unary("square")
    variance = spread.unary("relu").cast(v.dtype)  # rounding may leave a constant channel below 0
    mean = mean.cast(v.dtype)
    return v - mean, mean, (variance + eps).unary("rsqrt"), variance


def affine(y: Value, weight_bias: Sequence[Value], shape: Sequence[Dim]) -> Value:
    """`y * weight + bias`, where given, each viewed as `shape`."""
    for value, kind in zip(weight_bias, ("mul", "add"), strict=False):
        (y,) = y.builder.emit(make(kind), y, value.cast(y.dtype).view(shape))
    return y


@dataclass(frozen=True)
class Normalized:
    """The operands of a normalization's gradient; statistics have size 1 in the reduced dimensions.

    `shape` is the one in which weight and bias broadcast against the normalized values.
    """

    x: Value
    mean: Value
    rstd: Value
    dims: tuple[int, ...]
    shape: Shape
    weight_bias: tuple[Value, ...]

    def gradients(
        self, b: Builder, g: Value | None, *, mean: Value | None, rstd: Value | None, variance: Value | None = None
    ) -> tuple[Value | None, tuple[Value | None, ...]]:
        """Cotangents of x and of (weight, bias), from those of the result and of the statistics."""
        x = wide(self.x)
        centered = x - self.mean
        normal = centered * self.rstd
        count = scalar(b, product(x.shape[d] for d in self.dims), x.dtype)
        parts: list[Value] = []
        affine_gradients: tuple[Value | None, ...] = (None,) * len(self.weight_bias)
        if g is not None:
            h = affine(g, self.weight_bias[:1], self.shape)
            average = h.mean(self.dims, keepdim=True)
            parts.append(self.rstd * (h - average - normal * (h * normal).mean(self.dims, keepdim=True)))
            affine_gradients = tuple(
                self.summed(term, parameter) for term, parameter in zip((g * normal, g), self.weight_bias, strict=False)
            )
        if mean is not None:
            parts.append((mean / count).expand(x.shape))
        if rstd is not None:  # d rstd = -rstd^3 / 2 d variance
            parts.append(-(rstd * self.rstd * self.rstd / count) * normal)
        if variance is not None:
            parts.append(variance * 2 / count * centered)
        total = None
        for part in parts:
            total = part if total is None else total + part
        return None if total is None else total.cast(self.x.dtype), affine_gradients

    def summed(self, term: Value, parameter: Value) -> Value:
        """`term` summed over the dimensions along which the parameter is broadcast."""
        lead = len(term.shape) - len(self.shape)
        dims = (*range(lead), *(d + lead for d, size in enumerate(self.shape) if same(size, 1)))
        return term.sum(dims).view(parameter.shape).cast(parameter.dtype) if dims else term.cast(parameter.dtype)


@dataclass(frozen=True)
class LayerNorm(Operator):
    """`(x - mean) * rstd * weight + bias` over the last `dims` dimensions; rstd = 1 / sqrt(biased variance + eps).

    Operands: x, then nothing, a weight, or a weight and a bias, of the sizes of the normalized dimensions.
    Results: y, mean and rstd; the last two have size 1 in the normalized dimensions and are float32 for 16-bit x.
    """

    name = "layer_norm"
    operands = ("x", "*weight_bias")
    results = ("y", "mean", "rstd")
    dims: int
    eps: float = 1e-5

    def axes(self, rank: int) -> tuple[int, ...]:
        """The normalized dimensions."""
        return tuple(range(rank - self.dims, rank))

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, *weight_bias = operands
        require_float(x, self.name)
        if not 1 <= self.dims <= x.rank:
            raise Invalid(f"layer_norm over the last {self.dims} dimensions expects at least as many, given {x}")
        check_affine(self.name, weight_bias, x.shape[x.rank - self.dims :])
        row = reduced(Tensor(x.shape, wide_type(x.dtype)), self.axes(x.rank), True, self.name)
        return x, row, row

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        x, *weight_bias = operands
        centered, mean, rstd, _ = statistics(b, wide(x), self.axes(len(x.shape)), self.eps)
        y = affine(centered * rstd, weight_bias, x.shape[len(x.shape) - self.dims :])
        return y.cast(x.dtype), mean, rstd

    def vjp(
        self,
        b: Builder,
        x: Value,
        weight_bias: tuple[Value, ...],
        mean: Value,
        rstd: Value,
        grad_y: Value | None,
        grad_mean: Value | None,
        grad_rstd: Value | None,
    ) -> tuple[Value | None, tuple[Value | None, ...]]:
        rank = len(x.shape)
        parts = Normalized(x, mean, rstd, self.axes(rank), x.shape[rank - self.dims :], weight_bias)
        return parts.gradients(b, None if grad_y is None else wide(grad_y), mean=grad_mean, rstd=grad_rstd)

    def flops(self, *operands: Tensor) -> Dim:
        x, *weight_bias = operands
        return simplify((5 + len(weight_bias)) * x.size)


@dataclass(frozen=True)
class BatchNorm(Operator):
    """Normalization of each channel (dimension 1) by the statistics of this batch: training mode.

    Operands: x [N, C, ...], then nothing, a weight, or a weight and a bias, [C] each.
    Results: y; mean, rstd = 1 / sqrt(variance + eps) and the biased variance, [C] each, float32 for 16-bit x.
    Running statistics are computed from these by `running_statistics`.
    """

    name = "batch_norm"
    operands = ("x", "*weight_bias")
    results = ("y", "mean", "rstd", "variance")
    eps: float = 1e-5
    at_once: bool = False
    """Whether sums and sums of squares are computed in one pass, where x is narrower than float64."""

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, *weight_bias = operands
        _check_channels(self.name, x, weight_bias)
        channel = Tensor(x.shape[1:2], wide_type(x.dtype))
        return x, channel, channel, channel

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        x, *weight_bias = operands
        compute = statistics_at_once if self.at_once and x.dtype is not DType.float64 else statistics
        centered, *rows = compute(b, wide(x), _all_but_channels(len(x.shape)), self.eps)
        y = affine(centered * rows[1], weight_bias, _per_channel(x.shape))
        return y.cast(x.dtype), *(row.view(x.shape[1:2]) for row in rows)

    def vjp(
        self,
        b: Builder,
        x: Value,
        weight_bias: tuple[Value, ...],
        mean: Value,
        rstd: Value,
        grad_y: Value | None,
        grad_mean: Value | None,
        grad_rstd: Value | None,
        grad_variance: Value | None,
    ) -> tuple[Value | None, tuple[Value | None, ...]]:
        row = _per_channel(x.shape)
        parts = Normalized(x, mean.view(row), rstd.view(row), _all_but_channels(len(x.shape)), row, weight_bias)
        gm, gr, gv = (None if g is None else g.view(row) for g in (grad_mean, grad_rstd, grad_variance))
        return parts.gradients(b, None if grad_y is None else wide(grad_y), mean=gm, rstd=gr, variance=gv)

    def flops(self, *operands: Tensor) -> Dim:
        x, *weight_bias = operands
        return simplify((5 + len(weight_bias)) * x.size)


def running_statistics(
    b: Builder, running_mean: Value, running_var: Value, mean: Value, variance: Value, momentum: float, count: Dim
) -> tuple[Value, Value]:
    """The next running mean and variance, as PyTorch's: `(1 - momentum) * running + momentum * batch`.

    `count` is the number of elements per channel; the running variance takes the unbiased variance of the batch.
    """
    unbiased = variance * scalar(b, count, variance.dtype) / scalar(b, count - 1, variance.dtype)
    pairs = ((running_mean, mean), (running_var, unbiased))
    first, second = (old * (1 - momentum) + new.cast(old.dtype) * momentum for old, new in pairs)
    return first, second


@dataclass(frozen=True)
class BatchNormInference(Operator):
    """Normalization of each channel (dimension 1) by given statistics.

    Operands: x [N, C, ...], mean and variance, then nothing, a weight, or a weight and a bias, [C] each. The given
    statistics get no gradient, as in PyTorch.
    """

    name = "batch_norm_inference"
    operands = ("x", "mean", "variance", "*weight_bias")
    eps: float = 1e-5

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, mean, variance, *weight_bias = operands
        _check_channels(self.name, x, weight_bias)
        check_affine(self.name, (mean, variance), x.shape[1:2])
        return (x,)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        x, mean, variance, *weight_bias = operands
        row = _per_channel(x.shape)
        normal, _ = self.normalized(x, mean, variance)
        return (affine(normal, weight_bias, row).cast(x.dtype),)

    def normalized(self, x: Value, mean: Value, variance: Value) -> tuple[Value, Value]:
        """((x - mean) * rstd, rstd)."""
        v, row = wide(x), _per_channel(x.shape)
        rstd = (variance.cast(v.dtype) + self.eps).unary("rsqrt").view(row)
        return (v - mean.cast(v.dtype).view(row)) * rstd, rstd

    def vjp(
        self, b: Builder, x: Value, mean: Value, variance: Value, weight_bias: tuple[Value, ...], grad_y: Value
    ) -> tuple[Value, None, None, tuple[Value, ...]]:
        g, row = wide(grad_y), _per_channel(x.shape)
        normal, rstd = self.normalized(x, mean, variance)
        parts = Normalized(x, mean, rstd, _all_but_channels(len(x.shape)), row, weight_bias)
        gx = affine(g, weight_bias[:1], row) * rstd
        terms = zip((g * normal, g), weight_bias, strict=False)
        return gx.cast(x.dtype), None, None, tuple(parts.summed(term, parameter) for term, parameter in terms)

    def flops(self, *operands: Tensor) -> Dim:
        x, _, _, *weight_bias = operands
        return simplify((2 + len(weight_bias)) * x.size + 6 * x.shape[1])


@dataclass(frozen=True)
class GroupNorm(Operator):
    """Normalization of each group of channels of each sample.

    Operands: x [N, C, ...], then nothing, a weight, or a weight and a bias, [C] each; `groups` divides C.
    Results: y; mean and rstd [N, groups], float32 for 16-bit x.
    """

    name = "group_norm"
    operands = ("x", "*weight_bias")
    results = ("y", "mean", "rstd")
    groups: int
    eps: float = 1e-5

    def grouped(self, shape: Shape) -> Shape:
        """[N, groups, C / groups, ...]."""
        return (shape[0], self.groups, simplify(shape[1] // self.groups), *shape[2:])

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, *weight_bias = operands
        _check_channels(self.name, x, weight_bias)
        if not same(x.shape[1], self.grouped(x.shape)[2] * self.groups):
            raise Invalid(f"group_norm of {self.groups} groups expects channels in whole groups, given {x}")
        row = Tensor((x.shape[0], self.groups), wide_type(x.dtype))
        return x, row, row

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        x, *weight_bias = operands
        v = wide(x).view(self.grouped(x.shape))
        centered, *rows, _ = statistics(b, v, tuple(range(2, len(v.shape))), self.eps)
        y = affine((centered * rows[1]).view(x.shape), weight_bias, _per_channel(x.shape))
        return y.cast(x.dtype), *(row.view((x.shape[0], self.groups)) for row in rows)

    def vjp(
        self,
        b: Builder,
        x: Value,
        weight_bias: tuple[Value, ...],
        mean: Value,
        rstd: Value,
        grad_y: Value | None,
        grad_mean: Value | None,
        grad_rstd: Value | None,
    ) -> tuple[Value | None, tuple[Value | None, ...]]:
        shape = self.grouped(x.shape)
        row = (*shape[:2], *(1 for _ in shape[2:]))
        channels = (1, *shape[1:3], *(1 for _ in shape[3:]))
        statistics_cotangents = (None if g is None else g.view(row) for g in (grad_mean, grad_rstd))
        gm, gr = statistics_cotangents
        dims = tuple(range(2, len(shape)))
        parts = Normalized(x.view(shape), mean.view(row), rstd.view(row), dims, channels, weight_bias)
        g = None if grad_y is None else wide(grad_y).view(shape)
        gx, parameters = parts.gradients(b, g, mean=gm, rstd=gr)
        return None if gx is None else gx.view(x.shape), parameters

    def flops(self, *operands: Tensor) -> Dim:
        x, *weight_bias = operands
        return simplify((5 + len(weight_bias)) * x.size)


def _check_channels(label: str, x: Tensor, weight_bias: Sequence[Tensor]) -> None:
    require_float(x, label)
    if x.rank < 2:
        raise Invalid(f"{label} expects [N, C, ...], given {x}")
    check_affine(label, weight_bias, x.shape[1:2])


def _all_but_channels(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank))


def _per_channel(shape: Shape) -> Shape:
    return (1, shape[1], *(1 for _ in shape[2:]))
