"""Losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.frontends.onnx.rules import rule

_NOTHING = -(1 << 40)
"""Not a target: ONNX ignores none by default, whereas PyTorch ignores -100."""


@rule("NegativeLogLikelihoodLoss", since=12)
def nll_loss(
    logp: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    ignored = _NOTHING if ignore_index is None else ignore_index
    if logp.dim() == 3:  # PyTorch takes [N, C], [N, C, H, W] and, by a longer way, others
        logp, target = logp.unsqueeze(-1), target.unsqueeze(-1)
        loss = F.nll_loss(logp, target.long(), weight, ignore_index=ignored, reduction=reduction)
        return loss.squeeze(-1) if reduction == "none" else loss
    return F.nll_loss(logp, target.long(), weight, ignore_index=ignored, reduction=reduction)


@rule("SoftmaxCrossEntropyLoss", since=12)
def softmax_cross_entropy(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    outputs: int,
) -> Tensor | tuple[Tensor, Tensor]:
    ignored = _NOTHING if ignore_index is None else ignore_index
    if outputs == 1:
        return F.cross_entropy(scores, target.long(), weight, ignore_index=ignored, reduction=reduction)
    logp = torch.log_softmax(scores, 1)
    return nll_loss(logp, target, weight, ignore_index=ignored, reduction=reduction), logp
