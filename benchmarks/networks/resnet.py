"""ResNet-18 (He et al., Deep Residual Learning for Image Recognition, 2015)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the image's size (up to the stride), and its batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
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


class ResNet18(nn.Module):
    """A 7x7 stem, four stages of two blocks, a global mean and a linear classifier."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        widths = (64, 64, 128, 256, 512)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(BasicBlock(before, width, 1 if before == width else 2), BasicBlock(width, width, 1))
                for before, width in pairwise(widths)
            )
        )
        self.classifier = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.stages(self.stem(x)).mean((2, 3)))
