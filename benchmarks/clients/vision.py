"""torchvision: a network, a transform of images inside the model, and box operators that run in PyTorch."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.clients.way import Program, Way, vision

PACKAGE = "torchvision"
torchvision = vision()

from torchvision.transforms import v2  # noqa: E402 (`vision` says why)


def train(way: Way, net: nn.Module, size: int) -> None:
    """Three steps on random images."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x, y = torch.randn(4, 3, size, size, generator=generator), torch.randint(0, 5, (4,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        way.note("loss", loss)
    way.note("evaluated", net.eval()(x))


def mobile(way: Way) -> None:
    """A small MobileNetV3."""
    torch.manual_seed(1)
    net = way.optimize(torchvision.models.mobilenet_v3_small(num_classes=5, dropout=0.0))  # changed
    train(way, net, 48)


def transformed(way: Way) -> None:
    """Normalization and a crop as the first layers of a model."""
    torch.manual_seed(1)
    first = v2.Normalize([0.5] * 3, [0.2] * 3), v2.CenterCrop(24)
    last = nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    net = way.optimize(nn.Sequential(*first, *last))  # changed
    train(way, net, 32)


PROGRAMS: dict[str, Program] = {"MobileNetV3": mobile, "transforms in the model": transformed}
