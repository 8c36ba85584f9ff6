"""Bytes that reach the device's memory, by Nsight Compute, against the bytes that the compiler's model counts.

python -m benchmarks.gpu.dram CASE DIRECTION    runs one pass between marks for the profiler

Where Nsight Compute is not installed, or may not read the counters, the model stands alone: bytes by it over the time
that a pass takes, which cannot be more than a copy's.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import daceml_train as dt
from benchmarks.gpu.clock import DEVICE, milliseconds, wait
from benchmarks.gpu.kernels import CASES
from daceml_train.driver.module import state_of

DIRECTIONS = ("forward", "backward")


def prepared(name: str, direction: str) -> Callable[[], dict[str, Any]]:
    """A compiled pass; measuring returns its bytes by the model and by the profiler, or by its time."""
    run = passes(name)[direction]
    for _ in range(3):
        run()
    modelled = bytes_of(name, direction)
    profiler = shutil.which("ncu") or next(map(str, Path("/opt/nvidia/nsight-compute").glob("*/ncu")), None)
    profiler = profiler or next(map(str, Path("/usr/local/cuda/bin").glob("ncu")), None)

    def measure() -> dict[str, Any]:
        found: dict[str, Any] = {"name": f"{name}, {direction}", "modelled": modelled}
        measured, reason = profiled(profiler, name, direction) if profiler else (0, "ncu is not installed")
        if measured:
            return {**found, "measured": measured}
        seconds = milliseconds([run]) / 1e3
        return {**found, "bandwidth": modelled / seconds, "note": f"{reason}: bytes by the model over seconds"}

    return measure


def profiled(profiler: str, name: str, direction: str) -> tuple[int, str]:
    """Bytes by the profiler, or 0 and why there are none."""
    options = ["--profile-from-start", "off", "--metrics", "dram__bytes.sum", "--csv", "--clock-control", "none"]
    command = [profiler, *options, sys.executable, "-m", "benchmarks.gpu.dram", name, direction]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50)
    table = [line for line in run.stdout.splitlines() if line.startswith('"')]
    if run.returncode or not table:
        return 0, next((x for x in run.stdout.splitlines() if "ERR" in x), "ncu found nothing")[:120]
    found = csv.DictReader(io.StringIO("\n".join(table)))
    total = sum(_bytes(row["Metric Value"], row["Metric Unit"]) for row in found if row.get("Metric Value"))
    return total, "ncu counted nothing"


def _bytes(value: str, unit: str) -> int:
    factor = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}.get(unit)
    return round(float(value.replace(",", "")) * factor) if factor else 0


_modules: dict[str, Any] = {}


def passes(name: str) -> dict[str, Callable[[], object]]:
    """The two passes of a case, on one input."""
    make, shape = CASES[name]
    module = _modules[name] = dt.optimize(make().to(DEVICE))
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    y = module(x)
    g, own = torch.randn_like(y), [p for p in module.parameters() if p.requires_grad]
    return {
        "forward": lambda: module(x),
        "backward": lambda: torch.autograd.grad(y, [x, *own], g, retain_graph=True),
    }


def bytes_of(name: str, direction: str) -> int:
    """Bytes of all launches of a pass by the model."""
    state = state_of(_modules[name])
    assert state is not None
    record = state.backend.records[DIRECTIONS.index(direction)]
    assert record.executable is not None
    value = record.executable.plan(tuple(record.executable.sizes.values())).value
    return int(sum(value(cost.bytes) for cost in record.costs))


def once(name: str, direction: str) -> None:
    """One pass under the profiler, after two without and with nothing in the caches."""
    run, flush = passes(name)[direction], torch.empty(1 << 27, device=DEVICE)
    for turn in range(3):
        flush.zero_()
        wait()
        if turn == 2:
            torch.cuda.profiler.start()
        run()
        wait()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    once(*sys.argv[1:])
