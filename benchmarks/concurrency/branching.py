"""Networks with branches, and tiny ones, sized so that a launch takes microseconds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.network import Problem


def unit(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """Convolution, batch normalization, ReLU."""
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class InceptionBlock(nn.Module):
    """Four branches of convolutions, concatenated (Szegedy et al., 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half, quarter = width // 8, width // 4
        self.one = unit(width, quarter, 1)
        self.three = nn.Sequential(unit(width, half, 1), unit(half, quarter, 3))
        self.five = nn.Sequential(unit(width, half, 1), unit(half, quarter, 3), unit(quarter, quarter, 3))
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), unit(width, quarter, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


class Inception(nn.Module):
    """Six blocks on small images."""

    def __init__(self, blocks: int = 6, width: int = 64) -> None:
        super().__init__()
        self.stem, self.last = nn.Sequential(unit(3, width, 3), nn.MaxPool2d(2)), nn.Linear(width, 10)
        self.blocks = nn.Sequential(*[InceptionBlock(width) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.blocks(self.stem(x)).mean((2, 3)))
        return result


def separable(width: int, kernel: int) -> nn.Sequential:
    """ReLU, a depthwise and a pointwise convolution, batch normalization."""
    depthwise = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width, bias=False)
    return nn.Sequential(nn.ReLU(), depthwise, nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))


class Cell(nn.Module):
    """Five nodes that each add two operations on the results before them (Zoph et al., 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.ModuleList([unit(width, width, 1) for _ in range(2)])
        self.operations = nn.ModuleList([separable(width, kernel) for kernel in (3, 5, 5, 3, 3, 3)])
        self.last = nn.Conv2d(5 * width, width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.before[0](x), self.before[1](y)
        first = self.operations[0](x) + self.operations[1](y)
        second = self.operations[2](x) + F.avg_pool2d(y, 3, 1, 1)
        third = self.operations[3](y) + F.max_pool2d(x, 3, 1, 1)
        fourth, fifth = self.operations[4](first) + second, self.operations[5](second) + third
        result: Tensor = self.last(torch.cat([first, second, third, fourth, fifth], 1))
        return result


class Cells(nn.Module):
    """Four cells, each of which reads the two before it."""

    def __init__(self, cells: int = 4, width: int = 32) -> None:
        super().__init__()
        self.stem, self.last = nn.Sequential(unit(3, width, 3), nn.MaxPool2d(2)), nn.Linear(width, 10)
        self.cells = nn.ModuleList([Cell(width) for _ in range(cells)])

    def forward(self, x: Tensor) -> Tensor:
        before = now = self.stem(x)
        for cell in self.cells:
            before, now = now, cell(before, now)
        result: Tensor = self.last(now.mean((2, 3)))
        return result


class Experts(nn.Module):
    """Layers of eight experts whose results a gate weighs; each expert sees every row."""

    def __init__(self, width: int = 64, hidden: int = 128, experts: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.gates = nn.ModuleList([nn.Linear(width, experts) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(layers)])
        self.experts = nn.ModuleList(
            [nn.ModuleList([self._expert(width, hidden) for _ in range(experts)]) for _ in range(layers)]
        )
        self.last = nn.Linear(width, 10)

    @staticmethod
    def _expert(width: int, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        for gate, norm, experts in zip(self.gates, self.norms, self.experts, strict=True):
            weights, y = gate(x).softmax(-1), norm(x)
            for i, expert in enumerate(experts):  # type: ignore[arg-type]
                x = x + weights[:, i : i + 1] * expert(y)
        result: Tensor = self.last(x)
        return result


class Towers(nn.Module):
    """Two towers on one input, as in recommenders."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(*[self._layer(width) for _ in range(layers)]) for _ in range(2))
        self.last = nn.Linear(2 * width, 10)

    @staticmethod
    def _layer(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.cat([self.left(x), self.right(x)], 1))
        return result


class ActorCritic(nn.Module):
    """A body with a policy and a value."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return torch.cat([self.policy(hidden), self.value(hidden)], 1)


def advantage(output: Tensor, actions: Tensor) -> Tensor:
    """Policy gradient with a baseline; rewards are those of a constant environment."""
    logits, value = output[:, :4], output[:, 4]
    chosen = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
    return (-chosen * (1.0 - value.detach()) + 0.5 * (1.0 - value) ** 2).mean()


class Recurrent(nn.Module):
    """One step of a GRU cell, and a linear layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(16, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.cell(x))
        return result


def _problem(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Problem:
    return Problem(model, x, y, loss, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))


def _images(model: nn.Module) -> Problem:
    return _problem(model, torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)), F.cross_entropy)


def _rows(model: nn.Module, rows: int, width: int, classes: int = 10) -> Problem:
    return _problem(model, torch.randn(rows, width), torch.randint(0, classes, (rows,)), F.cross_entropy)


def mlp() -> nn.Module:
    """8-64-64-4 with tanh, as in `mlp.c`."""
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


BRANCHING: dict[str, tuple[str, Callable[[], Problem]]] = {
    "experts": ("mixture of 8 experts, 4 layers", lambda: _rows(Experts(), 64, 64)),
    "cells": ("cells of an architecture search", lambda: _images(Cells())),
    "towers": ("two towers", lambda: _rows(Towers(), 64, 256)),
    "inception": ("Inception, 32 px", lambda: _images(Inception())),
}
TINY: dict[str, tuple[str, Callable[[], Problem]]] = {
    "tiny_mlp": ("MLP 8-64-64-4, batch 32", lambda: _rows(mlp(), 32, 8, 4)),
    "actor_critic": (
        "actor-critic, batch 32",
        lambda: _problem(ActorCritic(), torch.randn(32, 8), torch.randint(0, 4, (32,)), advantage),
    ),
    "gru": ("GRU cell, batch 32", lambda: _rows(Recurrent(), 32, 16, 4)),
}
"""Name -> title, and what creates the network and its batch."""
