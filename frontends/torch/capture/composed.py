"""Functions of PyTorch that the pre-pass composes of others, so that a trace without autograd loses no gradient."""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from daceml_train.frontends.torch.dynamo.polyfills import POLYFILLS
from daceml_train.frontends.torch.rules import linear_algebra

_ops = torch.ops.daceml_train
_SDPA = F.scaled_dot_product_attention


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def given_dropout(input: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout in training with a probability between 0 and 1: an operator of ours in traces, PyTorch's elsewhere."""
    if not isinstance(p, torch.SymFloat):
        return F.dropout(input, p, True)
    result: torch.Tensor = _ops.dropout(input, p)
    return result


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention as one operator if a library has it, else composed of operators with correct gradients."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    mask = _additive(attn_mask, query) if attn_mask is not None else None
    if _has_kernel(query, key, value, attn_mask, dropout_p, is_causal) and isinstance(factor, float):
        result: torch.Tensor = _ops.attention(query, key, value, mask, is_causal, factor)[0]
        return result
    return composed_attention(query, key, value, attn_mask, dropout_p, is_causal, factor)


def _has_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
) -> bool:
    """Whether ATen's flash kernel computes this attention, by the conditions of `use_flash_attention_cpp`."""
    ranks = {query.dim(), key.dim(), value.dim()}
    sizes = query.shape[-1] == key.shape[-1] == value.shape[-1] and key.shape[-2] == value.shape[-2]
    batches = ranks == {4} and query.shape[:2] == key.shape[:2] == value.shape[:2]
    return (
        dropout == 0
        and batches
        and sizes
        and query.dtype.is_floating_point
        and query.device.type in ("cpu", "cuda")
        and (mask is None or (mask.dim() in (2, 4) and not causal and not mask.requires_grad))
        and all(not isinstance(s, int) or s > 0 for t in (query, key) for s in t.shape)
    )


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A boolean mask as numbers to add to the scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -math.inf)


def composed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Softmax attention of operators; a mask is boolean, or added to the scores."""
    scores = query @ key.transpose(-2, -1) * scale
    if causal:
        mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if mask is None:
        weights = scores.softmax(-1)
    else:
        # A fully masked row yields zeros and zero gradients, not NaN.
        alive = (mask if mask.dtype is torch.bool else mask != -math.inf).any(-1, keepdim=True)
        if mask.dtype is torch.bool:
            scores = scores.masked_fill((mask | ~alive).logical_not(), -math.inf)
        else:
            scores = scores + mask.where(alive, 0.0)
        weights = scores.softmax(-1).where(alive, 0.0)
    return F.dropout(weights, dropout) @ value


def _embedding(input: torch.Tensor, weight: torch.Tensor, *options: Any, **more: Any) -> torch.Tensor:
    """`F.embedding`, whose `max_norm` changes the weight behind autograd's back."""
    given = dict(zip(("padding_idx", "max_norm", "norm_type"), options, strict=False)) | more
    given |= dict(zip(("scale_grad_by_freq", "sparse"), options[3:], strict=False))
    largest, kind = given.pop("max_norm", None), given.pop("norm_type", 2.0)
    if largest is not None:
        _renormalize(weight, input, largest, kind)
    return F.embedding(input, weight, **given)


def _embedding_bag(input: torch.Tensor, weight: torch.Tensor, *options: Any, **more: Any) -> torch.Tensor:
    """`F.embedding_bag`, see `_embedding`."""
    names = (
        "offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx"
    )
    given = dict(zip(names.split(), options, strict=False)) | more
    largest, kind = given.pop("max_norm", None), given.pop("norm_type", 2.0)
    if largest is not None:
        _renormalize(weight, input, largest, kind)
    return F.embedding_bag(input, weight, **given)


def _renormalize(weight: torch.Tensor, indices: torch.Tensor, largest: float, kind: float) -> None:
    before = weight.clone()
    torch.embedding_renorm_(weight.detach(), indices.contiguous(), largest, kind)
    weight.copy_(_ops.graft(before, weight.clone()))


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A batched matmul with one matrix as a single matmul, as PyTorch folds it when gradients are needed."""
    if a.dim() >= 3 and b.dim() == 2 and a.numel() != 0:
        return (a.reshape(-1, a.shape[-1]) @ b).view(*a.shape[:-1], b.shape[-1])
    return torch.matmul(a, b)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if x.dim() >= 2 and weight.dim() == 2:
        if (order := _rows_in_memory(x)) is not None:  # no copy of `x`: its rows are multiplied in the order of memory
            back = sorted(range(x.dim()), key=order.__getitem__)
            return _linear(x.permute(order), weight, bias).permute(back).contiguous()
        rows = x.reshape(-1, x.shape[-1])
        y = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
        return y.view(*x.shape[:-1], weight.shape[0])
    return F.linear(x, weight, bias)


def _rows_in_memory(x: torch.Tensor) -> list[int] | None:
    """The order in which the rows of a permuted tensor lie in memory without gaps; None if they lie in their order."""
    strides = x.stride()
    if x.dim() < 3 or not all(isinstance(stride, int) for stride in strides):
        return None
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])  # a stable sort: dimensions of size one stay
    expected: Any = 1
    for dim in reversed(order):
        if not isinstance(expected, int) or strides[dim] != expected:
            return None
        expected = expected * x.shape[dim]
    return order if order != list(range(x.dim())) and order[-1] == x.dim() - 1 else None


def _calling(function: Any, **replaced: Any) -> Callable[..., Any]:
    """A function of PyTorch's, in whose code some names mean other functions."""
    scope = {**function.__globals__, **replaced}
    result = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def _multi_head_attention() -> Callable[..., Any]:
    """`F.multi_head_attention_forward`, a single call to TorchDynamo, of the functions that replace those it calls."""
    inner: dict[str, Any] = {"linear": _linear, "scaled_dot_product_attention": _attention}
    inner["has_torch_function"] = lambda tensors: False  # else the tracer's mode is handed PyTorch's function
    projections = ("_in_projection", "_in_projection_packed")
    helpers = {name: _calling(getattr(F, name), **inner) for name in projections if hasattr(F, name)}
    return _calling(F.multi_head_attention_forward, **inner, **helpers)


