"""Programs that keep something in Python from step to step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.programs.program import BATCH, WIDTH, Program, named


@named("counter")
class Counter(Program):
    """Counts its calls."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.first(x).tanh())


@named("dict counter")
class DictCounter(Program):
    """Counts samples and calls in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"samples": 0, "calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.counts["samples"] += x.shape[0]
        self.counts["calls"] += 1
        return self.last(self.first(x).tanh())


@named("schedule of integers")
class IntegerSchedule(Program):
    """A warm-up that is a quotient of integers."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.first(x).tanh()) * self.calls / (self.calls + 4)


@named("schedule of floats")
class FloatSchedule(Program):
    """A noise level and a temperature that decay."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.temperature = 1.0, 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.noise *= 0.97
        self.temperature = max(0.5, self.temperature * 0.95)
        h = self.first(x + self.noise * torch.randn_like(x))
        return self.last(torch.softmax(h / self.temperature, -1) * h)


@named("dropout rate")
class DropoutRate(Program):
    """A dropout rate that falls from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.rate = max(0.1, self.rate - 0.01)
        return self.last(F.dropout(self.first(x).relu(), self.rate, self.training))


@named("running average")
class RunningAverage(Program):
    """Standardizes by averages of its own, kept as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = torch.zeros(WIDTH), torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.scale = 0.9 * self.scale + 0.1 * h.detach().std(0)
        return self.last(((h - self.mean) / self.scale).tanh())


@named("recurrent state")
class Recurrent(Program):
    """Truncated backpropagation through time: four steps with gradients, the state before them without."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(BATCH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.state
        for _ in range(4):
            h = torch.tanh(self.first(x) + self.last(h))
        self.state = h.detach()
        return h


@named("running list")
class RunningList(Program):
    """The last four means, of which the average is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        self.history.append(h.detach().mean(0))
        if len(self.history) > 4:
            self.history.pop(0)
        return self.last(h - torch.stack(self.history).mean(0))


class Statistics:
    """A Python object that the model changes."""

    def __init__(self) -> None:
        self.count, self.rows, self.kinds = 0, 0, set[str]()

    def add(self, x: Tensor) -> None:
        """Count a batch."""
        self.count += 1
        self.rows += len(x)
        self.kinds.add(f"{tuple(x.shape)}")


@named("mutated object")
class Mutation(Program):
    """Changes a Python object, and reads what it counted."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics: Any = Statistics()

    def forward(self, x: Tensor) -> Tensor:
        self.statistics.add(x)
        h = self.first(x).tanh()
        self.statistics.last = h.shape[1]
        return self.last(h) / (1 + 0.1 * self.statistics.count)
