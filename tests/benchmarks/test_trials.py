"""The page of searches by stages is what its results say, and its rows reach what they can."""

import json
from typing import Any

import pytest

from benchmarks.trials import page
from benchmarks.trials.__main__ import PAGE, RESULTS
from benchmarks.trials.rows import simulated


def found() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_page_is_generated() -> None:
    expected = "\n".join(page.lines(found())) + "\n"
    assert PAGE.read_text(encoding="utf-8") == expected, "run .venv/bin/python -m benchmarks.trials --page"


def test_what_was_measured_is_equal() -> None:
    searches = [entry for row in found()["rows"].values() for entry in row["searches"]]
    assert [entry["name"] for entry in searches if not entry.get("equal", True)] == []


def test_simulated_row_is_that_of_this_code() -> None:
    for now, then in zip(simulated(0)["searches"], found()["rows"]["simulated"]["searches"], strict=True):
        assert now.pop("name") == then.pop("name")
        assert now == pytest.approx(then)


def test_late_drops_are_what_a_tree_can_save() -> None:
    (late,) = found()["rows"]["late"]["searches"]
    assert (late["alone"], late["steps"]) == (25600, 2880)
