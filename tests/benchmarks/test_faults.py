"""The sweep of faults: a child that hangs, fails or computes something else is found."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.endurance.__main__ import well as endured
from benchmarks.faults.__main__ import RESULTS, well, without
from benchmarks.faults.children import begin, finished
from benchmarks.faults.kills import _judge
from benchmarks.faults.training import Trained


def judged(function, limit: float = 30.0) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"hangs": [], "failed": [], "wrong": []}
    _judge(found, "run", finished(function, limit))
    return {key: value for key, value in found.items() if value}


def test_what_a_child_did_is_told_apart() -> None:
    assert judged(lambda marks: Trained((1.0,), (1.0 + 1e-15,), True, ())) == {}
    assert list(judged(lambda marks: Trained((1.0,), (1.0 + 1e-9,), True, ()))) == ["wrong"]
    assert list(judged(lambda marks: Trained((float("nan"),), (1.0,), True, ()))) == ["wrong"]
    assert list(judged(lambda marks: Trained((1.0,), (1.0,), False, ("why",)))) == ["failed"]
    assert "ZeroDivisionError" in judged(lambda marks: 1 / 0)["failed"][0]
    assert list(judged(lambda marks: os.kill(os.getpid(), signal.SIGKILL))) == ["failed"]
    assert list(judged(lambda marks: time.sleep(60), 0.3)) == ["hangs"]


def test_a_child_is_killed_at_the_moment_it_told_of() -> None:
    def work(marks: int) -> None:
        os.write(marks, b"build\nstep\n")
        time.sleep(60)

    child = begin(work)
    child.listen(time.monotonic() + 1)
    child.kill()
    child.end()
    assert child.moment == "step" and child.result is None and not child.hung


def test_anything_found_is_not_well() -> None:
    assert well({"wrong": [], "left": [], "hangs": 0})
    assert not well({"left": ["x"]}) and not well({"hangs": 1}) and not well({"next run right": False})


def test_results_hold_no_paths_of_the_machine() -> None:
    told = {"said": ["/tmp/x-1/cache cannot be written", "no"], "kills": {"hangs": 0, "failed": ["in /tmp/x-1"]}}
    assert "/tmp" not in str(without(told, "/tmp/x-1"))
    assert without(told, "/tmp/y") == told
    assert "/tmp" not in RESULTS.read_text()


def test_endurance_parts_are_well_together() -> None:
    assert endured({"steps": {"commit": "a", "growth": 0.0, "difference": 1e-16, "breaks": 0}, "threads": {}})
    assert not endured({"steps": {"commit": "a", "mlp": {"growth": 0.02}}})
    assert not endured({"threads": {"difference": 1e-3}})
