"""Small models to explore."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from daceml_train.exploration import Session


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.fc = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.fc(self.norm(x))) + x


def blocks(count: int = 2, size: int = 16) -> nn.Module:
    return nn.Sequential(*(Block(size) for _ in range(count)), nn.Linear(size, 10))


def perceptron() -> nn.Module:
    """Small enough to be compiled without a pipeline."""
    return nn.Sequential(nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 10))


def batch(size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, size), torch.randint(0, 10, (8,))


def session(
    kind: str = "step", count: int = 2, model: nn.Module | None = None, optimizer: str = "adamw", **options: Any
) -> Session:
    """A session of `blocks`: `step` with an optimizer, `loss` without optimizer, `module` without both."""
    model = blocks(count) if model is None else model
    x, y = batch()
    if kind == "module":
        return Session(model, x, **options)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    result = kinds[optimizer](model.parameters(), lr=1e-2) if kind == "step" else None
    return Session(model, x, y, loss=F.cross_entropy, optimizer=result, **options)
