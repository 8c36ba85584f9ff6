"""Normalization and dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.frontends.onnx.host import Host, integer
from daceml_train.frontends.onnx.rules import rule


@rule("BatchNormalization", since=14)
def batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    outputs: int,
    training: bool,
) -> Tensor | tuple[Tensor, ...]:
    """ONNX's `momentum` is the weight of the old statistics, PyTorch's that of the new ones."""
    if training_mode:
        dims = (0, *range(2, x.dim()))
        y = F.batch_norm(x, None, None, scale, bias, True, 0.0, epsilon)
        kept = mean * momentum + x.mean(dims) * (1 - momentum)
        spread = variance * momentum + x.var(dims, correction=0) * (1 - momentum)
        return (y, kept, spread)[:outputs] if outputs > 1 else y
    if training:
        return F.batch_norm(x, mean, variance, scale, bias, True, 1.0 - momentum, epsilon)
    return _with_statistics(x, scale, bias, mean, variance, epsilon)


def _with_statistics(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, epsilon: float) -> Tensor:
    if mean.dtype is x.dtype and scale.dtype is x.dtype:
        return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
    wide = mean.dtype
    scaled = F.batch_norm(x.to(wide), mean, variance, scale.to(wide), bias.to(wide), False, 0.0, epsilon)
    return scaled.to(x.dtype)


@rule("BatchNormalization", since=7)
def batch_norm_by_outputs(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    is_test: int = 1,
    consumed_inputs: object = None,
    outputs: int,
    training: bool,
) -> Tensor | tuple[Tensor, ...]:
    """Before version 14 a node that asks for statistics is in training mode."""
    return batch_norm(
        x,
        scale,
        bias,
        mean,
        variance,
        epsilon=epsilon,
        momentum=momentum,
        training_mode=int(outputs > 1),
        outputs=min(outputs, 3),
        training=training,
    )


@rule("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return F.group_norm(x, x.shape[1], scale, bias, epsilon)


@rule("GroupNormalization", since=21)
def group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@rule("GroupNormalization", since=18)
def group_norm_of_groups(x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5) -> Tensor:
    """In version 18 scale and bias belong to the groups."""
    each = x.shape[1] // num_groups
    return F.group_norm(x, num_groups, scale.repeat_interleave(each), bias.repeat_interleave(each), epsilon)


@rule("LayerNormalization", since=17)
def layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    axis = axis % x.dim()
    shape = x.shape[axis:]
    fits = scale.shape == shape and (bias is None or bias.shape == shape)
    if outputs == 1 and fits:
        return F.layer_norm(x, shape, scale, bias, epsilon)
    dims = tuple(range(axis, x.dim()))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(dims, keepdim=True)
    inverse = torch.rsqrt(((wide - mean) ** 2).mean(dims, keepdim=True) + epsilon)
    y = ((wide - mean) * inverse).to(x.dtype) * scale
    y = y if bias is None else y + bias
    return (y, mean, inverse)[:outputs] if outputs > 1 else y


@rule("RMSNormalization", since=23)
def rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    axis = axis % x.dim()
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    inverse = torch.rsqrt((wide * wide).mean(tuple(range(axis, x.dim())), keepdim=True) + epsilon)
    return (wide * inverse).to(x.dtype) * scale


@rule("LRN")
def local_response_norm(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    squares = (x * x).reshape(x.shape[0], 1, x.shape[1], -1)
    total = F.avg_pool2d(F.pad(squares, (0, 0, (size - 1) // 2, size // 2)), (size, 1), 1) * size
    return x / (bias + alpha / size * total.reshape(x.shape)) ** beta


@rule("LpNormalization")
def lp_norm(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """Zero where the norm is zero."""
    norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    return torch.where(norm == 0, 0.0, x / torch.where(norm == 0, 1.0, norm))


@rule("MeanVarianceNormalization", since=9)
def mean_variance_norm(x: Tensor, *, axes: tuple[int, ...] = (0, 2, 3)) -> Tensor:
    mean = x.mean(axes, keepdim=True)
    deviation = torch.sqrt((x * x).mean(axes, keepdim=True) - mean * mean)
    return (x - mean) / (deviation + 1e-9)


@rule("Dropout", since=12, host="ratio train", random=True)
def dropout(
    x: Tensor, ratio: Host = None, train: Host = None, *, seed: int | None = None, outputs: int, training: bool
) -> Tensor | tuple[Tensor, ...]:
    share = 0.5 if ratio is None else float(integer(ratio))
    on = bool(integer(train)) if train is not None else training
    if not on or share == 0.0:
        return (x, torch.ones_like(x, dtype=torch.bool)) if outputs > 1 else x
    if outputs == 1:
        return F.dropout(x, share, True)
    kept = torch.rand_like(x) >= share
    return x * kept / (1.0 - share), kept


@rule("Dropout", random=True)
def dropout_by_attribute(
    x: Tensor,
    *,
    ratio: float = 0.5,
    is_test: int = 0,
    consumed_inputs: object = None,
    outputs: int,
    training: bool,
    opset: int,
) -> Tensor | tuple[Tensor, ...]:
    y = dropout(x, ratio, None, outputs=outputs, training=training)
    if isinstance(y, tuple) and opset < 10:
        return y[0], y[1].to(x.dtype)
    return y
