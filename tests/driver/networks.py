"""Small networks of every kind that is promised to train, each with a batch, targets and a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18's parts: stem, max-pooling, blocks with and without projection, global pooling."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.stages = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.stages(self.stem(x))).flatten(1))


class SelfAttention(nn.Module):
    """Causal attention, by PyTorch's operator or written out with a mask of -inf."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(c // self.heads)
            mask = torch.ones(t, t, dtype=torch.bool).triu(1)
            y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, before: bool, fused: bool, gelu: str) -> None:
        super().__init__()
        self.before = before
        self.attention = SelfAttention(width, heads, fused)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate=gelu), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class LSTM(nn.Module):
    """An LSTM layer as a Python loop."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.wx, self.wh = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, inputs)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], self.width)
        outputs = []
        for t in range(x.shape[1]):
            i, f, g, o = (self.wx(x[:, t]) + self.wh(h)).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(self.head(h))
        return torch.stack(outputs, 1)


class TiedLM(nn.Module):
    """A language model whose output weights are its embedding's."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(0.1 * torch.randn(6, width))
        self.block = Block(width, 2, before=True, fused=True, gelu="tanh")
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embedding(x) + self.position[: x.shape[1]])))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Problem:
    """A model and what it is trained on; all drawn from PyTorch's generator."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...]]
    loss: Callable[..., Tensor]

    def build(self, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[Any, ...]]:
        """The model and a batch (inputs, targets), with equal numbers at each call."""
        torch.manual_seed(3)
        model, batch = self.model().train(), self.batch()
        return model.to(dtype), tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)


def _block(*, before: bool, fused: bool, gelu: str) -> Callable[[], nn.Module]:
    return lambda: Block(8, 2, before=before, fused=fused, gelu=gelu)


def _sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 6, 8), torch.randn(3, 6, 8)


PROBLEMS: dict[str, Problem] = {
    "mlp": Problem(mlp, lambda: (torch.randn(6, 8), torch.randint(0, 4, (6,))), F.cross_entropy),
    "resnet": Problem(ResNet, lambda: (torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4,))), F.cross_entropy),
    "pre_ln": Problem(_block(before=True, fused=True, gelu="tanh"), _sequences, F.mse_loss),
    "post_ln": Problem(_block(before=False, fused=False, gelu="none"), _sequences, F.mse_loss),
    "mixer": Problem(lambda: MixerBlock(6, 8), _sequences, F.mse_loss),
    "lstm": Problem(lambda: LSTM(8, 12), _sequences, F.mse_loss),
    "tied_lm": Problem(
        lambda: TiedLM(11, 8), lambda: (torch.randint(0, 11, (3, 6)), torch.randint(0, 11, (3, 6))), token_loss
    ),
}
