"""The benchmark of concurrency: its networks, its page."""

import pytest
import torch

from benchmarks.concurrency.__main__ import PAGE, main, written
from benchmarks.concurrency.branching import BRANCHING, TINY
from benchmarks.concurrency.page import page
from benchmarks.concurrency.rows import problem, quantile, title

SURROUNDINGS = {
    "date": "2030-01-01 00:00 UTC",
    "processor": "a processor",
    "cores": 2,
    "versions": {"torch": "9"},
    "commit": "abc",
}


@pytest.mark.parametrize("name", [*BRANCHING, *TINY])
def test_networks_train_and_are_equal_each_time(name: str) -> None:
    losses = [problem(name).step() for _ in range(2)]
    assert torch.equal(*losses) and torch.isfinite(losses[0])
    assert title(name) == {**BRANCHING, **TINY}[name][0]


def test_the_page_has_a_table_per_measurement() -> None:
    tiny = [{"network": "MLP", "call": 45e-6, "eager": 3e-4, "native": 2.5e-5, "by hand": 2.25e-5}]
    lanes = {"network": "towers", "launches": 55, "default": 1e-3, "in order": 1.5e-3, "all threads": 2e-3}
    lanes |= {"lanes": 2, "simulated": 1.6, "memory": 1.05}
    text = page(SURROUNDINGS | {"tiny": tiny, "lanes": [lanes], "lanes under load": True})
    assert "| MLP | 300.0 | 45.0 | 25.0 | 22.5 | 2.00 |" in text
    assert "| towers | 55 | 2.00 | 1.50 | 1.00 | 2 | 2.00 | 1.50 | 1.60 | 1.05 |" in text
    assert "Geometric mean over all threads: 2.00." in text and text.count("Other processes had the cores") == 1
    assert "68 cores" not in text
    many = {"network": "experts", "launches": 3, "all cores": 3e-3, "best": 2e-3, "lanes": 1e-3, "bound": 1e-3}
    assert "| experts | 3 | 3.00 | 2.00 | 1.00 | 3.00 | 1.00 | 0.10 |" in page(
        SURROUNDINGS | {"simulate": [many | {"scheduling": 0.1}]}
    )


def test_the_stored_page_is_that_of_the_stored_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == written(), "run .venv/bin/python -m benchmarks.concurrency --page"


def test_unknown_measurements_are_refused() -> None:
    with pytest.raises(SystemExit):
        main(["lane"])
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
