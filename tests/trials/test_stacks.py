"""Stages that are trained together equal separate ones up to rounding, generators to the bit; the choice is measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.trials import stacks
from daceml_train.trials.stacks import Stacks
from daceml_train.trials.state import State
from daceml_train.trials.values import same
from tests.trials.net import TRIALS, accuracy, data, drops, new_step, stages

S = dt.schedule
pytestmark = pytest.mark.compiled


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are stacked whatever is measured."""
    monkeypatch.setattr(Stacks, "_measure", lambda self, stack, arguments: None)


def close(found: dt.Stages, other: dt.Stages, trials: list[dict[str, Any]], until: int) -> None:
    """The states at the ends of trials: tensors up to rounding, all else equal."""

    def compare(a: Any, b: Any, where: str) -> None:
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m: f"{where}: {m}")
        elif isinstance(a, dict):
            assert a.keys() == b.keys(), where
            for name in a:
                compare(a[name], b[name], f"{where}.{name}")
        elif isinstance(a, list):
            for place, (one, two) in enumerate(zip(a, b, strict=True)):
                compare(one, two, f"{where}[{place}]")
        else:
            assert same(a, b), where

    ends: list[State] = []
    for trial in trials:
        found.load(trial, until), other.load(trial, until)
        ends.append(found.training.snapshot())
        compare(ends[-1], other.training.snapshot(), "state")
    assert not all(same(ends[0]["tensors"], end["tensors"]) for end in ends), "trials differ"


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer] | None] = {
    "momentum": None,
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    # The bias before the normalization has a gradient of zero, which is computed as up to 5e-8 of rounding. At a rate of
    # 0.1, 12 steps move it by 12 * 0.1 * 5e-8 / eps: 6e-6 with an eps of 1e-3, less than the tolerance with this one.
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stages_together(name: str, at_once: None) -> None:
    together = stages(seed=0, optimizer=OPTIMIZERS[name], stacked=4)
    alone = stages(seed=0, optimizer=OPTIMIZERS[name])
    heard: list[tuple[int, int]] = []
    values = together.run_all(TRIALS, (6, 12), progress=lambda *done: heard.append(done))
    expected = alone.run_all(TRIALS, (6, 12))
    assert heard == [(done, 14) for done in range(14)]
    assert together.stacks is not None and together.stacks.refusal == ""
    first = 2 if name == "plain" else 0  # the first step of the others creates their state
    assert together.stacks.together == 12 + first
    for own, other in zip(values, expected, strict=True):
        assert own == pytest.approx(other, abs=0.02)
    close(together, alone, TRIALS, 12)
    report = together.report()
    assert (report.steps, report.requested, report.twice) == (48, 96, 0)


def test_settings_of_each_trial(at_once: None) -> None:
    """Values change within a stage, at other steps in each trial; `apply` sets a number of the model."""

    def new(**options: Any) -> dt.Stages:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = dt.training_step(model, nn.functional.cross_entropy, optimizer, clip_norm=1.0)

        def apply(settings: dict[str, Any]) -> None:
            model[2].p = settings["p"]

        return dt.Stages(step, data=data, evaluate=accuracy, apply=apply, name="numbers", seed=0, **options)

    trials = [
        {"lr": S.piecewise({0: 0.1, 4: lr, 4 + n: lr / 2}), "p": S.piecewise({0: 0.2, 4: p}), "momentum": 0.9}
        for n, (lr, p) in enumerate([(0.2, 0.1), (0.1, 0.4), (0.05, 0.3)], 2)
    ]
    together, alone = new(stacked=3), new()
    together.run_all(trials, 12), alone.run_all(trials, 12)
    assert together.stacks is not None and together.stacks.together == 3
    close(together, alone, trials, 12)


def test_what_does_not_fit_is_trained_alone(at_once: None) -> None:
    """Another batch size, and an option that becomes zero."""
    trials: list[dict[str, Any]] = [
        {"lr": S.piecewise({0: 0.1, 4: 0.05}), "batch": 16},
        {"lr": S.piecewise({0: 0.1, 4: 0.02}), "batch": S.piecewise({0: 16, 4: 24})},
        {"lr": S.piecewise({0: 0.1, 4: 0.01}), "batch": 16, "momentum": S.piecewise({0: 0.9, 6: 0.0})},
        {"lr": S.piecewise({0: 0.1, 4: 0.03}), "batch": 16, "momentum": S.piecewise({0: 0.9, 6: 0.0})},
    ]
    together, alone = stages(seed=0, stacked=4), stages(seed=0)
    together.run_all(trials, 9), alone.run_all(trials, 9)
    assert together.stacks is not None and together.stacks.together == 0
    for trial in trials:
        together.load(trial, 9), alone.load(trial, 9)
        assert same(together.training.snapshot(), alone.training.snapshot())


def test_an_operator_without_a_rule_is_a_reason(at_once: None) -> None:
    def new(**options: Any) -> dt.Stages:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.LSTM(4, 4))
        step = dt.training_step(
            model, lambda out, y: out[0].square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)
        )
        return dt.Stages(step, data=data, seed=0, **options)

    together, alone = new(stacked=2), new()
    trials = [drops(0.1, 0.5, 0.5, at=(3, 5)), drops(0.1, 0.2, 0.5, at=(3, 5))]
    together.run_all(trials, 6), alone.run_all(trials, 6)
    assert together.stacks is not None
    if together.stacks.together == 0:
        assert together.stacks.refusal
    for trial in trials:
        together.load(trial, 6), alone.load(trial, 6)
        for a, b in zip(together.step.model.parameters(), alone.step.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_the_faster_way_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0] * stacks.SAMPLES + [2.0] * stacks.SAMPLES)
    monkeypatch.setattr(stacks, "_seconds", lambda call: (call(), next(times))[1])
    fast = stages(seed=0, stacked=4)
    fast.run_all(TRIALS, 12)
    assert fast.stacks is not None and fast.stacks.together == 12
    times = iter([9.0] * stacks.SAMPLES + [2.0] * stacks.SAMPLES)
    slow, alone = stages(seed=0, stacked=4), stages(seed=0)
    assert slow.run_all(TRIALS, 12) == alone.run_all(TRIALS, 12)
    assert slow.stacks is not None and slow.stacks.together == 0
    assert slow.stacks.refusal == "4 trials in one program are 0.89 times as fast as one at a time"
    slow.load(TRIALS[0], 12), alone.load(TRIALS[0], 12)
    assert same(slow.training.snapshot(), alone.training.snapshot())


