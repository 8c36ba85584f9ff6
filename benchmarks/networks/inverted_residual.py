"""Networks of inverted residuals: MobileNetV2 (Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks,
2018) and EfficientNet-B0 (Tan & Le, EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.networks.resnet import convolution


@dataclass(frozen=True)
class Stage:
    """Blocks in a row: how they expand, the channels they end in, the stride of the first, and the kernel's size."""

    expansion: int
    outputs: int
    blocks: int
    stride: int
    size: int = 3


MOBILENET_V2 = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 2),
    Stage(6, 32, 3, 2),
    Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2),
    Stage(6, 320, 1, 1),
)
EFFICIENTNET_B0 = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 2),
    Stage(6, 40, 2, 2, 5),
    Stage(6, 80, 3, 2),
    Stage(6, 112, 3, 1, 5),
    Stage(6, 192, 4, 2, 5),
    Stage(6, 320, 1, 1),
)


class SqueezeExcitation(nn.Module):
    """Scales channels by a small network of their means (Hu et al., Squeeze-and-Excitation, 2018)."""

    def __init__(self, channels: int, inner: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            activation(inplace=True),
            nn.Conv2d(inner, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x)


class InvertedResidual(nn.Module):
    """Expansion by 1x1, a depthwise convolution, projection by 1x1; a shortcut where shapes allow."""

    def __init__(
        self, inputs: int, stage: Stage, stride: int, activation: type[nn.Module], squeeze: bool = False
    ) -> None:
        super().__init__()
        inner = inputs * stage.expansion
        layers: list[nn.Module] = []
        if stage.expansion != 1:
            layers += [convolution(inputs, inner, 1), activation(inplace=True)]
        layers += [convolution(inner, inner, stage.size, stride, groups=inner), activation(inplace=True)]
        if squeeze:
            layers.append(SqueezeExcitation(inner, max(1, inputs // 4), activation))
        layers.append(convolution(inner, stage.outputs, 1))
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == stage.outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if self.residual else y


class InvertedResidualNetwork(nn.Module):
    """A strided stem, stages of inverted residuals, a wide 1x1 convolution, a global mean and a linear classifier."""

    def __init__(
        self,
        stages: Sequence[Stage],
        activation: type[nn.Module],
        squeeze: bool = False,
        stem: int = 32,
        head: int = 1280,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [convolution(3, stem, 3, 2), activation(inplace=True)]
        inputs = stem
        for stage in stages:
            for number in range(stage.blocks):
                stride = stage.stride if number == 0 else 1
                layers.append(InvertedResidual(inputs, stage, stride, activation, squeeze))
                inputs = stage.outputs
        layers += [convolution(inputs, head, 1), activation(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(head, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def mobilenet_v2(
    stages: Sequence[Stage] = MOBILENET_V2, stem: int = 32, head: int = 1280, classes: int = 1000
) -> nn.Module:
    """MobileNetV2: ReLU6, no squeeze."""
    return InvertedResidualNetwork(stages, nn.ReLU6, False, stem, head, classes)


def efficientnet_b0(
    stages: Sequence[Stage] = EFFICIENTNET_B0, stem: int = 32, head: int = 1280, classes: int = 1000
) -> nn.Module:
    """EfficientNet-B0: SiLU, squeeze and excitation in each block."""
    return InvertedResidualNetwork(stages, nn.SiLU, True, stem, head, classes)
