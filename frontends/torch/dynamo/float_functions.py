"""Functions of PyTorch that take a number in C++, composed of operators that read it: it may then be an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.frontends.torch.capture.composed import composed_attention, layer_by_layer


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout` with a probability that is an input; nothing and everything dropped are programs of their own."""
    if p < 0.0 or p > 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return input
    if p == 1.0:
        return F.dropout(input, 1.0, True, False)
    result: Tensor = torch.ops.daceml_train.dropout(input, p)
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


def _plain_dropout(input: Any, p: Any = None, training: Any = None, inplace: Any = None) -> Any:
    """The probability of a call of dropout that can be replaced; else None."""
    return p if inplace is None or (inplace.is_python_constant() and not inplace.as_python_constant()) else None


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
    F.dropout: (_plain_dropout, dropout),
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
