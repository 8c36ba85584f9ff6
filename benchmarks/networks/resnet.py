"""Residual networks: ResNet-18 and ResNet-50 (He et al., Deep Residual Learning for Image Recognition, 2015), and Wide
ResNet-50-2 (Zagoruyko & Komodakis, Wide Residual Networks, 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


def convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution that keeps the image's size (up to the stride), and its batch normalization."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3)
        changed = stride != 1 or inputs != outputs
        self.shortcut = convolution(inputs, outputs, 1, stride) if changed else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.relu(self.first(x)))
        return self.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1 that change the number of channels, around a shortcut."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.reduce = convolution(inputs, inner, 1)
        self.spatial = convolution(inner, inner, 3, stride)
        self.restore = convolution(inner, outputs, 1)
        changed = stride != 1 or inputs != outputs
        self.shortcut = convolution(inputs, outputs, 1, stride) if changed else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.restore(self.relu(self.spatial(self.relu(self.reduce(x)))))
        return self.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """A 7x7 stem, four stages of two blocks, a global mean and a linear classifier."""

    def __init__(self, classes: int = 1000, base: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, base, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        widths = (base, base, 2 * base, 4 * base, 8 * base)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(BasicBlock(before, width, 1 if before == width else 2), BasicBlock(width, width, 1))
                for before, width in pairwise(widths)
            )
        )
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.stages(self.stem(x)).mean((2, 3)))


class ResNet50(nn.Module):
    """A 7x7 stem, stages of bottleneck blocks, a global mean and a linear classifier.

    `wide` multiplies the channels of the 3x3 convolutions, `base` is the number of channels after the stem.
    """

    def __init__(
        self, classes: int = 1000, wide: int = 1, blocks: Sequence[int] = (3, 4, 6, 3), base: int = 64
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, base, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        stages: list[nn.Module] = []
        before = base
        for place, count in enumerate(blocks):
            inner, width = base * wide * 2**place, 4 * base * 2**place
            for number in range(count):
                stages.append(Bottleneck(before, inner, width, 2 if number == 0 and place > 0 else 1))
                before = width
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.stages(self.stem(x)).mean((2, 3)))
