"""Programs whose way through the code depends on values, on coins, or on earlier steps."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.programs.program import BATCH, WIDTH, Program, drawn, named


@named("branch on a value")
class Branch(Program):
    """Every fifth batch is shifted, and takes the other way."""

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        x = drawn(number, BATCH, WIDTH) + (3.0 if number % 5 == 4 else 0.0)
        return x, torch.roll(x, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if x.mean().item() > 1:
            self.notes.append("shifted")
            return self.last(h * 2)
        return self.last(h).tanh()


@named("branch every third call")
class Alternating(Program):
    """One way at every third call, by a counter."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.first(x)
        return self.last(h.tanh()) if self.calls % 3 == 0 else self.last(h.relu()) + x


@named("early exit")
class EarlyExit(Program):
    """Layers until the output is as large as the batch asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        x = drawn(number, BATCH, WIDTH) * (1 + number % 3)
        return x, torch.roll(x, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, wanted = x, 1 + int(x.std().item() - 0.5)
        for depth, layer in enumerate(self.layers):
            h = h + layer(h).tanh()
            if h.std().item() > 0 and depth >= wanted:
                self.notes.append(depth)
                break
        return self.last(h)


@named("while until a fixpoint")
class Fixpoint(Program):
    """Iterates until the change is small, at most eight times."""

    def forward(self, x: Tensor) -> Tensor:
        h, last, count = x, float("inf"), 0
        while last > 0.2 and count < 8:
            following = 0.4 * self.first(h).tanh() + 0.5 * x
            last = float((following - h).detach().abs().mean())
            h, count = following, count + 1
        self.notes.append(count)
        return self.last(h)


@named("stochastic depth")
class StochasticDepth(Program):
    """Each layer is left out by a coin of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            if random.random() < 0.7:
                h = h + layer(h).relu()
        return self.last(h)


@named("teacher forcing")
class TeacherForcing(Program):
    """A decoder that reads its own output or the target, by a coin per position."""

    def batch(self, number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = drawn(number, BATCH, WIDTH)
        target = torch.stack([torch.roll(x, shift, 1) for shift in range(1, 5)], 1)
        return (x, target), target

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h, y, outputs = x, torch.zeros_like(x), []
        for position in range(target.shape[1]):
            h = torch.tanh(self.first(y) + h)
            outputs.append(self.last(h))
            y = target[:, position] if random.random() < 0.5 else outputs[-1].detach()
        return torch.stack(outputs, 1)


def blocks(x: Tensor, count: int) -> Iterator[Tensor]:
    """Parts of the columns, one at a time."""
    width = x.shape[1] // count
    for number in range(count):
        yield x[:, number * width : (number + 1) * width]


@named("generator")
class Generator(Program):
    """Reads blocks of columns from a Python generator."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.softmax(-1) * part for part in blocks(self.first(x), 4)]
        return self.last(torch.cat(parts, 1))


class TooLarge(Exception):
    """Raised by a model and caught by it."""


def checked(x: Tensor) -> Tensor:
    """The argument, if it is small."""
    if x.abs().max().item() > 20:
        raise TooLarge("large")
    return x


@named("exception caught")
class Caught(Program):
    """Every fourth batch is large: an exception is raised, noted, and answered."""

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        x = drawn(number, BATCH, WIDTH)
        return x * (10.0 if number % 4 == 3 else 1.0), torch.roll(x, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        try:
            h = checked(x)
        except TooLarge as error:
            self.notes.append(str(error))
            h = x / 10
        return self.last(self.first(h).tanh())


@named("adaptive neural ODE")
class NeuralOde(Program):
    """Heun's method; the step is halved or doubled by the estimated error."""

    def field(self, h: Tensor) -> Tensor:
        """The derivative by time."""
        return self.last(self.first(h).tanh())

    def forward(self, x: Tensor) -> Tensor:
        h, time, size, taken = x, 0.0, 0.25, 0
        while time < 1.0 and taken < 12:
            size = min(size, 1.0 - time)
            slope = self.field(h)
            euler = h + size * slope
            heun = h + size / 2 * (slope + self.field(euler))
            taken += 1
            if (heun - euler).detach().abs().max().item() > 1.0 and size > 0.05:
                size /= 2
                continue
            h, time, size = heun, time + size, size * 2
        self.notes.append(taken)
        return h
