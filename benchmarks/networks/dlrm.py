"""DLRM (Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.networks.mlp import mlp


class DLRM(nn.Module):
    """Sums of embeddings per table, their products with each other and with the dense features, and a score.

    The tables' gradients are sparse: a step touches the rows that a batch names.
    """

    def __init__(
        self,
        tables: int = 26,
        rows: int = 100_000,
        width: int = 64,
        bottom: Sequence[int] = (13, 512, 256),
        top: Sequence[int] = (1024, 1024, 512, 256),
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables))
        self.bottom = nn.Sequential(mlp((*bottom, width)), nn.ReLU())
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))
        self.top = mlp((tables * (tables + 1) // 2 + width, *top, 1))

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        dense = self.bottom(x)
        features = torch.stack([dense, *(t(i) for t, i in zip(self.tables, indices.unbind(0), strict=True))], 1)
        products = features @ features.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, crossed], 1)).squeeze(1)
