"""Margin losses in a trace: PyTorch's own decompositions keep a NaN that its kernels pass over, as `z > 0` is false."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _multi_margin_loss(
    input: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    x, chosen = torch.atleast_2d(input), torch.atleast_1d(target).unsqueeze(1)
    classes = x.shape[1]
    torch._check(p in (1, 2), lambda: "only p == 1 and p == 2 supported")
    z = _positive(margin - x.gather(1, chosen) + x)
    z = z if p == 1 else z * z
    z = z if weight is None else z * torch.atleast_1d(weight)[chosen]
    z = torch.where(torch.arange(classes, device=input.device) != chosen, z, 0)
    return z.mean() if reduction == 1 else z.sum() / classes if reduction == 2 else z.mean(1).reshape(target.shape)


def _multilabel_margin_loss(input: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    x, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    classes = x.shape[1]
    places = torch.arange(classes, device=input.device)
    end = torch.where(labels == -1, places, classes).amin(-1, keepdim=True)
    given = places < end
    chosen = x.gather(-1, torch.where(given, labels, 0))
    is_target = (places == torch.where(given, labels, -1).unsqueeze(-1)).any(1)
    z = _positive(1.0 - chosen.unsqueeze(-1) + x.unsqueeze(1)) / classes
    z = torch.where(given.unsqueeze(-1) & ~is_target.unsqueeze(1), z, 0).sum((1, 2))
    z = z.mean() if reduction == 1 else z.sum() if reduction == 2 else z.reshape(input.shape[:-1])
    return z, is_target.to(input.dtype).reshape(target.shape)


def _positive(z: Tensor) -> Tensor:
    return torch.where(z > 0, z, 0)


KERNELS: dict[Any, Any] = {
    torch.ops.aten.multi_margin_loss.default: _multi_margin_loss,
    torch.ops.aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
}
"""Operator overload -> its Python kernel in traces."""
