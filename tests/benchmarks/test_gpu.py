"""What can be known of the measurements on a GPU without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import page
from benchmarks.gpu.kernels import CASES
from benchmarks.gpu.networks import BRANCHY, LARGE, SMALL

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["test", "bench"])
def test_nothing_runs_without_a_device(command: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "scripts/gpu.py", command, "--folder", str(tmp_path)]
    run = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 3 and run.stdout == "no CUDA device: nothing was run\n"


def test_the_page_of_results() -> None:
    step = {
        "network": "a", "precision": "bf16", "launches": 1, "streams": 3, "notes": [],
        "milliseconds": {"ours": 2.0, "eager": 5.0, "eager, channels-last": 4.0, "compile default": 3.0},
        "peak": {"ours": 60, "compile default": 100, "eager": 120},
    }  # fmt: skip
    kernel = {
        "name": "softmax", "dtype": "float32", "direction": "forward", "bytes": 3_000_000_000, "ours": 1000.0,
        "eager": 2000.0, "compiled": 1100.0,
    }  # fmt: skip
    rows = {
        "copy bandwidth": 4e12, "kernels": [kernel], "network a bf16 default": step,
        "network b": {"error": "it failed"}, "streams": {"one": step, "several": step},
        "bytes": [{"name": "softmax", "modelled": 100, "measured": 105}],
    }  # fmt: skip
    text = page({"machine": {"device": "one", "date": "today"}, "rows": rows})
    for part in (
        "4.00 TB/s", "| softmax | float32 | forward | 1000 | 75% | 2.00 | 1.10 |",
        "| a | bf16 | 2.00 | 2.00 | 1.50 | 0.60 | 1 |", "it failed", "2.00 over eager, 1.50 over the best",
        "3 streams, 1.00 times as fast as one", "| softmax | 100 | 1.05 of it |",
    ):  # fmt: skip
        assert part in text


def test_networks_and_kernels_exist() -> None:
    assert len(LARGE) == 10 and len(SMALL) == 3
    model = BRANCHY["branches"].model()
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 10)
    for make, _ in CASES.values():
        make()
    for network in SMALL.values():
        assert network.model().training
