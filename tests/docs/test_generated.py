"""Generated pages whose figures are in the repository are what their generators print.

`tests/benchmarks/test_passes.py` holds the page of passes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import gpu_prediction, render, scale_page, traffic_page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
FIGURE = re.compile(r"\| \*\*([\d.]+)\*\* \|.*\]\((docs/results/\w+\.md)\)")


def _performance() -> Iterator[str]:
    return render.page(json.loads(render.RESULTS.read_text(encoding="utf-8")))


def _gpu_prediction() -> Iterator[str]:
    return gpu_prediction.page(json.loads(gpu_prediction.RESULTS.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("page", "lines", "command"),
    [
        ("gpu-prediction.md", _gpu_prediction, "benchmarks.gpu_prediction --page > docs/results/gpu-prediction.md"),
        ("scale.md", scale_page.page, "benchmarks.scale_page > docs/results/scale.md"),
        ("traffic.md", traffic_page.page, "benchmarks.traffic_page > docs/results/traffic.md"),
        ("performance.md", _performance, "benchmarks.render"),
    ],
)
def test_page_is_generated(page: str, lines: Callable[[], Iterator[str]], command: str) -> None:
    expected = "\n".join(lines()) + "\n"
    assert (RESULTS / page).read_text(encoding="utf-8") == expected, f"run .venv/bin/python -m {command}"


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    figures = FIGURE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(figures) == 4
    for figure, page in figures:
        means = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if "eometric mean" in line]
        assert any(re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", line) for line in means), f"{page}: {figure}"
