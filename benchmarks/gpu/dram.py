"""Bytes that reach the device's memory, by Nsight Compute, against the bytes that the compiler's model counts.

python -m benchmarks.gpu.dram CASE    runs one case between marks for the profiler, and prints the model's bytes
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import daceml_train as dt
from benchmarks.gpu.kernels import CASES
from daceml_train.driver.module import state_of


@dataclass(frozen=True)
class Row:
    """Bytes of one case, forward and backward together."""

    name: str
    modelled: int
    measured: int


def rows() -> Iterator[Row]:
    """Every case; nothing where ncu is not installed or may not read counters."""
    profiler = shutil.which("ncu") or next(map(str, Path("/opt/nvidia/nsight-compute").glob("*/ncu")), None)
    if profiler is None:
        return
    options = ["--profile-from-start", "off", "--metrics", "dram__bytes.sum", "--csv", "--clock-control", "none"]
    for name in CASES:
        command = [profiler, *options, sys.executable, "-m", "benchmarks.gpu.dram", name]
        run = subprocess.run(command, capture_output=True, text=True, timeout=240)
        table = [line for line in run.stdout.splitlines() if line.startswith('"')]
        modelled = [line for line in run.stdout.splitlines() if line.startswith("modelled ")]
        if run.returncode or not table or not modelled:
            return
        found = csv.DictReader(io.StringIO("\n".join(table)))
        measured = sum(_bytes(row["Metric Value"], row["Metric Unit"]) for row in found if row.get("Metric Value"))
        yield Row(name, int(modelled[0].split()[1]), measured)


def _bytes(value: str, unit: str) -> int:
    factor = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}.get(unit)
    return round(float(value.replace(",", "")) * factor) if factor else 0


def once(name: str) -> None:
    """Forward and backward pass of a case, profiled the third time."""
    make, shape = CASES[name]
    module = dt.optimize(make().cuda())
    x = torch.randn(shape, device="cuda", requires_grad=True)
    flush = torch.empty(1 << 27, device="cuda")
    y = module(x)
    g = torch.randn_like(y)
    for turn in range(3):
        flush.zero_()
        torch.cuda.synchronize()
        if turn == 2:
            torch.cuda.profiler.start()
        module(x).backward(g)
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    state = state_of(module)
    assert state is not None
    total = 0
    for record in state.backend.records:
        assert record.executable is not None
        value = record.executable.plan(tuple(record.executable.sizes.values())).value
        total += sum(value(cost.bytes) for cost in record.costs)
    print("modelled", total)


if __name__ == "__main__":
    once(sys.argv[1])
