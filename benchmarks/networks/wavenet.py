"""WaveNet (van den Oord et al., WaveNet: A Generative Model for Raw Audio, 2016)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GatedLayer(nn.Module):
    """A gated dilated causal convolution of two taps; its result goes to the next layer and the skip connection."""

    def __init__(self, channels: int, skip: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.filter_and_gate = nn.Conv1d(channels, 2 * channels, 2, dilation=dilation)
        self.residual = nn.Conv1d(channels, channels, 1)
        self.skip = nn.Conv1d(channels, skip, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        filtered, gate = self.filter_and_gate(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        y = torch.tanh(filtered) * torch.sigmoid(gate)
        return x + self.residual(y), self.skip(y)


class WaveNet(nn.Module):
    """An embedding of quantized samples, gated layers whose dilation doubles `period` times, and logits per sample."""

    def __init__(
        self, channels: int = 64, skip: int = 128, layers: int = 20, levels: int = 256, period: int = 10
    ) -> None:
        super().__init__()
        self.sample = nn.Embedding(levels, channels)
        self.layers = nn.ModuleList(GatedLayer(channels, skip, 2 ** (i % period)) for i in range(layers))
        self.hidden, self.head = nn.Conv1d(skip, skip, 1), nn.Conv1d(skip, levels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.sample(x).transpose(1, 2)
        skips: Tensor | int = 0
        for layer in self.layers:
            x, skip = layer(x)
            skips = skips + skip
        assert isinstance(skips, Tensor)
        return self.head(F.relu(self.hidden(F.relu(skips))))
