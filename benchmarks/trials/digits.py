"""What is searched: a network with running statistics and dropout on scikit-learn's digits, and its spaces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import daceml_train as dt

images, labels = load_digits(return_X_y=True)
X, Y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
HELD_OUT = 300
STEPS = 200


class Net(nn.Module):
    """A hidden layer with batch normalization and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the ten digits."""
        scores: Tensor = self.last(self.dropout(torch.relu(self.norm(self.first(x)))))
        return scores


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [
            layer
            for _ in range(2)
            for layer in (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        ]
        self.inner = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """The sum, rectified."""
        return torch.relu(x + self.inner(x))


def residual() -> nn.Module:
    """A residual network for 8 by 8 images."""
    start = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1)]
    return nn.Sequential(*start, Block(8), Block(8), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def data(step: int, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The batch of a step."""
    order = torch.Generator().manual_seed(1000 + step)
    chosen = torch.randint(0, len(X) - HELD_OUT, (settings.get("batch", 64),), generator=order)
    return X[chosen], Y[chosen]


def accuracy(model: nn.Module) -> Tensor:
    """The share of held-out digits that are classified correctly."""
    model.eval()
    with torch.no_grad():
        return (model(X[-HELD_OUT:]).argmax(1) == Y[-HELD_OUT:]).float().mean()


def stages(
    network: Any = Net, storage: Any = None, evaluate: bool = True, seed: int = 0, once: bool = False
) -> dt.Stages:
    """The training of a network, seeded: before its initialization, and unless `once` again after it."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = dt.training_step(model, nn.functional.cross_entropy, optimizer)
    tested = accuracy if evaluate else None
    return dt.Stages(step, data=data, evaluate=tested, storage=storage, seed=None if once else seed, name="digits")


def small(storage: Any) -> dt.Stages:
    """For a pool."""
    return stages(storage=storage)


def convolutional(storage: Any) -> dt.Stages:
    """For a pool."""
    return stages(residual, storage)


def late_drops(steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """128 trials that part late."""
    factors = (0.5, 0.2, 0.1, 0.05)
    for lr, first, m, second, n in itertools.product((0.1, 0.05), factors, (0.7, 0.8), factors, (0.9, 0.95)):
        yield {"lr": dt.schedule.steps(lr, {int(steps * m): first, int(steps * n): second})}


def warm_up_and_drops(steps: int) -> Iterator[dict[str, Any]]:
    """64 trials: a warm-up, a rate, and two drops."""
    factors = (0.5, 0.2, 0.1, 0.05)
    for lr, first, second, m in itertools.product((0.1, 0.05), factors, factors, (0.7, 0.8)):
        drops = dt.schedule.steps(lr, {int(steps * m): first, int(steps * 0.9): second})
        yield {"lr": dt.schedule.warm_up(steps // 20, drops)}


def step_decay(epochs: int = 200) -> Iterator[dict[str, Any]]:
    """216 trials: the learning rate of a residual network on CIFAR, dropped twice."""
    milestones = [(a, b) for a in (80, 90, 100, 110) for b in (140, 160)]
    for lr, at, gammas in itertools.product(
        (0.1, 0.05, 0.02), milestones, itertools.product((0.5, 0.2, 0.1), repeat=2)
    ):
        yield {"lr": dt.schedule.steps(lr, dict(zip(at, gammas, strict=True)))}
