"""Transformers (Vaswani et al., Attention Is All You Need, 2017), with the normalisation before or behind."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head self-attention; `causal` through PyTorch's fused operator, else written out."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.project = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.project(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.causal:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = (q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)).softmax(-1) @ v
        return self.join(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer network, each with a residual connection.

    `before` normalises what goes into them (GPT-2), else what comes out of the addition (BERT); GELU is the tanh
    approximation in the first case and exact in the second, as in those models.
    """

    def __init__(self, width: int, heads: int, before: bool) -> None:
        super().__init__()
        self.before = before
        self.attention = Attention(width, heads, causal=before)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        gelu = nn.GELU(approximate="tanh" if before else "none")
        self.network = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attention(self.norm1(x))
            return x + self.network(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.network(x))


class LanguageModel(nn.Module):
    """Embeddings of tokens and positions, blocks, and logits for each token."""

    def __init__(
        self, tokens: int, length: int, width: int = 256, heads: int = 8, layers: int = 4, before: bool = True
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, before) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.position[: x.shape[1]])))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all tokens of a batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
