"""Turns: one process builds what several need, the others wait for it; a killed one leaves the turn to the next."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from daceml_train.errors import CompilerError, Invalid
from daceml_train.storage.interruption import Interrupted, workers
from daceml_train.storage.turns import TIMEOUT, Turn, build_once, clear_turns, turn

SPAWN = multiprocessing.get_context("spawn")


def note(folder: Path, word: str) -> None:
    """One word in a log that several processes write."""
    with (folder / "log").open("a") as log:
        log.write(f"{word}\n")


def noted(folder: Path) -> list[str]:
    log = folder / "log"
    return log.read_text().split() if log.exists() else []


def build(folder: Path, seconds: float = 0.0, writes: bool = True, dies: bool = False) -> str:
    """Build `thing`, once for all."""
    path = folder / "thing"

    def make() -> str:
        note(folder, "begun")
        time.sleep(seconds)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if writes:
            path.write_text("made")
        note(folder, "done")
        return "made"

    return build_once(path, lambda: path.read_text() if path.exists() else None, make)


def worker(folder: Path, *options: object) -> None:
    assert build(folder, *options) == "made"


def started(folder: Path, *options: object) -> multiprocessing.process.BaseProcess:
    process = SPAWN.Process(target=worker, args=(folder, *options))
    process.start()
    return process


def until(condition: object) -> None:
    for _ in range(6000):
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


def test_one_of_several_processes_builds(tmp_path: Path) -> None:
    workers = [started(tmp_path, 0.3) for _ in range(4)]
    for process in workers:
        process.join()
    assert [p.exitcode for p in workers] == [0] * 4
    assert noted(tmp_path) == ["begun", "done"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "thing"]


def test_one_of_several_threads_builds(tmp_path: Path) -> None:
    threads = [threading.Thread(target=build, args=(tmp_path, 0.1)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert noted(tmp_path) == ["begun", "done"]


def test_a_killed_builder_leaves_its_turn_to_one_that_waits(tmp_path: Path) -> None:
    dead = started(tmp_path, 60.0)
    until(lambda: noted(tmp_path) == ["begun"])
    waiting = [started(tmp_path) for _ in range(2)]
    time.sleep(0.2)
    dead.kill()
    for process in waiting:
        process.join()
    assert [p.exitcode for p in waiting] == [0, 0]
    assert noted(tmp_path) == ["begun", "begun", "done"]  # one of the two


def test_what_a_killed_builder_leaves_is_removed(tmp_path: Path) -> None:
    process = started(tmp_path, 0.0, True, True)
    process.join()
    (left,) = (p for p in tmp_path.iterdir() if p.name != "log")
    with turn(tmp_path / "other") as state:
        clear_turns(tmp_path)
        assert state is Turn.MINE and not left.exists()
        assert [p.name for p in tmp_path.iterdir() if p.name != "log"] == [".turn-other"]


def test_those_who_wait_for_nothing_build_at_once(tmp_path: Path) -> None:
    """A builder that cannot store its result does not make the others build one after another."""
    threads = [threading.Thread(target=build, args=(tmp_path, 0.5, False)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    words = noted(tmp_path)
    assert words[:4] == ["begun", "done", "begun", "begun"] and len(words) == 6


def test_a_failing_build_ends_its_turn(tmp_path: Path) -> None:
    def fail() -> str:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build_once(tmp_path / "thing", lambda: None, fail)
    assert list(tmp_path.iterdir()) == [] and build(tmp_path) == "made"


def test_the_wait_has_a_limit_and_names_the_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "0.2")
    with turn(tmp_path / "thing") as mine:
        assert mine is Turn.MINE
        with pytest.warns(UserWarning, match=rf"waited 0.2 s for process {os.getpid()} on .*builds thing.*{TIMEOUT}"):
            assert build(tmp_path) == "made"
        with turn(tmp_path / "thing", wait=False) as state:
            assert state is Turn.BUSY
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "thing"]


def test_an_interrupted_call_waits_for_no_turn(tmp_path: Path) -> None:
    start = time.monotonic()
    with turn(tmp_path / "thing"), pytest.raises(KeyboardInterrupt), workers(1) as pool:
        waiting = pool.submit(build, tmp_path)
        while not waiting.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert isinstance(waiting.exception(), Interrupted) and noted(tmp_path) == []
    assert time.monotonic() - start < 10


def test_what_runs_is_finished_where_a_part_of_the_call_fails(tmp_path: Path) -> None:
    with pytest.raises(CompilerError), workers(1) as pool:
        running, next_one = pool.submit(build, tmp_path, 0.3), pool.submit(build, tmp_path / "other")
        while noted(tmp_path) != ["begun"]:
            time.sleep(0.01)
        raise CompilerError("one of the texts was refused")
    assert running.result() == "made" and next_one.cancelled()


def test_a_limit_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "soon")
    with pytest.raises(Invalid, match="'soon' is not a positive number of seconds"):
        build(tmp_path)


def test_without_locks_and_without_a_folder_each_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with turn(tmp_path / "none" / "thing") as state:
        assert state is Turn.NONE

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert build(tmp_path) == "made"


def test_a_forked_child_does_not_hold_what_its_parent_ended(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with turn(tmp_path / "thing"):
        child = os.fork()
        if not child:
            os.close(writer)
            os.read(reader, 1)  # until the parent is through
            os._exit(0)
    try:
        with turn(tmp_path / "thing", wait=False) as state:
            assert state is Turn.MINE
    finally:
        os.close(writer)
        os.waitpid(child, 0)
