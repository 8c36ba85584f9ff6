"""Batches of a second size, as the last one of an epoch is, and models that return more than their loss.

Compiled code meets varying sizes where they go wrong: a size that is not what it was at the first call, and a result
that the loss does not use, whose cotangent is zeros of the size at hand.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.model import Batch, Model


def rows_of(batch: Batch) -> int:
    """The batch size: the first dimension of the first tensor that has one."""
    return next((len(v) for v in batch.values() if isinstance(v, Tensor) and v.ndim), 0)


def of_other_size(batch: Batch) -> Batch:
    """The batch without its last row, or, where one row would remain, with its first row twice.

    PyTorch compiles a size of 1 apart from all others.
    """
    rows = rows_of(batch)

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or len(value) != rows:
            return value
        return value[: rows - 1].clone() if rows > 2 else torch.cat([value, value[:1]])

    return {name: cut(value) for name, value in batch.items()}


@functools.cache
def takes_other_sizes(row: Model) -> bool:
    """Whether the model runs on a batch of another size; one that is written for a size does not."""
    model, batch = row.build()
    if not rows_of(batch):
        return False
    try:
        with torch.no_grad():
            return bool(row.objective(model(**of_other_size(batch))).isfinite())
    except Exception:  # whatever a model of a library says to a size that it does not take
        return False


def batches(row: Model, batch: Batch, steps: int) -> list[Batch]:
    """What the steps train on: the batch, and in the last step one of another size where the model takes it."""
    return [batch] * (steps - 1) + [of_other_size(batch) if takes_other_sizes(row) else batch]


class LossAndResults(nn.Module):
    """The loss, and all results of the model, of which a loop uses none."""

    def __init__(self, model: nn.Module, row: Model) -> None:
        super().__init__()
        self.model, self.row = model, row

    def forward(self, **batch: Any) -> tuple[Tensor, Any]:
        results = self.model(**batch)
        return self.row.objective(results), results
