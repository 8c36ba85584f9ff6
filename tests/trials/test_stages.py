"""Trials by stages equal separate trials: every tensor, every generator, every value, to the bit."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.trials.state import State, generators
from daceml_train.trials.values import same
from tests.trials.net import TRIALS, X, Y, accuracy, data, drops, new_step, stages

S = dt.schedule
pytestmark = pytest.mark.compiled


def alone(trial: dict[str, Any], until: tuple[int, ...], **options: Any) -> tuple[dict[int, Any], State]:
    """The values and the final state of a trial that nothing is shared with, by a loop as a user writes it."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    step = new_step(options.pop("optimizer", None))
    own = dt.Stages(step, data=data, evaluate=accuracy, seed=0, **options)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    values: dict[int, Any] = {}
    for position in range(until[-1]):
        chosen = {name: S.of(value, name).at(position) for name, value in trial.items()}
        own.applied.apply(chosen)
        step(*data(position, chosen))
        if position + 1 in until:
            state = own.training.snapshot()
            values[position + 1] = accuracy(step.model).item()
            own.training.restore(state)
    return values, own.training.snapshot()


def equal_to_alone(
    found: dt.Stages, trials: list[dict[str, Any]], values: list[dict[int, Any]], **options: Any
) -> None:
    for trial, own in zip(trials, values, strict=True):
        until = tuple(own)
        expected, state = alone(trial, until, **options)
        assert own == expected
        found.load(trial, until[-1])
        now = found.training.snapshot()
        assert {name for name in state if not same(now[name], state[name])} == set()


def test_studies_on_one_object_are_counted_apart() -> None:
    """Both number their trials from 0."""
    found = stages(seed=0)
    found.run_all([drops(0.1, 0.5, 0.5)], 12)
    list(found.run(0, drops(0.05, 0.5, 0.5), until=12))
    assert (found.report().requested, found.report().steps) == (24, 24)


def test_trials_known_together_equal_separate_ones() -> None:
    found = stages(seed=0)
    heard: list[tuple[int, int]] = []
    values = found.run_all(TRIALS, 12, progress=lambda *stages: heard.append(stages))
    assert heard == [(done, 14) for done in range(14)]
    assert found.report().steps == found.tree.steps() == 2 * 6 + 4 * 3 + 8 * 3
    assert found.report().requested == 8 * 12
    equal_to_alone(found, TRIALS, values)
    assert len({value[12] for value in values}) > 1


def test_trials_one_by_one_with_rungs_equal_separate_ones() -> None:
    found = stages(seed=0)
    trials = [*TRIALS[:3], drops(0.1, 0.5, 0.5, at=(4, 9)), {"lr": S.cosine(0.1, 12)}, {"lr": S.warm_up(4, 0.1)}]
    values = [dict(found.run(number, trial, (4, 8, 12))) for number, trial in enumerate(trials)]
    equal_to_alone(found, trials, values)
    assert found.report().steps < found.report().requested


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "dampening": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_optimizers(name: str) -> None:
    found = stages(seed=0, optimizer=OPTIMIZERS[name])
    trials = [{"lr": 0.02}, drops(0.02, 0.5, 0.5, at=(3, 5)), drops(0.02, 0.5, 0.1, at=(3, 5)), {"lr": 0.01}]
    values = found.run_all(trials, (5, 6))
    equal_to_alone(found, trials, values, optimizer=OPTIMIZERS[name])


def test_batch_and_options_of_the_optimizer_are_settings() -> None:
    found = stages(seed=0)
    trials: list[dict[str, Any]] = [
        {"lr": 0.1, "batch": 16},
        {"lr": 0.1, "batch": S.piecewise({0: 16, 3: 24}), "momentum": 0.8},
        {"lr[0]": 0.1, "batch": S.piecewise({0: 16, 3: 24})},
        {"lr": 0.1, "batch": S.piecewise({0: 16, 3: 24}), "weight_decay": 0.1},
    ]
    values = found.run_all(trials, 6)
    equal_to_alone(found, trials, values)
    assert found.step.optimizer.param_groups[0]["weight_decay"] == 0.1
    found.load(trials[0], 6)
    with found.session():
        found.applied.apply({"lr": 0.3})
    assert found.step.optimizer.param_groups[0]["weight_decay"] == 0


