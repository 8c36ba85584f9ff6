"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers of these widths with ReLUs between them."""
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
