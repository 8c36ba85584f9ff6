"""What a program is: a model with its data, its loss, and the parts that are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

WIDTH, BATCH = 256, 256

PROGRAMS: dict[str, type[Program]] = {}
"""All programs by name."""

Train = Callable[..., Tensor]
"""`train(part, inputs, *targets)` trains one part once and returns the loss."""


class Program(nn.Module):
    """A model, and how it is trained: by default all of it on each batch by one optimizer.

    What it keeps in plain attributes (`notes`, counters, tensors, objects) is compared with eager execution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.notes: list[Any] = []
        self.calls = 0

    def batch(self, number: int) -> tuple[Any, ...]:
        """Inputs and targets of a step; they use no stream of random numbers that is compared."""
        x = drawn(number, BATCH, WIDTH)
        return x, torch.roll(x, 1, 1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of an output."""
        return (output - target).square().mean()

    def parts(self) -> dict[str, tuple[nn.Module, Callable[..., Tensor]]]:
        """What is trained: models with their losses, each with an optimizer of its own."""
        return {"model": (self, type(self).loss.__get__(self))}

    def step(self, train: Train, number: int) -> Tensor:
        """The user's step: trains parts, and returns a loss."""
        return train("model", *self.batch(number))


def drawn(number: int, *size: int) -> Tensor:
    """Normal numbers that depend on nothing but `number` and the size."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(number))


P = TypeVar("P", bound=type[Program])


def named(name: str) -> Callable[[P], P]:
    """Register a program."""

    def register(program: P) -> P:
        PROGRAMS[name] = program
        return program

    return register
