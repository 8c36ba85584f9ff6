"""Programs whose numbers follow a schedule, and that keep statistics of what they see."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.program import BATCH, WIDTH, Program, Train, named


@named("annealed layers")
class AnnealedLayers(Program):
    """Dropout and the momentum of a batch normalization, which the user's loop sets before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x).relu())))

    def step(self, train: Train, number: int) -> Tensor:
        """One step with the numbers of its place in the schedule."""
        self.dropout.p, self.norm.momentum = max(0.05, 0.5 - 0.02 * number), 0.5 * 0.9**number
        return train("model", *self.batch(number))


class Reversal(torch.autograd.Function):
    """The identity, whose gradient is reversed and scaled."""

    @staticmethod
    def forward(context: Any, x: Tensor, scale: float) -> Tensor:
        context.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -context.scale * gradients[0], None


@named("domain adversary")
class DomainAdversary(Program):
    """A domain classifier after a reversed gradient, whose scale grows as in the paper by Ganin et al. (2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.domain, self.progress = nn.Linear(WIDTH, 2), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.progress += 1 / 32
        h = self.first(x).relu()
        scale = 2 / (1 + math.exp(-10 * self.progress)) - 1
        source = torch.arange(len(x)) % 2
        return self.last(h) + F.cross_entropy(self.domain(Reversal.apply(h, scale)), source)


@named("class counts")
class ClassCounts(Program):
    """Counts the classes that it predicts, and notes rounded numbers under the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.history, self.rate = Counter[int](), dict[int, dict[str, float]](), 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rate *= 0.97
        h = self.first(x).tanh()
        self.counts.update(h[:, :10].argmax(1).tolist())
        self.history[self.calls] = {"rate": round(self.rate, 4), "norm": round(h.norm().item(), 1)}
        return self.last(h * self.rate)


@named("NumPy statistics")
class NumPyStatistics(Program):
    """Standardizes by running statistics in NumPy, as agents do with what they observe."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.mean, self.variance = 0, np.zeros(WIDTH), np.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, seen = len(x), x.numpy()
        shift, total = seen.mean(0) - self.mean, self.count + len(x)
        self.mean = self.mean + shift * rows / total
        self.variance = (self.variance * self.count + seen.var(0) * rows) / total
        self.count = total
        mean, scale = (torch.as_tensor(a).float() for a in (self.mean, np.sqrt(self.variance + 1e-5)))
        return self.last(self.first((x - mean) / scale).tanh())


@named("memory of slices")
class Memory(Program):
    """Attends to the last positions of earlier steps, which it keeps as a slice of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(BATCH // 8, 8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh().view(BATCH // 8, 8, WIDTH)
        seen = torch.cat([self.memory, h], 1)
        self.memory = seen[:, -8:].detach()
        weights = torch.softmax(h @ seen.transpose(1, 2) / WIDTH**0.5, -1)
        return self.last(weights @ seen).flatten(0, 1)
