"""What users get wrong: each error names the cause, and the trial where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import daceml_train as dt
from daceml_train.trials.ray_tune import continued, history
from tests.trials.net import X, Y, accuracy, data, new_step, stages

pytestmark = pytest.mark.compiled


def note(error: pytest.ExceptionInfo[Any]) -> str:
    return error.value.__notes__[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "s3://bucket/study"}, "storage is a folder with locks, given the URL s3://bucket/study"),
        ({"storage": 5}, "storage is a folder, given 5"),
        ({"storage": "/proc/none"}, "the storage /proc/none cannot be used: .*No such file"),
        ({"memory": "1 GiB"}, "memory is a whole number from 1 on, given '1 GiB'"),
        ({"stacked": 0}, "stacked is a whole number from 1 on, given 0"),
        ({"spacing": True}, "spacing is a whole number from 1 on, given True"),
        ({"save_at": (5, "x")}, "save_at names steps from 1 on, given .5, 'x'."),
        ({"storage": ""}, "storage is a folder, given an empty name"),
        ({"seed": 1.5}, "seed is a whole number, given 1.5"),
        ({"name": 5}, "name is a text, given 5"),
        ({"also": [1]}, r"also is a dictionary of objects by name, given \[1\]"),
        ({"also": {"mean": 1}}, r"also\['mean'\] has no state_dict\(\) and load_state_dict\(\), given int"),
        ({"data_settings": (1,)}, "data_settings names settings, given .1,."),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dt.Invalid, match=message):
        stages(**options)


def test_ranks_that_would_wait_for_each_other() -> None:
    step = new_step()
    step.ranks = object()  # type: ignore[assignment]
    for options, what in (({"storage": "points"}, "a storage"), ({"stacked": 2}, "stacked=")):
        with pytest.raises(dt.Invalid, match=f"several ranks train together has no {what}: a rank that finds a point"):
            dt.Stages(step, data=data, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda own: own.run(0, {"lr": np.ones(3)}, 2), r"the setting 'lr' is ndarray of shape \(3,\)"),
        (lambda own: own.run(0, {"lr": 0.1}, 2.0), "until is a positive number of steps, .* given 2.0"),
        (lambda own: own.load({"lr": 0.1}, "3"), "steps is a whole number from 1 on, given '3'"),
        (lambda own: own.plan(object(), 2), "trials is a list of settings, a dictionary for each trial, given object"),
        (lambda own: own.run_all({"lr": 0.1}, 2), "trials is a list of settings, .* given dict"),
        (lambda own: own.run_all([{"lr": 0.1}], 2, progress=5), "progress is a function of .*, given 5"),
        (
            lambda own: dt.run_trials(5, [{"lr": 0.1}], 2),
            "make is a function that returns a daceml_train.Stages, given int",
        ),
        (lambda own: dt.run_trials(stages, {"lr": 0.1}, 2), "trials is a list of settings, .* given dict"),
        (lambda own: dt.run_trials(stages, [{"lr": 0.1}], 2, workers="2"), "workers is a whole number from 1 on"),
        (lambda own: dt.run_trials(stages, [{"lr": 0.1}], 2, restarts=-1), "restarts is a whole number from 0 on"),
        (lambda own: dt.schedule.steps(0.1, [5]), r"steps\(start, drops\) takes a dictionary by step, given \[5\]"),
        (lambda own: dt.schedule.piecewise(None), r"piecewise\(values\) takes a dictionary by step, given None"),
    ],
)
def test_arguments(call: Any, message: str) -> None:
    with pytest.raises(dt.Invalid, match=message):
        call(stages())


def test_numbers_of_numpy_and_a_single_name_are_taken(tmp_path: Path) -> None:
    own = stages(tmp_path, data_settings="batch", seed=0)
    assert [step for step, _ in own.run(np.int64(0), {"lr": np.float64(0.1), "batch": 8}, np.array([1, 2]))] == [1, 2]
    assert [*dict(own.run(1, {"lr": 0.1, "batch": 8}, np.int64(2)))] == [2]
    own.load({"lr": 0.1, "batch": 8}, np.int64(3))  # type: ignore[arg-type]
    assert own.report().steps == 3
    assert own.path({"lr": np.float64(0.1), "batch": np.str_("a")}, 1).segments[0].settings == (
        ("batch", "a"),
        ("lr", 0.1),
    )
    assert type(own.path({"batch": np.str_("a")}, 1).segments[0].settings[0][1]) is str


def test_an_optimizer_that_keeps_a_count_among_its_options() -> None:
    class Slowing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1

    own = stages(optimizer=lambda model: Slowing(model.parameters(), lr=0.1))
    with pytest.raises(dt.Invalid, match="a step changed 'steps' in a parameter group of the optimizer") as error:
        dict(own.run(3, {"lr": 0.1}, 2))
    assert note(error).startswith("daceml_train: in step 1 of trial 3")


def ending(step: int, settings: dict[str, Any]) -> Any:
    return next(iter(()))


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda own: list(own.run(3, {"lr": 0.1}, 2)), "in step 0 of trial 3, with lr=0.1"),
        (lambda own: own.load({"lr": 0.1}, 2), "in step 0 of the trial that is loaded, with lr=0.1"),
    ],
)
def test_an_iterator_that_ends_names_the_trial(call: Any, where: str) -> None:
    with pytest.raises(RuntimeError, match="no further element: StopIteration") as error:
        call(dt.Stages(new_step(), data=ending))
    assert note(error) == f"daceml_train: {where}"


def test_an_apply_that_changes_what_is_trained() -> None:
    step = new_step()

    def apply(settings: dict[str, Any]) -> None:
        with torch.no_grad():
            step.model.last.bias.fill_(settings["bias"])

    own = dt.Stages(step, data=data, evaluate=accuracy, apply=apply)
    with pytest.raises(dt.Invalid, match="apply changed last.bias; apply sets what steps leave as it is") as error:
        dict(own.run(6, {"bias": 0.5}, 2))
    assert note(error) == "daceml_train: before the evaluation of trial 6 after 2 steps"


def test_a_tensor_that_apply_writes_may_change() -> None:
    weight = torch.ones(4)

    def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, target, weight)

    model = torch.nn.Linear(8, 4)
    step = dt.training_step(model, weighted, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = X.clone()

    def own_data(step: int, settings: dict[str, Any]) -> Any:
        return inputs[:16] * weight[0], Y[:16]

    own = dt.Stages(step, data=own_data, evaluate=accuracy, apply=lambda s: weight.fill_(s["w"]), seed=0)
    assert len(own.run_all([{"w": 0.5}, {"w": 0.25}], 2)) == 2


def test_settings_that_the_history_of_a_trial_lacks() -> None:
    before = history(stages().path({"lr": 0.1}, 4), 2)
    with pytest.raises(dt.Invalid, match="goes on from a point that was trained without the setting 'momentum'"):
        continued(before, {"lr": 0.1, "momentum": 0.5})


def test_settings_that_are_no_dictionary() -> None:
    with pytest.raises(dt.Invalid, match="the settings of a trial are a dictionary by name, given list"):
        stages().run(0, [("lr", 0.1)], 2)  # type: ignore[arg-type]


def test_a_setting_of_another_type_names_the_trial() -> None:
    with pytest.raises(TypeError) as error:
        dict(stages().run(3, {"lr": "fast"}, 2))
    assert note(error) == "daceml_train: in step 0 of trial 3, with lr='fast'"


def test_an_apply_that_fails_names_the_trial() -> None:
    """What the next trial is called is not compared with the name that was mistyped."""

    def apply(settings: dict[str, Any]) -> None:
        if settings.keys() != {"p"}:
            raise AttributeError("no such layer")

    own = stages(apply=apply)
    with pytest.raises(AttributeError) as error:
        dict(own.run(4, {"q": 0.1}, 2))
    assert note(error) == "daceml_train: in step 0 of trial 4, with q=0.1"
    assert len(dict(own.run(5, {"p": 0.1}, 2))) == 1
    with pytest.raises(dt.Invalid, match="a trial has the settings 'q' for apply, earlier ones had 'p'"):
        dict(own.run(6, {"q": 0.1}, 2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "evaluate returned NoneType"),
        ("good", "evaluate returned 'good'"),
        (torch.ones(2), "returned Tensor"),
        (np.ones(2), "returned ndarray"),
        ({1, 2}, "returned set"),
        ({"loss": 1j}, "returned 1j"),
    ],
)
def test_an_evaluation_without_a_number(value: Any, message: str) -> None:
    own = dt.Stages(new_step(), data=data, evaluate=lambda model: value)
    with pytest.raises(dt.Invalid, match=message) as error:
        dict(own.run(2, {"lr": 0.1}, 3))
    assert note(error) == "daceml_train: in the evaluation of trial 2 after 3 steps"


def test_data_that_count_their_calls() -> None:
    calls = [0]

    def counting(step: int, settings: dict[str, Any]) -> Any:
        calls[0] += 1
        return data(calls[0], settings)

    own = dt.Stages(new_step(), data=counting, name="counted")
    with pytest.raises(
        dt.Invalid, match=r"data\(0, ...\) returned other arguments when it was called a second"
    ) as error:
        dict(own.run(1, {"lr": 0.1}, 3))
    assert note(error).startswith("daceml_train: in step 0 of trial 1")


def test_data_that_draw_at_their_first_call_only() -> None:
    drawn: list[Any] = []

    def drawing(step: int, settings: dict[str, Any]) -> Any:
        if not drawn:
            drawn.append(torch.randperm(len(X)))
        return X[:16], Y[:16]

    own = dt.Stages(new_step(), data=drawing, seed=0)
    with pytest.raises(
        dt.Invalid, match=r"returned equal arguments and drew other numbers when it was called a second"
    ):
        dict(own.run(1, {"lr": 0.1}, 3))


def test_data_of_later_segments_that_count_their_calls() -> None:
    calls = [0]

    def counting(step: int, settings: dict[str, Any]) -> Any:
        calls[0] += step >= 2
        return data(calls[0], settings)

    own = dt.Stages(new_step(), data=counting, seed=0)
    with pytest.raises(dt.Invalid, match=r"data\(2, ...\) returned other arguments"):
        dict(own.run(1, {"lr": dt.schedule.piecewise({0: 0.1, 2: 0.05})}, 4))


@pytest.mark.parametrize("role", ["data", "evaluate"])
@pytest.mark.parametrize("change", ["SCALE = 2.0", "def inner(x): return x * 3"])
def test_globals_that_change_between_calls(role: str, change: str) -> None:
    scope: dict[str, Any] = {"X": X, "Y": Y, "torch": torch}
    exec(
        "SCALE = 1.0\ndef inner(x): return x * 2\nseen = []\n"
        "def data(step, settings): seen.append(step); return inner(X[:16]) * SCALE, Y[:16]\n"
        "def evaluate(model):\n    with torch.no_grad(): return model.eval()(inner(X)).sum() * SCALE",
        scope,
    )
    own = dt.Stages(new_step(), **({"data": data, "evaluate": accuracy} | {role: scope[role]}))
    dict(own.run(0, {"lr": 0.1}, 2)), dict(own.run(0, {"lr": 0.2}, 2))  # what a function writes itself may change
    exec(change, scope)
    with pytest.raises(dt.Invalid, match=f"{role} refers to {'SCALE' if 'SCALE' in change else 'inner'}, which has ch"):
        dict(own.run(1, {"lr": 0.3}, 2))


def test_data_that_draw_from_generators() -> None:
    def drawing(step: int, settings: dict[str, Any]) -> Any:
        chosen = torch.from_numpy(np.random.permutation(len(X))[:16])
        return X[chosen] + 0.01 * torch.randn(16, 8), Y[chosen]

    def end() -> Any:
        torch.manual_seed(5)
        np.random.seed(5)
        own = dt.Stages(new_step(), data=drawing, evaluate=accuracy, seed=0)
        own.load({"lr": 0.1}, 4)
        return own.training.snapshot()["generators"]["torch"], own.step.model.first.weight.detach().clone()

    step = new_step()
    torch.manual_seed(0)
    np.random.seed(0)
    for number in range(4):
        step(*drawing(number, {}))
    state, weight = end()
    assert torch.equal(weight, step.model.first.weight) and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["tensor", "array", "without a count"])
def test_data_that_change_between_trials(kind: str) -> None:
    inputs: Any = X.clone().numpy() if kind == "array" else X.clone()

    def own_data(step: int, settings: dict[str, Any]) -> Any:
        return torch.as_tensor(inputs[:16]), Y[:16]

    own = dt.Stages(new_step(), data=own_data, evaluate=accuracy)
    dict(own.run(0, {"lr": 0.1}, 3))
    if kind == "tensor":
        inputs += 1
    else:
        (inputs if kind == "array" else inputs.data)[:] = 1
    with pytest.raises(
        dt.Invalid, match=r"data refers to an? (tensor|array) of shape .120, 8. and type float32"
    ) as error:
        dict(own.run(1, {"lr": 0.2}, 3))
    assert note(error) == "daceml_train: in step 0 of trial 1, with lr=0.2"


def test_an_evaluation_whose_data_change() -> None:
    inputs = X.clone()

    def own_accuracy(model: Any) -> Any:
        model.eval()
        with torch.no_grad():
            return (model(inputs).argmax(1) == Y).float().mean()

    own = dt.Stages(new_step(), data=data, evaluate=own_accuracy)
    dict(own.run(0, {"lr": 0.1}, 3))
    inputs.zero_()
    with pytest.raises(dt.Invalid, match="evaluate refers to a tensor of shape") as error:
        dict(own.run(1, {"lr": 0.2}, 3))
    assert note(error) == "daceml_train: in the evaluation of trial 1 after 3 steps"


def test_a_buffer_of_the_data_may_change() -> None:
    buffer = torch.empty(16, 8)

    def own_data(step: int, settings: dict[str, Any]) -> Any:
        return buffer.copy_(X[step : step + 16]), Y[step : step + 16]

    own = dt.Stages(new_step(), data=own_data, evaluate=accuracy)
    assert len(dict(own.run(0, {"lr": 0.1}, (2, 4))) | dict(own.run(1, {"lr": 0.2}, 6))) == 3


def damaged_log(folder: Path) -> None:
    for file in folder.rglob("*.jsonl"):
        file.write_bytes(file.read_bytes() + b"\xff\xfe{\n[1]\n")


def test_a_damaged_log(tmp_path: Path) -> None:
    own = stages(tmp_path)
    dict(own.run(0, {"lr": 0.1}, 3))
    before = own.report().steps
    damaged_log(tmp_path)
    assert own.report().steps == before == 3


def test_a_storage_that_is_removed(tmp_path: Path) -> None:
    own = stages(tmp_path / "study")
    running = own.run(0, {"lr": 0.1}, (2, 4))
    next(running)
    shutil.rmtree(tmp_path / "study")
    with pytest.raises(dt.Invalid, match=f"the storage {tmp_path}/study is gone"):
        next(running)


def test_what_processes_cannot_be_handed() -> None:
    make: Callable[[], dt.Stages] = lambda: stages()  # noqa: E731
    with pytest.raises(dt.Invalid, match="processes cannot be handed make and the trials.*lambda"):
        dt.run_trials(make, [{"lr": 0.1}], 3)