class Counting(nn.Module):
    """Keeps a number, a list and a tensor from call to call, and draws from Python's and NumPy's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.seen = nn.Linear(8, 4), 0, [0.0]
        self.mean = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = [self.calls * 0.5]
        y = self.inner(x) + self.calls * 0.01
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y + self.mean


def test_python_state_of_the_model_and_foreign_generators() -> None:
    def noisy(step: int, settings: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = data(step, settings)
        return x + random.random() + np.random.rand() * torch.rand(1), y

    def new() -> dt.Stages:
        torch.manual_seed(0)
        model = Counting()
        step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
        return dt.Stages(step, data=noisy, evaluate=None, seed=5)

    trials, found, states = [{"lr": 0.1}, drops(0.1, 0.5, 0.1, at=(3, 5)), drops(0.1, 0.5, 0.2, at=(3, 5))], new(), []
    found.run_all(trials, 7)
    for trial in trials:
        single = new()
        single.load(trial, 7)
        found.load(trial, 7)
        states.append(found.training.snapshot())
        assert same(single.training.snapshot(), states[-1])
        assert found.step.model.calls == 7
    assert not same(states[0]["attributes"], states[1]["attributes"])


def test_apply_is_handed_further_settings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.2))
    step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    handed: list[dict[str, Any]] = []

    def apply(settings: dict[str, Any]) -> None:
        handed.append(settings)
        model[1].p = settings["p"]

    found = dt.Stages(step, data=data, evaluate=accuracy, apply=apply, name="numbers", seed=0)
    found.run_all([{"p": S.piecewise({0: 0.1, 3: 0.3}), "lr": 0.1}, {"p": 0.1, "lr": 0.1}], 5)
    assert {"p": 0.3} in handed and {"p": 0.1} in handed
    assert found.report().steps == 7
    with pytest.raises(dt.Invalid, match="earlier ones had 'p'"):
        found.run_all([{"lr": 0.1}], 5)


def test_pruned_and_interleaved_trials() -> None:
    found = stages(seed=0)
    first, second = found.run(0, TRIALS[0], (3, 12)), found.run(1, TRIALS[1], (3, 12))
    assert next(first) == next(second)
    torch.rand(5), found.step(X, Y)  # what the caller does to the model moves no trial
    values = [dict(second), dict(first)]
    equal_to_alone(found, [TRIALS[1], TRIALS[0]], values)
    assert found.report().requested == 24
    found.reset()
    assert same(found.training.snapshot(), found._start)
    assert stages(seed=0).root == found.root == dt.Stages(found.step, data=data, evaluate=accuracy, seed=0).root


def test_the_caller_has_generators_and_values_of_its_own() -> None:
    def both(model: nn.Module) -> dict[str, Any]:
        return {"accuracy": accuracy(model), "rest": [1.0, 2.0]}

    found = dt.Stages(new_step(), data=data, evaluate=both, seed=0)
    before, rates = generators(), iter([0.1, 0.2])
    for number, rate in enumerate(rates):
        values = dict(found.run(number, {"lr": rate}, 2))
        values[2].pop("accuracy"), values[2]["rest"].pop()
    again = found.run_all([{"lr": 0.1}, {"lr": 0.2}], 2)
    again[0][2]["rest"].clear()
    assert [sorted(value[2]) for value in found.run_all([{"lr": 0.1}, {"lr": 0.2}], 2)] == 2 * [["accuracy", "rest"]]
    assert found.run_all([{"lr": 0.1}], 2)[0][2]["rest"] == [1.0, 2.0]
    assert same(generators(), before)
    found.load({"lr": 0.1}, 2)
    assert not same(generators(), before)


def test_an_evaluation_leaves_all_as_it_was() -> None:
    found = stages(seed=0)
    for steps, _ in found.run(0, TRIALS[0], (3, 6)):
        assert found._last[0][0] == steps
        now = found.training.snapshot() | {"generators": found._last[1]["generators"]}  # those are the caller's
        assert same(now, found._last[1])


def test_little_memory_costs_steps_and_no_bits() -> None:
    found = stages(seed=0, memory=1)
    values = [dict(found.run(number, trial, 12)) for number, trial in enumerate(TRIALS[:4])]
    equal_to_alone(found, TRIALS[:4], values)
    assert found.report().twice > 0
    assert "a second time" in str(found.report())


def test_an_evaluation_that_moves_something_is_refused() -> None:
    def training(model: nn.Module) -> float:
        model(X)
        return 1.0

    found = dt.Stages(new_step(), data=data, evaluate=training, seed=0)
    with pytest.raises(dt.Invalid, match=r"trial 4 after 2 steps changed norm.running_mean.*model.eval\(\)"):
        list(found.run(4, {"lr": 0.1}, 2))


def test_an_error_of_a_step_names_the_trial() -> None:
    def short(step: int, settings: dict[str, Any]) -> Any:
        if step == 3:
            raise OSError("no such file")
        return data(step, settings)

    found = dt.Stages(new_step(), data=short, name="short", seed=0)
    with pytest.raises(OSError, match="no such file") as caught:
        list(found.run(7, {"lr": 0.25}, 5))
    assert caught.value.__notes__ == ["daceml_train: in step 3 of trial 7, with lr=0.25"]
    assert dict(found.run(8, {"lr": 0.25}, 2)) == {2: None}


def test_roots_tell_what_differs() -> None:
    roots = {"as it is": stages(seed=0), "seed": stages(seed=1)}
    roots["option"] = stages(seed=0, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.8))
    roots["initial"] = stages(seed=0)
    with torch.no_grad():
        roots["initial"].step.model.last.bias[0] += 1e-6
    roots["initial"] = dt.Stages(roots["initial"].step, data=data, evaluate=accuracy, seed=0)
    shifted = X + 1
    roots["data"] = dt.Stages(new_step(), data=lambda step, settings: (shifted, Y), seed=0)
    shifted_more = shifted + 1
    roots["other data"] = dt.Stages(new_step(), data=lambda step, settings: (shifted_more, Y), seed=0)
    roots["clipped"] = dt.Stages(new_step(clip_norm=1.0), data=data, evaluate=accuracy, seed=0)
    torch.set_num_threads(2)
    roots["threads"] = stages(seed=0)
    torch.set_num_threads(1)
    assert len({found.root for found in roots.values()}) == len(roots)
    assert stages(seed=0).root == roots["as it is"].root
    with pytest.raises(dt.Invalid, match="1 threads, the trials were started with 2"):
        next(roots["threads"].run(0, {"lr": 0.1}, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dt.Stages(nn.Linear(2, 2), data=data), "takes a training step, given Linear"),
        (lambda: dt.Stages(new_step(), data=None), "data is a function"),
        (lambda: stages().run(0, {"learning_rate": 0.1}, 3), "nothing takes the setting 'learning_rate'"),
        (lambda: stages().run(0, {"lr[3]": 0.1}, 3), r"nothing takes the setting 'lr\[3\]'"),
        (lambda: stages().run(0, {"momentun": 0.1}, 3), "did you mean 'momentum'"),
        (lambda: stages().run(0, {"lr": object()}, 3), "'lr' is object"),
        (lambda: stages().run("first", {"lr": 0.1}, 3), "a trial is a number or has one"),
        (lambda: stages().run(0, {"lr": 0.1}, (3, 2)), "until names steps in order"),
        (lambda: stages().run(0, {"lr": 0.1}, 0), "positive number of steps"),
        (lambda: dt.Stages(new_step(), data=object().__eq__), "whose content cannot be told"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(dt.Invalid, match=message):
        call()


def test_a_plan_tells_what_keeps_trials_apart() -> None:
    found = stages()
    late = found.plan(TRIALS, 12)
    assert (late.requested, late.steps, late.trials, late.distinct) == (96, 48, 8, 8)
    assert "2.00 times fewer" in str(late) and "lr parts trials at 7 points, from the first step on" in str(late)
    apart = found.plan([{"lr": 0.1 + n / 100} for n in range(5)], 10)
    assert "next to nothing is shared" in str(apart)
    assert found.report().steps == 0
