"""Optuna decides, with its samplers and pruners as they are; what it is told equals what separate trials tell it."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.trials.net import drops, stages

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.compiled
RUNGS = (2, 6, 12)
SEARCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "random, successive halving": (lambda: optuna.samplers.RandomSampler(seed=1), lambda: optuna.pruners.SuccessiveHalvingPruner(2, 2)),
    "TPE, Hyperband": (lambda: optuna.samplers.TPESampler(seed=1, n_startup_trials=5), lambda: optuna.pruners.HyperbandPruner(2, 12, 2)),
}  # fmt: skip


def search(sampler: Any, pruner: Any, shared: bool) -> tuple[list[Any], Any, int, int]:
    found, told, steps, asked = stages(seed=0), [], 0, 0

    def objective(trial: Any) -> float:
        nonlocal steps, asked
        lr = trial.suggest_categorical("lr", [0.2, 0.05])
        settings = drops(lr, *(trial.suggest_categorical(name, [0.5, 0.1]) for name in ("first", "second")))
        own = found if shared else stages(seed=0)
        value = 0.0
        try:
            for reached, value in own.run(trial, settings, RUNGS):
                told.append((trial.number, reached, value))
                trial.report(value, reached)
                if trial.should_prune():
                    raise optuna.TrialPruned()
        finally:
            if not shared:
                steps, asked = steps + own.report().steps, asked + own.report().requested
        return value

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner, study_name="digits")
    study.optimize(objective, n_trials=12)
    if shared:
        steps, asked = found.report().steps, found.report().requested
    return told, (study.best_trial.number, study.best_params, study.best_value), steps, asked


@pytest.mark.parametrize("name", SEARCHES)
def test_values_and_best_trial_are_those_of_separate_trials(name: str) -> None:
    sampler, pruner = SEARCHES[name]
    told, best, steps, asked = search(sampler(), pruner(), shared=True)
    told_alone, best_alone, steps_alone, asked_alone = search(sampler(), pruner(), shared=False)
    assert told == told_alone
    assert best == best_alone
    assert asked == asked_alone == steps_alone
    assert steps < asked
