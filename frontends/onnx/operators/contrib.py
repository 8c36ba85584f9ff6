"""Operators of `com.microsoft` that exporters and ONNX Runtime's optimizer write, and of `ai.onnx.ml` on arrays."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.errors import Unsupported
from daceml_train.frontends.onnx.operators.contraction import matmul
from daceml_train.frontends.onnx.operators.normalization import layer_norm, rms_norm
from daceml_train.frontends.onnx.rules import rule

MICROSOFT = "com.microsoft"


@rule("Gelu", domain=MICROSOFT)
def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


@rule("QuickGelu", domain=MICROSOFT)
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    return x * torch.sigmoid(alpha * x)


@rule("BiasGelu", domain=MICROSOFT)
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@rule("FastGelu", domain=MICROSOFT)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@rule("FusedMatMul", domain=MICROSOFT)
def fused_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    if transBatchA or transBatchB:
        raise Unsupported("FusedMatMul with batch dimensions after the matrix is not supported")
    product = matmul(a.transpose(-1, -2) if transA else a, b.transpose(-1, -2) if transB else b)
    return product if alpha == 1.0 else alpha * product


@rule("SimplifiedLayerNormalization", domain=MICROSOFT)
@rule("SimplifiedLayerNormalization")
def simplified_layer_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return rms_norm(x, scale, axis=axis, epsilon=epsilon)


@rule("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_norm(
    x: Tensor,
    skip: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    outputs: int,
) -> tuple[Tensor | None, ...] | Tensor:
    total = x + skip if bias is None else x + skip + bias
    y = layer_norm(total, scale, shift, epsilon=epsilon, outputs=1)
    assert isinstance(y, Tensor)
    return (y, None, None, total)[:outputs] if outputs > 1 else y


@rule("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_norm(
    x: Tensor, skip: Tensor, scale: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-5, outputs: int
) -> tuple[Tensor | None, ...] | Tensor:
    total = x + skip if bias is None else x + skip + bias
    y = rms_norm(total, scale, epsilon=epsilon)
    return (y, None, None, total)[:outputs] if outputs > 1 else y


@rule("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_norm(
    tokens: Tensor,
    segments: Tensor | None,
    words: Tensor,
    positions: Tensor,
    kinds: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    mask: Tensor | None = None,
    places: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 1,
    outputs: int,
) -> tuple[Tensor, ...]:
    at = torch.arange(tokens.shape[1]) if places is None else places.long()
    total = F.embedding(tokens.long(), words) + F.embedding(at, positions)
    if segments is not None and kinds is not None:
        total = total + F.embedding(segments.long(), kinds)
    y = layer_norm(total, scale, shift, epsilon=epsilon, outputs=1)
    assert isinstance(y, Tensor)
    lengths = torch.zeros(tokens.shape[0], dtype=torch.int32) if mask is None else mask.sum(1).to(torch.int32)
    return (y, lengths, total)[:outputs]


@rule("Attention", domain=MICROSOFT)
def fused_attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    num_heads: int,
    unidirectional: int = 0,
    qkv_hidden_sizes: tuple[int, ...] | None = None,
    scale: float | None = None,
    mask_filter_value: float = -10000.0,
) -> Tensor:
    """Self-attention from one joined projection."""
    joined = torch.matmul(x, weight)
    joined = joined if bias is None else joined + bias
    parts = list(qkv_hidden_sizes) if qkv_hidden_sizes else [joined.shape[-1] // 3] * 3
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in joined.split(parts, -1))
    return _multi_head(q, k, v, mask, None, bool(unidirectional), scale, mask_filter_value)


@rule("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    added: Tensor | None = None,
    *,
    num_heads: int,
    unidirectional: int = 0,
    scale: float | None = None,
    mask_filter_value: float = -10000.0,
) -> Tensor:
    """On separate projections [batch, length, heads * width]."""
    if key.dim() != 3 or value.dim() != 3:
        raise Unsupported("packed keys and values are not supported")
    if bias is not None:
        b = bias.split([query.shape[-1], key.shape[-1], value.shape[-1]])
        query, key, value = query + b[0], key + b[1], value + b[2]
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in (query, key, value))
    return _multi_head(q, k, v, mask, added, bool(unidirectional), scale, mask_filter_value)


def _multi_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    added: Tensor | None,
    causal: bool,
    scale: float | None,
    filled: float,
) -> Tensor:
    total = added
    if mask is not None:
        if mask.dim() == 1:  # the number of valid keys of each batch entry
            mask = torch.arange(k.shape[-2]) < mask[:, None]
        keep = mask.bool()
        keep = keep[:, None, None, :] if keep.dim() == 2 else keep[:, None] if keep.dim() == 3 else keep
        shift = torch.where(keep, 0.0, filled).to(q.dtype)
        total = shift if total is None else total + shift
    if causal and total is not None:
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril().logical_not()
        total, causal = total.masked_fill(later, -math.inf), False
    result = F.scaled_dot_product_attention(q, k, v, total, is_causal=causal, scale=scale)
    return result.transpose(1, 2).flatten(2)


@rule("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(
    x: Tensor,
    positions: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """Rotary position embedding (Su et al. 2021) on [batch, length, heads * width] or [batch, heads, length, width]."""
    flat = x.dim() == 3
    width = rotary_embedding_dim or 2 * cosine.shape[-1]
    heads = x.unflatten(-1, (num_heads or x.shape[-1] // width, -1)).transpose(1, 2) if flat else x
    at = positions if positions.numel() > 1 else positions.reshape(1, 1) + torch.arange(heads.shape[2])
    c = F.embedding(at.long(), cosine)[:, None]
    s = F.embedding(at.long(), sine)[:, None]
    turned, rest = heads[..., :width], heads[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * c - b * s, b * c + a * s], -1)
    result = torch.cat([turned, rest], -1)
    return result.transpose(1, 2).flatten(2) if flat else result
