"""MLP-Mixer (Tolstikhin et al., MLP-Mixer: An all-MLP Architecture for Vision, 2021)."""

from __future__ import annotations

from torch import Tensor, nn


def two_layers(width: int, hidden: int) -> nn.Sequential:
    """Two linear layers with a GELU between them."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class MixerBlock(nn.Module):
    """A network over the patches, then one over the channels, each with a residual connection."""

    def __init__(self, patches: int, width: int, over_patches: int, over_channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_patches = two_layers(patches, over_patches)
        self.over_channels = two_layers(width, over_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


class Mixer(nn.Module):
    """Patches of a square image, mixer blocks, the mean over the patches, and a linear classifier."""

    def __init__(
        self,
        image: int = 224,
        patch: int = 16,
        width: int = 512,
        layers: int = 8,
        over_patches: int = 256,
        over_channels: int = 2048,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        patches = (image // patch) ** 2
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(MixerBlock(patches, width, over_patches, over_channels) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.classifier(self.norm(self.blocks(x)).mean(1))