def layer_by_layer(kind: str) -> Callable[..., Any]:
    """A recurrent network with dropout between its layers, which PyTorch's decomposition leaves out."""
    function = getattr(torch, kind)

    def run(x: torch.Tensor, hidden: Any, weights: Any, *options: Any) -> Any:
        if isinstance(weights, torch.Tensor):  # a packed sequence
            return function(x, hidden, weights, *options)
        biases, layers, dropout, train, both, batch_first = options
        if dropout == 0 or not train or layers == 1:
            return function(x, hidden, weights, *options)
        states = hidden if kind == "lstm" else (hidden,)
        held, turns = len(weights) // layers, 2 if both else 1
        x = x.transpose(0, 1) if batch_first else x
        last = []
        for i in range(layers):
            own = [s[turns * i : turns * (i + 1)] for s in states]
            part = weights[held * i : held * (i + 1)]
            x, *following = function(x, own if kind == "lstm" else own[0], part, biases, 1, 0.0, train, both, False)
            last.append(following)
            x = F.dropout(x, dropout) if i < layers - 1 else x
        x = x.transpose(0, 1) if batch_first else x
        return (x, *(torch.cat(parts) for parts in zip(*last, strict=True)))

    return run


def _cosine_similarity(x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8) -> torch.Tensor:
    """PyTorch clamps the norms without telling autograd."""
    x1, x2 = torch.broadcast_tensors(x1, x2)

    def normalized(x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
        clamped: torch.Tensor = _ops.graft(norm, norm.clamp_min(eps))
        return x / clamped

    kind = torch.promote_types(x1.dtype, x2.dtype)
    return (normalized(x1.to(kind)) * normalized(x2.to(kind))).sum(dim)


def _adaptive_average(pool: Callable[..., torch.Tensor], dims: int) -> Callable[..., torch.Tensor]:
    """Adaptive pooling; to a single element it is the mean, without PyTorch's change of strides afterwards."""

    def pooled(x: torch.Tensor, output_size: Any) -> torch.Tensor:
        sizes = tuple(output_size) if isinstance(output_size, Sequence) else (output_size,) * dims
        return x.mean(tuple(range(-dims, 0)), keepdim=True) if sizes == (1,) * dims else pool(x, output_size)

    return pooled


REPLACED: dict[Any, Callable[..., Any]] = {
    _SDPA: _attention,
    F.adaptive_avg_pool1d: _adaptive_average(F.adaptive_avg_pool1d, 1),
    F.adaptive_avg_pool2d: _adaptive_average(F.adaptive_avg_pool2d, 2),
    F.adaptive_avg_pool3d: _adaptive_average(F.adaptive_avg_pool3d, 3),
    torch.matmul: _matmul,
    operator.matmul: _matmul,
    torch._C._nn.linear: _linear,
    F.multi_head_attention_forward: _multi_head_attention(),
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    **{getattr(torch, kind): layer_by_layer(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    F.cosine_similarity: _cosine_similarity,
    torch.cosine_similarity: _cosine_similarity,
    **POLYFILLS,
    **linear_algebra.FUNCTIONS,
    # Without gradients these omit the vectors that their derivatives need.
    torch.linalg.eigvalsh: lambda x, *options, **more: torch.linalg.eigh(x, *options, **more)[0],
    torch.linalg.svdvals: lambda x, **more: torch.linalg.svd(x, full_matrices=False, **more)[1],
}
REPLACED_METHODS: dict[str, Callable[..., Any]] = {"matmul": _matmul, "__matmul__": _matmul, **linear_algebra.METHODS}


def _attention_in_functorch(*operands: Any, **options: Any) -> torch.Tensor:
    """Attention composed of operators that `torch.func` can transform."""
    names: Sequence[str] = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, operands, strict=False)) | options
    query = given["query"]
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    return composed_attention(
        query,
        given["key"],
        given["value"],
        given.get("attn_mask"),
        given.get("dropout_p", 0.0),
        given.get("is_causal", False),
        scale,
    )


REPLACED_IN_FUNCTORCH: dict[Any, Callable[..., Any]] = {_SDPA: _attention_in_functorch}
