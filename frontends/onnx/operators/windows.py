"""Geometry of operators that slide a window: ONNX's padding, dilation and rounding, as amounts before and after."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from daceml_train.errors import Invalid


def amounts(
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int] | None,
    auto_pad: str,
) -> tuple[list[int], list[int]]:
    """Padding before and after each spatial dimension of `x`."""
    rank = len(kernel)
    if auto_pad == "VALID":
        return [0] * rank, [0] * rank
    if not auto_pad.startswith("SAME"):
        chosen = list(pads) if pads is not None else [0] * (2 * rank)
        if len(chosen) != 2 * rank:
            raise Invalid(f"pads has {len(chosen)} numbers for {rank} spatial dimensions")
        return chosen[:rank], chosen[rank:]
    before, after = [], []
    for extent, k, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max((-(-extent // stride) - 1) * stride + (k - 1) * dilation + 1 - extent, 0)
        small, large = total // 2, total - total // 2
        before.append(small if auto_pad == "SAME_UPPER" else large)
        after.append(large if auto_pad == "SAME_UPPER" else small)
    return before, after


def beyond(
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
) -> list[int]:
    """The padding that `ceil_mode` adds after each dimension to complete the last window that starts inside."""
    extra = []
    for j, k in enumerate(kernel):
        span = (k - 1) * dilations[j] + 1
        padded = x.shape[2 + j] + before[j] + after[j]
        count = -(-(padded - span) // strides[j]) + 1
        if (count - 1) * strides[j] >= x.shape[2 + j] + before[j]:
            count -= 1
        extra.append(max(0, (count - 1) * strides[j] + span - padded))
    return extra


def padded(x: Tensor, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Tensor:
    """`x` with its spatial dimensions padded; negative amounts crop."""
    if not any(before) and not any(after):
        return x
    flat = [amount for pair in zip(reversed(before), reversed(after), strict=True) for amount in pair]
    return F.pad(x, flat, value=value)
