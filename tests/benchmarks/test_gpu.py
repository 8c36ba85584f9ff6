"""What can be known of the measurements on a GPU without one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import clock
from benchmarks.gpu.__main__ import page
from benchmarks.gpu.kernels import CASES
from benchmarks.gpu.networks import BRANCHY, LARGE, SMALL
from benchmarks.gpu.pool import Item, Limits, measure
from benchmarks.gpu.worker import prepared

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["test", "bench"])
def test_nothing_runs_without_a_device(command: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "scripts/gpu.py", command, "--folder", str(tmp_path)]
    run = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 3 and run.stdout == "no CUDA device: nothing was run\n"


def test_the_page_of_results() -> None:
    def step(milliseconds: float, peak: int) -> dict[str, Any]:
        return {"milliseconds": milliseconds, "peak": peak, "launches": 1, "streams": 3, "notes": []}

    kernel = {
        "name": "softmax",
        "dtype": "float32",
        "direction": "forward",
        "bytes": 3_000_000_000,
        "ours": 1000.0,
        "eager": 2000.0,
        "compiled": 1100.0,
    }
    name = "network | ResNet-50 | bf16 |"
    rows = {
        "copy": {"bandwidth": 4e12},
        "kernel | softmax | float32": {"rows": [kernel]},
        f"{name} ours": step(2.0, 60),
        f"{name} eager": step(5.0, 120),
        f"{name} eager, channels-last": step(4.0, 120),
        f"{name} compile default": step(3.0, 100),
        "network | branches | tf32 | ours": step(1.0, 1),
        "network | branches | tf32 | one stream": step(1.5, 1),
        "kernel | b": {"error": "it failed"},
        "network | ViT | bf16 | ours": {"error": "no room"},
        "bytes | softmax | forward": {"name": "softmax, forward", "modelled": 100, "measured": 105},
        "bytes | softmax | backward": {
            "name": "softmax, backward",
            "modelled": 100,
            "bandwidth": 3e12,
            "note": "ncu is not installed",
        },
    }
    text = page({"machine": {"device": "one", "date": "today"}, "rows": rows})
    for part in (
        "4.00 TB/s",
        "| softmax | float32 | forward | 1000 | 75% | 2.00 | 1.10 |",
        "| ResNet-50 | bf16 | 2.00 | 2.00 | 1.50 | 0.60 | 1 |",
        "- kernel | b: it failed",
        "ours: no room",
        "2.00 over eager, 1.50 over the best",
        "3 streams | tf32 | | | | | | 1.50 times as fast as one",
        "| softmax, forward | 100 | 1.05 of it |",
        "ncu is not installed: 75% of a copy's bandwidth",
    ):
        assert part in text, part


FAKE = """
import sys, time, json
name, delay, way = sys.argv[1:]
time.sleep(float(delay))
if way == "dies":
    raise ValueError("no such kernel")
print("noise"); print("ready", flush=True)
sys.stdin.readline()
print("began", time.monotonic(), flush=True)
time.sleep(1000 if way == "hangs" else 0.2)
print("result", json.dumps({"name": name, "at": time.monotonic()}), flush=True)
"""


def fake(name: str, delay: float = 0.0, way: str = "works", gib: float = 1.0) -> Item:
    return Item(name, (sys.executable, "-c", FAKE, name, str(delay), way), gib)


def test_workers_get_ready_together_and_are_measured_one_by_one() -> None:
    results: dict[str, Any] = {}
    given = [
        fake("a", 1.0),
        fake("b", 1.0),
        fake("c", way="dies"),
        fake("d", way="hangs"),
        fake("e", 1000.0),
        fake("f"),
    ]
    limits = Limits(workers=5, ready=15.0, measure=2.0)
    start = time.monotonic()
    left = measure(given, limits, start + 200, lambda key, row: results.__setitem__(key, row))
    assert (left == [] and list(results) == ["c", "e", "a", "b", "d", "f"]) or sorted(results) == sorted("abcdef")
    assert abs(results["a"]["at"] - results["b"]["at"]) >= 0.2
    assert results["c"]["error"] == "it ended: ValueError: no such kernel"
    assert results["d"]["error"].startswith("no result") and results["e"]["error"] == "not ready after 15 s"
    assert results["f"]["name"] == "f"


def test_what_time_cuts_off_is_left_and_what_is_done_is_there() -> None:
    results: dict[str, Any] = {}
    given = [fake("a"), fake("slow", 1000.0), fake("big", gib=100.0)]
    left = measure(given, Limits(gib=10.0), time.monotonic() + 15, lambda key, row: results.__setitem__(key, row))
    assert sorted(results) == ["a"] and [item.key for item in left] == ["slow", "big"]


@pytest.mark.compiled
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "words",
    [
        ("kernel", "softmax", "bfloat16"),
        ("adam",),
        ("bytes", "LayerNorm", "backward"),
        *(("network", "tiny", "bf16", variant) for variant in ("ours", "one stream", "eager, channels-last")),
    ],
    ids=" ".join,
)
def test_every_kind_of_measurement_in_tiny_sizes(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from daceml_train.runtime.gpu import cuda_graph

    monkeypatch.setattr(cuda_graph, "schedule_of", cuda_graph.schedule_of)  # which one of them replaces
    monkeypatch.setattr(clock, "BATCHES", 1)
    found = json.loads(json.dumps(prepared(*words)()))
    rows = found.get("rows", [found])
    assert rows and all(row.get("ours", row.get("milliseconds", row.get("bandwidth"))) > 0 for row in rows)
    if words[0] == "bytes":
        assert found["modelled"] > 0 and "ncu is not installed" in found["note"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_call_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--workers", "1", "--folder", str(tmp_path), "--only"]
    for message in ('copy: {"bandwidth"', ""):
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0 and "all measured" in run.stdout, run.stdout + run.stderr
        assert run.stdout.startswith(message or "# no device, a trial")
    assert "A copy on the device moves" in (tmp_path / "results.md").read_text()


def test_networks_and_kernels_exist() -> None:
    assert len(LARGE) == 10 and len(SMALL) == 3
    model = BRANCHY["branches"].model()
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 10)
    for make, _ in CASES.values():
        make()
    for network in SMALL.values():
        assert network.model().training
