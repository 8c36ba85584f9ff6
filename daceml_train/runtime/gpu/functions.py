"""Functions: library calls that take several calls of PyTorch, for GPUs, whose launch lists are issued from Python.

Attention on CUDA: PyTorch's flash kernel for 16-bit types, its memory-efficient kernel for others, and plain matmuls
and a softmax where sizes fit neither. All return y and the logarithm of each row's sum of exponentials [B, H, T].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Mask = torch.Tensor | None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: Mask, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The y and logsumexp of `softmax(scale * q k^T + mask) v`."""
    match _kernel(q, k, causal, mask):
        case "flash":
            result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
            return result[0], result[1]
        case "efficient":
            result = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, causal, scale=scale
            )
            return result[0], result[1][..., : q.shape[2]]
    scores = _scores(q, k, causal, mask, scale)
    level = scores.logsumexp(-1)
    weights = (scores - _finite(level)[..., None]).exp()
    return (weights.to(v.dtype) @ v), _finite(level)


def attention_grad(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    y: torch.Tensor,
    level: torch.Tensor,
    causal: bool,
    mask: Mask,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients for q, k and v."""
    match _kernel(q, k, causal, mask):
        case "flash":
            unused = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout
            result = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad,
                q,
                k,
                v,
                y,
                level.contiguous(),
                None,
                None,
                q.shape[2],
                k.shape[2],
                0.0,
                causal,
                unused,
                unused,
                scale=scale,
            )
            return result[0], result[1], result[2]
        case "efficient":
            unused = torch.zeros((), dtype=torch.int64, device=q.device)
            rows = -(-q.shape[2] // 32) * 32
            padded = torch.nn.functional.pad(level, (0, rows - q.shape[2]), value=math.inf).contiguous()
            result = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                grad, q, k, v, None, y, padded, unused, unused, 0.0, [True, True, True, False], causal, scale=scale
            )
            return result[0], result[1], result[2]
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    weights = (_scores(q, k, causal, mask, scale) - level[..., None]).exp()
    wide = weights.dtype
    change = (grad @ v.mT).to(wide) - (grad.to(wide) * y.to(wide)).sum(-1, keepdim=True)
    change = (weights * change * factor).to(q.dtype)
    return change @ k, change.mT @ q, weights.to(q.dtype).mT @ grad


def _kernel(q: torch.Tensor, k: torch.Tensor, causal: bool, mask: Mask) -> str:
    """The kernel for operands of these types and sizes; the same in both directions.

    PyTorch's kernels differ in causal rows past the last key, and in masks.
    """
    if q.device.type != "cuda" or mask is not None or (causal and q.shape[2] != k.shape[2]):
        return "plain"
    return kernel_for(torch.cuda.get_device_capability(q.device), q.dtype, q.shape[-1])


def kernel_for(capability: tuple[int, int], dtype: torch.dtype, size: int) -> str:
    """The kernel for heads of this size on devices of this compute capability, in both directions.

    These are the conditions under which PyTorch itself takes these kernels for training; it builds them up to 12.1.
    """
    if capability > (12, 1):
        return "plain"
    if dtype in (torch.float16, torch.bfloat16) and capability >= (8, 0) and size % 8 == 0 and size <= 256:
        small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)  # too little shared memory for the gradient
        return "plain" if small and 192 < size <= 224 else "flash"
    if dtype is torch.float32 and size % 4 == 0 and size <= 128:
        return "efficient"
    return "plain"


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, mask: Mask, scale: float | None) -> torch.Tensor:
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q @ k.mT) * factor
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    if mask is not None:
        scores = scores + mask
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def _finite(level: torch.Tensor) -> torch.Tensor:
    """Zero for rows that attend to no key, whose weights are then exp(-inf) = 0."""
    return level.masked_fill(level == -math.inf, 0.0)


def require(holds: torch.Tensor, message: str) -> torch.Tensor:
    """Assert `holds`; where it is false, the device stops with the message when it gets there."""
    torch.ops.aten._assert_async.msg(holds, message)
    return holds.clone()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "daceml::attention": attention,
    "daceml::attention_grad": attention_grad,
    "daceml::require": require,
}
"""Name in a `Call` -> function."""