def test_stacked_points_have_names_of_their_own(tmp_path: Path, at_once: None) -> None:
    roots = {stages(seed=0, stacked=count).root for count in (1, 2, 4)}
    assert len(roots) == 3
    together = stages(tmp_path, seed=0, stacked=4)
    values = together.run_all(TRIALS, 12)
    assert stages(tmp_path, seed=0, stacked=4).run_all(TRIALS, 12) == values
    with pytest.raises(dt.Invalid, match="stacked is a whole number from 1 on"):
        stages(stacked=0)


def test_batch_sizes_are_settings(at_once: None) -> None:
    """Each size is a program of its own."""
    trials = [{"lr": rate, "batch": batch} for rate in (0.1, 0.05) for batch in (8, 16)]
    values = stages(seed=0, stacked=2).run_all(trials, 6)
    expected = stages(seed=0).run_all(trials, 6)
    assert [own[6] for own in values] == pytest.approx([other[6] for other in expected], abs=0.02)


def test_an_error_of_data_names_the_step(at_once: None) -> None:
    def short(step: int, settings: dict[str, Any]) -> Any:
        if step == 2:
            raise OSError("no such file")
        return data(step, settings)

    step = new_step(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    together = dt.Stages(step, data=short, seed=0, stacked=2)
    with pytest.raises(OSError, match="no such file") as error:
        together.run_all([{"lr": dt.schedule.piecewise({0: 0.1, 2: rate})} for rate in (0.2, 0.3)], 4)
    assert "daceml_train: in step 2 of" in error.value.__notes__[-1]
