"""Unsigned integers of 16 to 64 bits, for which PyTorch has few kernels: computed in signed types that are as wide.

Two's complement makes their sums, differences and products equal. For 64 bits, which no signed type holds, order,
quotients and conversions to floating point are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
SIGN = torch.iinfo(torch.int64).min


def wide(x: Tensor, ordered: bool = False) -> Tensor:
    """As a type with kernels; with the sign bit flipped, int64 has the order of uint64."""
    found = x.to(WIDER.get(x.dtype, x.dtype))
    return found ^ SIGN if ordered and x.dtype is torch.uint64 else found


def narrow(x: Tensor, element: torch.dtype, ordered: bool = False) -> Tensor:
    """The inverse of `wide`."""
    return (x ^ SIGN if ordered and element is torch.uint64 else x).to(element)


def magnitude(x: Tensor) -> Tensor:
    """The absolute value."""
    return x if x.dtype in WIDER else torch.abs(x)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """Integers divided, rounded towards zero."""
    x, y = wide(a), wide(b)
    if a.dtype is not torch.uint64:
        return torch.div(x, y, rounding_mode="trunc").to(a.dtype)
    # half of the dividend has no sign; what is lost is at most one (Warren, "Hacker's Delight", 9-3)
    near = torch.div((x >> 1) & torch.iinfo(torch.int64).max, y, rounding_mode="trunc") << 1
    near = near + _not_less(x - near * y, y).to(torch.int64)
    return torch.where(y < 0, _not_less(x, y).to(torch.int64), near).to(a.dtype)


def remainder(a: Tensor, b: Tensor) -> Tensor:
    """What quotients of unsigned integers leave."""
    x, y = wide(a), wide(b)
    return (x - wide(quotient(a, b)) * y).to(a.dtype)


def _not_less(a: Tensor, b: Tensor) -> Tensor:
    return (a ^ SIGN) >= (b ^ SIGN)
