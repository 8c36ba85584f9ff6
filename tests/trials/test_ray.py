"""Ray Tune places trials on its processes; values equal those of separate trials, and no stage is trained twice."""

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import daceml_train as dt
from tests.trials.net import TRIALS, accuracy, data, drops, new_step, stages
from tests.trials.test_stages import alone, equal_to_alone

ray = pytest.importorskip("ray")
from ray import tune  # noqa: E402 - after the skip
from ray.tune.schedulers import PopulationBasedTraining  # noqa: E402

pytestmark = [pytest.mark.compiled, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two processes of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home folder
        patch.setenv("RAY_AIR_NEW_OUTPUT", "0")
        root = str(Path(__file__).parents[2])
        around = {"env_vars": {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}}
        ray.init(num_cpus=2, include_dashboard=False, runtime_env=around, logging_level=logging.ERROR)
        yield
        ray.shutdown()


def stored(folder: Path) -> dt.Stages:
    return dt.Stages(new_step(), data=data, evaluate=accuracy, storage=folder / "stages", seed=0)


def tuned(found: dt.Stages, folder: Path, space: dict[str, Any], **options: Any) -> Any:
    own = tune.TuneConfig(reuse_actors=True, **options)
    run = tune.RunConfig(storage_path=str(folder / "ray"), verbose=0)
    results = tune.Tuner(found.trainable, param_space=space, tune_config=own, run_config=run).fit()
    assert not results.errors
    return results


def test_a_grid(tmp_path: Path) -> None:
    found = stored(tmp_path)
    space = {"until": (6, 12), "lr": tune.grid_search([trial["lr"] for trial in TRIALS])}
    results = tuned(found, tmp_path, space, metric="value", mode="max")
    frames = [result.metrics_dataframe for result in results]
    values = [dict(zip(frame["steps"], frame["value"], strict=True)) for frame in frames]
    trials = [{"lr": result.config["lr"]} for result in results]
    equal_to_alone(found, trials, values)
    report = found.report()
    assert (report.requested, report.steps, report.twice) == (96, 48, 0)
    assert results.get_best_result().metrics["value"] == max(value[12] for value in values)


def test_an_objective_of_the_user(tmp_path: Path) -> None:
    """A function that Ray pickles may refer to the stages."""
    found = stored(tmp_path)

    def objective(config: dict[str, Any]) -> None:
        settings = drops(config["lr"], config["first"], 0.5)
        for steps, value in found.run(0, settings, until=12):
            tune.report({"accuracy": value, "steps": steps})

    space = {"lr": 0.1, "first": tune.grid_search([0.5, 0.1])}
    run = tune.RunConfig(storage_path=str(tmp_path / "ray"), verbose=0)
    results = tune.Tuner(objective, param_space=space, run_config=run).fit()
    for result in results:
        expected, _ = alone(drops(0.1, result.config["first"], 0.5), (12,))
        assert result.metrics["accuracy"] == expected[12]
    assert found.report().steps == 6 + 2 * 6


def test_population_based_training_forks(tmp_path: Path) -> None:
    """A member that takes over another one's checkpoint begins a fork there: its values are those of a separate trial
    with the joined settings, and the steps before the fork are not trained again."""
    found = stored(tmp_path)
    random.seed(1)  # what the scheduler draws from
    scheduler = PopulationBasedTraining(
        time_attr="steps",
        perturbation_interval=4,
        hyperparam_mutations={"lr": [0.2, 0.1, 0.05, 0.001]},
        quantile_fraction=0.5,
        resample_probability=0.5,
        synch=True,
    )
    space = {"until": (4, 8, 12, 16), "lr": tune.grid_search([0.2, 0.1, 0.05, 0.001])}
    results = tuned(found, tmp_path, space, metric="value", mode="max", scheduler=scheduler)
    forked = 0
    for result in results:
        with result.checkpoint.as_directory() as folder:
            content = json.loads((Path(folder) / "settings.json").read_text())
        rates = {start: dict(values)["lr"] for start, values in content["settings"]}
        forked += len(rates) > 1
        expected, _ = alone({"lr": dt.schedule.piecewise(rates)}, (content["steps"],))
        assert content["steps"] == 16 and result.metrics["value"] == expected[16]
    assert forked, "some members took over others' weights with other rates"
    report = found.report()
    assert report.twice == 0 and report.steps < 4 * 16 + 1


def test_a_process_that_is_killed_costs_its_stage(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def killing(step: int, settings: dict[str, Any]) -> Any:
        if step == 7 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return data(step, settings)

    found = dt.Stages(new_step(), data=killing, evaluate=accuracy, storage=tmp_path / "s", seed=0, name="numbers")
    failures = tune.FailureConfig(max_failures=2)
    run = tune.RunConfig(storage_path=str(tmp_path / "ray"), verbose=0, failure_config=failures)
    space = {"until": (6, 12), "lr": tune.grid_search([trial["lr"] for trial in TRIALS[:4]])}
    results = tune.Tuner(found.trainable, param_space=space, run_config=run).fit()
    assert mark.exists() and not results.errors
    for result in results:
        expected, _ = alone({"lr": result.config["lr"]}, (12,), name="numbers")
        assert result.metrics["value"] == expected[12]
    report = found.report()
    assert (report.steps, report.twice) == (6 + 2 * 3 + 4 * 3, 0)


def test_the_example(tmp_path: Path) -> None:
    """It finds the accuracy that it states, and trains each stage once."""
    example = Path(__file__).parents[2] / "examples" / "search" / "ray_tune.py"
    around = {**os.environ, "PYTHONPATH": str(example.parents[2])}
    ran = subprocess.run([sys.executable, example], env=around, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert re.search(r"best accuracy 0\.9[3-9]", ran.stdout) and "3200 steps asked for, 1240 trained" in ran.stdout
    page = re.search(r"the tree is in (\S+)", ran.stdout)
    assert page is not None and "The tree of stages" in Path(page[1]).read_text()


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(dt.Invalid, match="how many steps"):
        stored(tmp_path).trainable({"lr": 0.1})
    with pytest.raises(dt.Invalid, match="share a storage"):
        stages(seed=0).trainable({"lr": 0.1, "until": 3})
