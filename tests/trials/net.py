"""A small network with running statistics and dropout, and its data: what the tests of searches by stages train."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.step import TrainingStep

generator = torch.Generator().manual_seed(3)
X = torch.rand(120, 8, generator=generator)
Y = X[:, :4].argmax(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2, self.training))


def data(step: int, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    order = torch.Generator().manual_seed(1000 + step)
    chosen = torch.randint(0, len(X), (settings.get("batch", 16),), generator=order)
    return X[chosen], Y[chosen]


def accuracy(model: nn.Module) -> Tensor:
    torch.rand(3)  # an evaluation may draw
    model.eval()
    with torch.no_grad():
        return (model(X).argmax(1) == Y).float().mean()


def new_step(optimizer: Any = None, **options: Any) -> TrainingStep:
    torch.manual_seed(0)
    model = Net()
    chosen = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return dt.training_step(model, nn.functional.cross_entropy, chosen, **options)


def stages(storage: Any = None, *, optimizer: Any = None, **options: Any) -> dt.Stages:
    return dt.Stages(new_step(optimizer), data=data, evaluate=accuracy, storage=storage, **options)


def drops(lr: float, first: float, second: float, at: tuple[int, int] = (6, 9)) -> dict[str, Any]:
    return {"lr": dt.schedule.steps(lr, {at[0]: first, at[1]: second})}


TRIALS = [drops(lr, first, second) for lr in (0.1, 0.05) for first in (0.5, 0.1) for second in (0.5, 0.1)]


def stored(storage: Path, data: Any = data) -> dt.Stages:
    return dt.Stages(new_step(), data=data, evaluate=accuracy, storage=storage, seed=0, name="numbers")


def killing(marks: Path, step: int, settings: dict[str, Any]) -> Any:
    """Kills its process in some steps, once each."""
    if step in (3, 7, 10) and len(list(marks.glob(f"{step}-*"))) < 1:
        (marks / f"{step}-{os.getpid()}-{time.monotonic_ns()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return data(step, settings)


def always_killing(step: int, settings: dict[str, Any]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def raising(step: int, settings: dict[str, Any]) -> Any:
    if step == 7 and settings["lr"] < 0.03:
        raise OSError("no such file")
    return data(step, settings)
