"""The imperative programs: each is registered once, runs, and what differs from eager execution is noticed."""

import numpy as np
import pytest
import torch

from benchmarks.programs import page
from benchmarks.programs.__main__ import MODULES, Row, run
from benchmarks.programs.compared import differs, printed_differs
from benchmarks.programs.program import PROGRAMS
from benchmarks.programs.way import Way
from daceml_train.driver.step import TrainingStep


def test_the_programs_span_state_schedules_flow_libraries_and_structures() -> None:
    assert len(PROGRAMS) >= 24 and len(MODULES) == 5
    assert {program.__module__ for program in PROGRAMS.values()} == {module.__name__ for module in MODULES}


@pytest.mark.parametrize("name", ["early exit", "teacher forcing", "NumPy noise", "experts in lists"])
def test_eager_execution_is_like_itself(name: str) -> None:
    one, other = Way(name, "eager"), Way(name, "eager")
    for number in range(2):
        one.step(number)
        torch.rand(3)  # of no effect: each way has streams of its own
        other.step(number)
    assert one.losses == other.losses and one.printed.getvalue() == other.printed.getvalue()


def test_what_differs_is_named() -> None:
    assert not differs({"a": [1, 2.0, torch.ones(2)]}, {"a": [1, 2.0 + 1e-6, torch.ones(2)]})
    assert differs([1], [1, 2]) and differs(1, 1.0) and differs({"b": 1}, {"a": 1}) and differs("a", "b")
    assert differs(torch.ones(2), torch.ones(2) * 1.01) and differs(torch.ones(2), torch.ones(2).double())
    assert differs(np.ones(2), np.ones(2) * 1.01) and not differs(np.ones(2), np.ones(2))
    assert not printed_differs("std 0.5738\n", "std 0.5739\n")
    assert printed_differs("std 0.5737600922584534\n", "std 0.5738\n")  # a format that was lost
    assert (
        printed_differs("a 1\n", "a 1\na 1\n") and printed_differs("a 1\n", "a 2\n") and printed_differs("b\n", "a\n")
    )


@pytest.mark.compiled
def test_two_programs_are_as_in_eager_execution() -> None:
    (row,) = run("generator", ("training_step",), steps=3)
    assert (row.mode, row.steps, row.programs, row.differs) == ("whole", 3, 1, {}) and row.ms is not None
    (row,) = run("branch on a value", ("training_step",), steps=4)
    assert (row.mode, row.steps, row.programs, row.differs) == ("paths", 4, 1, {})
    (row,) = run("early exit", ("optimize",), steps=3)
    assert (row.mode, row.steps, row.differs) == ("pieces", 3, {})


def test_a_step_that_does_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingStep, "__call__", lambda *_: torch.rand(()) - 1)
    (row,) = run("counter", ("training_step",), steps=3)
    assert row.differs.keys() == {"losses", "effects", "random", "updates"}
    assert "calls" in row.differs["effects"]


def test_the_page_tells_failed_from_slow() -> None:
    rows = [
        Row("a", "training_step", "whole", 24, {}, 1, 0, 2.0, 1.0),
        Row("b", "training_step", "pieces", 24, {"effects": "step 1: notes"}, 9, 3, 1.0, 2.0),
        Row("c", "training_step", "", 0, {"error": "exit code 1"}),
        Row("a", "torch.compile", "", 24, {}, 0, 0, 2.0, 1.6),
    ]
    text = page.text([row.__dict__ for row in rows])
    assert "1 of 3 are as in eager execution; 1 whole, 0 paths, 1 pieces, 0 eager; 1 compile late." in text
    assert "| a | whole | yes | yes | yes | yes | 1 | 0 | 2.00 | 1.00 | 2.00 | 1.25 |" in text
    assert "| b | pieces | yes | yes | no | yes | 9 | 3 | 1.00 | 2.00 | 0.50 | - |" in text
    assert "| c | failed | - | - | - | - | 0 | 0 | - | - | - | - |" in text
    assert "Geometric mean over the 2 that were timed: 1.00 × eager; 1 of them" in text
    assert "- effects: step 1: notes (b by `training_step`)" in text
