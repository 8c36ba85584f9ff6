"""Scaled dot-product attention, and rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.frontends.onnx.rules import rule


def _plain(node: Any) -> bool:
    """No cache, no soft cap, one result: what PyTorch's operator computes. The rest uses the standard's definition."""
    given = {attribute.name: attribute for attribute in node.attribute}
    extra = {"softcap", "softmax_precision", "qk_matmul_output_mode"} & set(given)
    windows = {"left_window_size", "right_window_size"} & set(given)
    several = any(node.output[1:]) or any(node.input[4:])
    return (
        not several
        and not any(given[name].f or given[name].i for name in extra)
        and all(given[name].i == -1 for name in windows)
    )


@rule("Attention", since=23, accepts=_plain)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    qk_matmul_output_mode: int = 0,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Tensor:
    """On [batch, heads, length, width], or [batch, length, heads * width] with the numbers of heads as attributes."""
    packed = query.dim() == 3
    if packed:
        query, key, value = (
            _heads(x, heads) for x, heads in ((query, q_num_heads), (key, kv_num_heads), (value, kv_num_heads))
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if mask is not None and mask.shape[-1] < key.shape[-2]:  # a short mask excludes the last keys
        missing = key.shape[-2] - mask.shape[-1]
        mask = F.pad(mask, (0, missing), value=False if mask.dtype is torch.bool else float("-inf"))
    if mask is not None and is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = mask & allowed if mask.dtype is torch.bool else mask.masked_fill(~allowed, float("-inf"))
    causal = bool(is_causal) and mask is None
    result = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale)
    return result.transpose(1, 2).flatten(2) if packed else result


def _heads(x: Tensor, heads: int | None) -> Tensor:
    assert heads is not None
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)
