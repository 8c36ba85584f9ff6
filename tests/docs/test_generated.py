"""Generated pages whose figures are in the repository are what their generators print.

`tests/benchmarks/test_passes.py` holds the page of passes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import render, traffic_page

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def _performance() -> Iterator[str]:
    return render.page(json.loads(render.RESULTS.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("page", "lines", "command"),
    [
        ("traffic.md", traffic_page.page, "benchmarks.traffic_page > docs/results/traffic.md"),
        ("performance.md", _performance, "benchmarks.render"),
    ],
)
def test_page_is_generated(page: str, lines: Callable[[], Iterator[str]], command: str) -> None:
    expected = "\n".join(lines()) + "\n"
    assert (RESULTS / page).read_text(encoding="utf-8") == expected, f"run .venv/bin/python -m {command}"
