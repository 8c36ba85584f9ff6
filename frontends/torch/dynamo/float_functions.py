"""Functions of PyTorch that take a number in C++, composed of operators that read it: it may then be an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.frontends.torch.capture.composed import composed_attention, given_dropout, layer_by_layer


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout` with a probability that is an input; nothing and everything dropped are programs of their own."""
    if p < 0.0 or p > 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return input
    if p == 1.0:
        return F.dropout(input, 1.0, True, inplace)
    result = given_dropout(input, p)
    return input.copy_(result) if inplace else result


def dropout_of_channels(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout1d` and its kin for batches, with a probability that is an input: whole channels are dropped."""
    if not training:
        return dropout(input, p, training)
    kept = dropout(input.new_ones([*input.shape[:2], *[1] * (input.dim() - 2)]), p)
    return input.mul_(kept) if inplace else input * kept


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` with a momentum that is an input: the statistics of the batch are taken, and added here."""
    if not training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, 0.1, eps)
    mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    result = F.batch_norm(input, mean, variance, weight, bias, True, 1.0, eps)
    with torch.no_grad():
        running_mean.copy_(momentum * mean + (1 - momentum) * running_mean)
        running_var.copy_(momentum * variance + (1 - momentum) * running_var)
    return result


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of class indices with a label smoothing that is an input, composed as ATen does it.

    Weights scale the classes of the smoothed part as well, whose mean is over the weights of the targets.
    """
    if label_smoothing < 0.0 or label_smoothing > 1.0:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    if label_smoothing == 0.0:
        return F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    dim = 0 if input.dim() == 1 else 1
    classes = input.shape[dim]
    logp = F.log_softmax(input, dim)
    picked = F.nll_loss(logp, target, weight, ignore_index=ignore_index, reduction=reduction)
    ignored = target == ignore_index
    if weight is None:
        weighted = logp
    else:
        weighted = logp * weight.view([classes if d == dim else 1 for d in range(logp.dim())])
    smooth = (-weighted.sum(dim)).masked_fill(ignored, 0.0)
    if reduction == "mean" and weight is None:
        smooth = smooth.sum() / torch.logical_not(ignored).sum()
    elif reduction == "mean" and weight is not None:
        smooth = smooth.sum() / weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0.0).sum()
    elif reduction == "sum":
        smooth = smooth.sum()
    return (1 - label_smoothing) * picked + smooth * (label_smoothing / classes)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` with a probability of dropout that is an input."""
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return composed_attention(query, key, value, attn_mask, dropout_p, is_causal, factor)


def _of_dropout(input: Any, p: Any = None, training: Any = None, inplace: Any = None) -> Any:
    """The probability of a call of dropout."""
    return p


def _of_batch_norm(*operands: Any, **named: Any) -> Any:
    """The momentum of a call of batch normalization."""
    return operands[6] if len(operands) > 6 else named.get("momentum")


def _of_channels(rank: int) -> Callable[..., Any]:
    """The probability of a call that drops channels of a batch whose tensor has `rank` dimensions; else None."""

    def probability(input: Any, p: Any = None, training: Any = None, inplace: Any = None) -> Any:
        example = input.as_proxy().node.meta.get("example_value")
        return p if isinstance(example, Tensor) and example.dim() == rank else None

    return probability


def _smoothing_of_indices(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = None,
    reduce: Any = None,
    reduction: Any = None,
    label_smoothing: Any = None,
) -> Any:
    """The smoothing of a cross entropy of class indices; else None."""
    absent = all(x is None or x.is_constant_none() for x in (size_average, reduce))
    example = target.as_proxy().node.meta.get("example_value") if absent else None
    indices = isinstance(example, Tensor) and not example.is_floating_point()
    return label_smoothing if indices else None


def _of_attention(*operands: Any, **named: Any) -> Any:
    """The probability of attention's dropout."""
    return operands[4] if len(operands) > 4 else named.get("dropout_p")


def _of_heads(*operands: Any, **named: Any) -> Any:
    """The probability of `F.multi_head_attention_forward`'s dropout."""
    return operands[10] if len(operands) > 10 else named.get("dropout_p")


def _between_layers(x: Any, hidden: Any, weights: Any, *options: Any, **named: Any) -> Any:
    """The probability of dropout between the layers of a recurrent network that is not fed a packed sequence."""
    return None if len(options) != 6 or named else options[2]


FUNCTIONS: dict[Any, tuple[Callable[..., Any], Any]] = {
    F.dropout: (_of_dropout, dropout),
    F.dropout1d: (_of_channels(3), dropout_of_channels),
    F.dropout2d: (_of_channels(4), dropout_of_channels),
    F.dropout3d: (_of_channels(5), dropout_of_channels),
    F.batch_norm: (_of_batch_norm, batch_norm),
    F.cross_entropy: (_smoothing_of_indices, cross_entropy),
    F.scaled_dot_product_attention: (_of_attention, attention),
    F.multi_head_attention_forward: (_of_heads, F.multi_head_attention_forward),
    **{
        getattr(torch, kind): (_between_layers, layer_by_layer(kind))
        for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
}
"""Function of PyTorch -> the number of a call that may be an input, and the function that can read it."""


__all__ = ["FUNCTIONS", "attention", "cross_entropy", "dropout"]
