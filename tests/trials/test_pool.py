"""Trials on several processes: the values of one process, also where processes are killed."""

import functools
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import daceml_train as dt
from daceml_train.trials.pool import TrialFailed, _Pool, run_trials
from tests.driver.ranks import IMPORTED
from tests.trials.net import TRIALS, always_killing, drops, killing, raising, stages, stored
from tests.trials.test_stages import equal_to_alone

pytestmark = [pytest.mark.compiled, pytest.mark.slow]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a pool are forked from one that has imported what they need: a second instead of ten for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    monkeypatch.setattr("daceml_train.trials.pool.multiprocessing.get_context", lambda method: context)


def test_processes_train_each_stage_once(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    values = run_trials(functools.partial(stored, tmp_path), TRIALS, (6, 12), progress=lambda *n: heard.append(n))
    found = stored(tmp_path)
    equal_to_alone(found, TRIALS, values, name="numbers")
    report = found.report()
    assert (report.requested, report.steps, report.twice) == (96, 48, 0)
    assert heard[-1] == (14, 14)


def test_progress_does_not_go_backwards() -> None:
    """Each process tells what it knew at a moment of its own."""
    heard: list[tuple[int, int]] = []
    job: Any = None
    pool = _Pool(job, 0, lambda *stages: heard.append(stages))
    ours, its = multiprocessing.Pipe(duplex=False)
    pool.running[ours] = None
    for done in (1, 3, 2):
        its.send(("stage", ("trial 0, steps 0 to 3", done, 4)))
        pool.listen()
    assert heard == [(1, 4), (3, 4), (3, 4)]


@pytest.mark.usefixtures("forked")
def test_killed_processes_lose_their_stage_alone(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    mortal = functools.partial(killing, marks)
    values = run_trials(functools.partial(stored, tmp_path, mortal), TRIALS[:4], (6, 12), workers=2)
    assert len(list(marks.iterdir())) == 3
    found = stored(tmp_path, mortal)
    equal_to_alone(found, TRIALS[:4], values, name="numbers")
    assert found.report().steps == 6 + 2 * 3 + 4 * 3


@pytest.mark.usefixtures("forked")
def test_two_searches_at_once_on_one_storage(tmp_path: Path) -> None:
    """Two programs, each with processes of its own, search overlapping trials: no stage is trained twice."""
    searches = {"first": TRIALS[:6], "second": TRIALS[2:]}
    values: dict[str, list[dict[int, Any]]] = {}

    def search(name: str) -> None:
        values[name] = run_trials(functools.partial(stored, tmp_path), searches[name], (6, 12), workers=2)

    threads = [threading.Thread(target=search, args=(name,)) for name in searches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = stored(tmp_path)
    for name, trials in searches.items():
        equal_to_alone(found, trials, values[name], name="numbers")
    report = found.report()
    assert (report.requested, report.steps, report.twice) == (2 * 6 * 12, 48, 0)
    assert len(report.workers) > 1


def test_damaged_ends_and_values_name_their_trials(tmp_path: Path) -> None:
    first = stored(tmp_path)
    first.run_all(TRIALS[:2], 12)
    for file in (tmp_path / first.root / "points").glob("000000012-*"):
        file.write_bytes(file.read_bytes()[:-9])
    for file in (tmp_path / first.root / "values").glob("*.json"):
        file.write_bytes(b"{")
    other = stored(tmp_path)
    with pytest.warns(UserWarning, match="the checkpoint of trial [01] after 12 steps is damaged"):
        values = other.run_all(TRIALS[:3], 12)
    equal_to_alone(other, TRIALS[:3], values, name="numbers")


@pytest.mark.usefixtures("forked")
def test_a_stage_that_kills_its_process_names_its_trial(tmp_path: Path) -> None:
    with pytest.raises(
        TrialFailed, match="trial 0, steps 0 to 3: its process ended 2 times, the last time by signal 9"
    ):
        run_trials(functools.partial(stored, tmp_path, always_killing), TRIALS[:1], 3, workers=1, restarts=1)


@pytest.mark.usefixtures("forked")
def test_an_error_names_its_trial(tmp_path: Path) -> None:
    with pytest.raises(
        TrialFailed, match=r"(?s)trial 1, steps 6 to 9 .*no such file.*in step 7 of trial 1, with lr=0.01"
    ):
        run_trials(
            functools.partial(stored, tmp_path, raising),
            [drops(0.1, 0.5, 0.5), drops(0.1, 0.1, 0.5)],
            (9, 12),
            workers=1,
        )


@pytest.mark.usefixtures("forked")
def test_a_pool_needs_a_storage() -> None:
    with pytest.raises(TrialFailed, match="needs a storage"):
        run_trials(functools.partial(stages, None), TRIALS[:1], 3, workers=1)
    with pytest.raises(dt.Invalid, match="workers is a whole number from 1 on"):
        run_trials(functools.partial(stages, None), TRIALS[:1], 3, workers=0)
    assert torch.get_num_threads() == 1
