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
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dt.Invalid, match=message):
        stages(**options)


def test_settings_that_are_no_dictionary() -> None:
    with pytest.raises(dt.Invalid, match="the settings of a trial are a dictionary by name, given list"):
        stages().run(0, [("lr", 0.1)], 2)  # type: ignore[arg-type]


def test_a_setting_of_another_type_names_the_trial() -> None:
    with pytest.raises(TypeError) as error:
        dict(stages().run(3, {"lr": "fast"}, 2))
    assert note(error) == "daceml_train: in step 0 of trial 3, with lr='fast'"


def test_an_apply_that_fails_names_the_trial() -> None:
    def apply(settings: dict[str, Any]) -> None:
        raise AttributeError("no such layer")

    with pytest.raises(AttributeError) as error:
        dict(stages(apply=apply).run(4, {"p": 0.1}, 2))
    assert note(error) == "daceml_train: in step 0 of trial 4, with p=0.1"


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, "evaluate returned NoneType"), ("good", "evaluate returned 'good'"), (torch.ones(2), "returned Tensor")],
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
