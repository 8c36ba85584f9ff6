"""Stages are pickled as a recipe: another process trains the same trials to the same bits."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import daceml_train as dt
from daceml_train.trials.ray_tune import continued, history, number
from daceml_train.trials.recipe import Recipe, rebuilt
from daceml_train.trials.state import generators
from daceml_train.trials.values import same
from tests.trials.net import TRIALS, accuracy, data, drops, new_step, stages
from tests.trials.test_stages import equal_to_alone

pytestmark = pytest.mark.compiled


def test_a_copy_trains_the_same_trials() -> None:
    found = stages(seed=0)
    values = found.run_all(TRIALS[:3], 12)  # the model has moved: the copy starts where the trials do
    before = generators()
    copy: dt.Stages = pickle.loads(pickle.dumps(found))
    assert same(generators(), before)
    assert copy.root == found.root and copy.step.model is not found.step.model
    assert copy.run_all(TRIALS[:3], 12) == values
    equal_to_alone(copy, TRIALS[:3], values)
    assert copy.report().steps == copy.tree.steps()


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 1.0}, {"micro_batches": 2, "reduction": "mean"}, {"micro_batches": 2}, {"keep_gradients": True}],
    ids=str,
)
def test_options_of_the_step(options: dict[str, Any]) -> None:
    found = dt.Stages(new_step(**options), data=data, evaluate=accuracy, seed=0, save_at=(3,))
    copy = pickle.loads(pickle.dumps(found))
    assert type(copy.step) is type(found.step) and copy.options == found.options
    assert copy.run_all(TRIALS[:2], 12) == found.run_all(TRIALS[:2], 12)
    trial = drops(0.1, 0.5, 0.5)
    found.load(trial, 12), copy.load(trial, 12)
    assert same(found.training.snapshot(), copy.training.snapshot())


def test_first_options_of_the_optimizer_travel() -> None:
    found = stages(seed=0)
    found.load({"lr": 0.3, "momentum": 0.5}, 4)
    copy = pickle.loads(pickle.dumps(found))
    group = copy.step.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.1, 0.9)


def test_trials_that_are_others_elsewhere_are_refused() -> None:
    found = stages(seed=0)
    recipe = Recipe.of(found)
    recipe.start["tensors"]["model.last.bias"][0] += 1e-6
    with pytest.raises(dt.Invalid, match="others in this process: initial state"):
        rebuilt(dt.Stages, recipe)
    recipe = replace(Recipe.of(stages(seed=0)), root="another", parts={"versions": "torch 1.0"})
    with pytest.raises(dt.Invalid, match=r"versions \(torch 1.0 there, torch 2"):
        rebuilt(dt.Stages, recipe)


def test_settings_of_a_trial_that_goes_on(tmp_path: Path) -> None:
    found = stages(seed=0)
    lr = dt.schedule.warm_up(4, 0.1)
    path = found.path({"lr": lr, "batch": 16}, 12)
    steps, settings = continued(history(path, 6), {"lr": 0.05, "batch": 16})
    joined = found.path(settings, 12)
    assert steps == 6
    assert joined.key(6) == path.key(6)
    assert joined.key(12) == found.path({"lr": lr.then(6, 0.05), "batch": 16}, 12).key(12)
    assert number("4f2a1_00012") == 12 and number("trial") == 0
    same_settings = found.path(continued(history(path, 6), {"lr": lr, "batch": 16})[1], 12)
    assert same_settings.key(12) == path.key(12)


def test_known_forks_are_saved() -> None:
    """Trials arrive one by one: the second one parts from the first where this one has no checkpoint of its own."""
    trials = [drops(0.1, 0.5, 0.5, at=(8, 10)), drops(0.1, 0.5, 0.5, at=(5, 10))]
    steps = []
    for save_at in ((), (5,)):
        found = stages(seed=0, save_at=save_at)
        for place, trial in enumerate(trials):
            list(found.run(place, trial, 12))
        steps.append(found.report().steps)
    assert steps == [12 + 12, 12 + 7]
