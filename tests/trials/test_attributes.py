"""What a model keeps in Python objects belongs to a trial: none of it is left to the next one."""

import collections
import random
from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.trials.state import Training
from daceml_train.trials.values import same
from tests.trials.net import X, Y, data

pytestmark = pytest.mark.compiled


@dataclass
class Config:
    steps: float = 0


class Keeping(nn.Module):
    """A linear model whose outputs depend on what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.start()

    def start(self) -> None:
        """What is there at first."""

    def factor(self) -> Any:
        """What outputs are multiplied by."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 + 0.1 * self.factor())


class Appearing(Keeping):
    calls = 0

    def factor(self) -> Any:
        self.calls += 1
        return self.calls


class Vanishing(Keeping):
    def start(self) -> None:
        self.first = True

    def factor(self) -> Any:
        if "first" in vars(self):
            del self.first
            return 3
        return 1


class Containers(Keeping):
    def start(self) -> None:
        self._queue = collections.deque([0.0], maxlen=3)
        self.counts: Any = collections.Counter()
        self.seen = {0}

    def factor(self) -> Any:
        self._queue.append(self._queue[-1] + 1)
        self.counts["calls"] += 1
        self.seen.add(len(self.seen))
        return sum(self._queue) + self.counts["calls"] + len(self.seen)


class Fields(Keeping):
    def start(self) -> None:
        self.config, self.space, self.scale = Config(), SimpleNamespace(n=np.arange(2)), 0.0

    def factor(self) -> Any:
        self.config.steps += 1
        self.space.n[1] += 1
        self.scale = np.float64(self.scale + 1)
        return self.config.steps + int(self.space.n[1]) + float(self.scale)


class Drawing(Keeping):
    def start(self) -> None:
        self.own, self.python = torch.Generator().manual_seed(0), random.Random(0)
        self.numpy, self.legacy = np.random.default_rng(0), np.random.RandomState(0)

    def factor(self) -> Any:
        drawn = self.python.random() + self.numpy.random() + self.legacy.rand()
        return drawn + float(torch.rand((), generator=self.own))


class Shared(Keeping):
    def start(self) -> None:
        self.calls = self.inner.calls = [0]  # type: ignore[assignment]

    def factor(self) -> Any:
        self.calls[0] += 1
        return self.inner.calls[0]  # type: ignore[index]


class Buffers(Keeping):
    def start(self) -> None:
        self.register_buffer("mean", None)
        self.register_buffer("growing", torch.zeros(1))

    def factor(self) -> Any:
        if self.training:
            self.mean = torch.ones(1) if self.mean is None else self.mean + 1
            self.growing = torch.cat([self.growing, torch.ones(1)])
        return self.growing.sum() + (0 if self.mean is None else self.mean)


class OfTheClass(Keeping):
    calls, seen = 0, [0]

    def start(self) -> None:
        type(self).calls, type(self).seen = 0, [0]

    def factor(self) -> Any:
        OfTheClass.calls += 1
        self.seen.append(self.calls)
        type(self).last = self.calls  # type: ignore[attr-defined]
        return self.calls + len(self.seen)


def held_out(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(X), Y)


def new(kind: type[nn.Module]) -> dt.Stages:
    torch.manual_seed(0)
    model = kind()
    step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    return dt.Stages(step, data=data, evaluate=held_out, seed=0)


@pytest.mark.filterwarnings("ignore:daceml_train")
@pytest.mark.parametrize("kind", Keeping.__subclasses__())
def test_what_a_model_keeps_belongs_to_a_trial(kind: type[nn.Module]) -> None:
    trials: list[Any] = [{"lr": 0.1}, {"lr": dt.schedule.piecewise({0: 0.1, 2: 0.05})}]
    found = new(kind)
    values = found.run_all(trials, 3)
    assert values == [dict(new(kind).run(0, trial, 3)) for trial in trials]
    found.reset()
    assert same(found.training.snapshot(), found._start)


class Settable(nn.Module):
    """Holds objects that `apply` writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.array = nn.Linear(8, 4), torch.zeros(1), np.zeros(1)
        self.config, self.space, self.inner.table = Config(), Namespace(n=[Config()]), {"n": 0.0}  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.config.steps, self.space.n[0].steps, self.inner.table["n"]]  # type: ignore[index]
        return self.inner(x) * (1 + self.scale + sum(parts))


def test_settings_are_written_into_what_the_model_holds() -> None:
    def new_trials() -> dt.Stages:
        torch.manual_seed(0)
        model = Settable()
        config, space, table, scale, array = model.config, model.space, model.inner.table, model.scale, model.array

        def apply(settings: dict[str, Any]) -> None:
            config.steps = space.n[0].steps = table["n"] = settings["n"]  # type: ignore[index]
            scale.fill_(settings["n"])
            array[:] = settings["n"]

        step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
        return dt.Stages(step, data=data, evaluate=held_out, seed=0, apply=apply, name="numbers")

    trials: list[Any] = [{"n": 1.0}, {"n": 3.0}, {"n": 2.0}]
    found = new_trials()
    values = found.run_all(trials, 3)
    assert values == [dict(new_trials().run(0, trial, 3)) for trial in trials]
    assert len({value[3] for value in values}) == 3
    found.reset()
    assert same(found.training.snapshot(), found._start)


class Own:
    calls = 0


class OfAClass(Keeping):
    def start(self) -> None:
        self.own = Own()

    def factor(self) -> Any:
        self.own.calls += 1
        return self.own.calls


class Function(Keeping):
    def factor(self) -> Any:
        self.last = lambda: 1
        return 1


@pytest.mark.filterwarnings("ignore:daceml_train")
@pytest.mark.parametrize(("kind", "message"), [(OfAClass, "a step changed own, Own"), (Function, "last, function")])
def test_what_cannot_be_kept_for_a_trial_is_refused(kind: type[nn.Module], message: str) -> None:
    with pytest.raises(dt.Invalid, match=f"{message}, which is not saved") as error:
        dict(new(kind).run(5, {"lr": 0.1}, 2))
    assert "of trial 5" in error.value.__notes__[-1]


def test_lists_of_an_optimizer_are_not_shared_with_a_checkpoint() -> None:
    model = nn.Linear(8, 4)
    step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    training = Training(step)
    step.optimizer.state[model.bias]["history"] = [torch.zeros(1)]
    saved = training.snapshot()
    step.optimizer.state[model.bias]["history"] = []
    training.restore(saved)
    step.optimizer.state[model.bias]["history"].append(1.0)
    assert saved["optimizer"][1]["history"] == [torch.zeros(1)]
