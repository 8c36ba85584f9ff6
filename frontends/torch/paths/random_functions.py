"""Functions of PyTorch that draw random numbers among other things: their bodies, and attention as PyTorch composes it.

What they draw must be drawn when Python calls them. Their bodies call functions that a path follows one by one.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BODIES = frozenset([F.multi_head_attention_forward, F.gumbel_softmax])


@functools.cache
def body_of(function: Any) -> Callable[..., Any] | None:
    """The function without its dispatch to modes, if its body is to be followed."""
    if function is F.scaled_dot_product_attention:
        return attention
    if function in (torch.lstm, torch.gru):
        return functools.partial(layers, function)
    if function not in _BODIES:
        return None
    apart = {"has_torch_function": _never, "has_torch_function_unary": _never, "has_torch_function_variadic": _never}
    inner = types.FunctionType(
        function.__code__, function.__globals__ | apart, function.__name__, function.__defaults__, function.__closure__
    )
    inner.__kwdefaults__ = function.__kwdefaults__
    return inner


def _never(*arguments: Any) -> bool:
    return False


def draws(function: Any, keywords: Any, arguments: Any) -> bool:
    """Whether a call of such a function draws random numbers."""
    if function is F.scaled_dot_product_attention:
        p = keywords.get("dropout_p", arguments[4] if len(arguments) > 4 else 0.0)
        return bool(p > 0)
    if function is F.multi_head_attention_forward:
        p = keywords.get("dropout_p", arguments[10] if len(arguments) > 10 else 0.0)
        return bool(p > 0 and keywords.get("training", arguments[13] if len(arguments) > 13 else True))
    if function in (torch.lstm, torch.gru):
        return bool(len(arguments) == 9 and isinstance(arguments[3], bool) and arguments[5] > 0 and arguments[6])
    return function in _BODIES


def layers(
    function: Any,
    input: Tensor,
    hidden: Any,
    weights: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """`torch.lstm` and `torch.gru` layer by layer, with dropout between the layers."""
    x = input.transpose(0, 1) if batch_first else input
    directions = 2 if bidirectional else 1
    size = len(weights) // num_layers
    states = hidden if function is torch.lstm else (hidden,)
    found: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        own = [state[layer * directions : (layer + 1) * directions] for state in states]
        given = own if function is torch.lstm else own[0]
        parts = weights[layer * size : (layer + 1) * size]
        x, *last = function(x, given, parts, has_biases, 1, 0.0, train, bidirectional, False)
        found.append(tuple(last))
        x = F.dropout(x, dropout) if layer < num_layers - 1 else x
    return (x.transpose(0, 1) if batch_first else x), *map(torch.cat, zip(*found, strict=True))


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
    """`F.scaled_dot_product_attention` as ATen composes it where there is dropout."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = math.sqrt(1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    scores = (query * factor) @ (key.transpose(-2, -1) * factor)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
    if attn_mask is None:
        return F.dropout(scores.softmax(-1), dropout_p) @ value
    alive = (attn_mask != -math.inf).any(-1, keepdim=True)  # a row that is fully masked attends to nothing
    weights = (scores + attn_mask.where(alive, 0.0)).softmax(-1).where(alive, 0.0)
    return F.dropout(weights, dropout_p) @ value
