"""Transformers (Vaswani et al., Attention Is All You Need, 2017), with the normalization before or after."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head self-attention: through PyTorch's fused operator, or written out with dropout of the weights."""

    def __init__(
        self, width: int, heads: int, *, causal: bool = False, fused: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.project = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.project(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(width // self.heads))
            if self.causal:
                future = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().logical_not()
                scores = scores.masked_fill(future, float("-inf"))
            y = self.dropout(scores.softmax(-1)) @ v
        return self.join(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer network, each with a residual connection.

    `before` normalizes what goes into them (GPT-2), else what comes out of the addition (BERT).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        before: bool,
        causal: bool = False,
        fused: bool = True,
        dropout: float = 0.0,
        gelu: str = "none",
    ) -> None:
        super().__init__()
        self.before = before
        self.attention = Attention(width, heads, causal=causal, fused=fused, dropout=dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate=gelu), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.dropout(self.attention(self.norm1(x)))
            return x + self.network(self.norm2(x))
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.network(x))


class LanguageModel(nn.Module):
    """Embeddings of tokens and positions, blocks, and logits for each token; GELU in GPT-2's approximation."""

    def __init__(self, tokens: int, length: int, width: int = 256, heads: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(
            *(Block(width, heads, before=True, causal=True, gelu="tanh") for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.position[: x.shape[1]])))


class GPT2(nn.Module):
    """GPT-2 (Radford et al., 2019): causal blocks with the normalization before, logits through the embedding."""

    def __init__(
        self, tokens: int = 50257, width: int = 768, heads: int = 12, layers: int = 4, positions: int = 1024
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads, before=True, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.token(x) + self.position.weight[: x.shape[1]])
        return F.linear(self.norm(x), self.token.weight)


class Bert(nn.Module):
    """BERT (Devlin et al., 2018) as a classifier of sequences; attention is written out, for its weights' dropout."""

    def __init__(
        self,
        tokens: int = 30522,
        width: int = 768,
        heads: int = 12,
        layers: int = 4,
        positions: int = 512,
        classes: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(positions, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads, before=False, fused=False, dropout=dropout) for _ in range(layers))
        )
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.dropout(self.norm(self.token(x) + self.position.weight[: x.shape[1]])))
        return self.head(torch.tanh(self.pool(x[:, 0])))


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al., An Image is Worth 16x16 Words, 2020): patches, a class token, blocks, its logits."""

    def __init__(
        self, image: int = 224, patch: int = 16, width: int = 384, heads: int = 6, layers: int = 12, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, before=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.summary.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all tokens of a batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
