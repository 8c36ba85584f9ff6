"""Measuring: what a process holds in memory while something runs often."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daceml_train.runtime.native_library import pool_trim

SAMPLES = 40
"""Measurements over a run."""


def resident() -> int:
    """Bytes of private memory that the process holds, freed blocks given back first."""
    gc.collect()
    pool_trim()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/smaps_rollup has no Private_Dirty")


def often(count: int, work: Callable[[int], None], say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Repeat the work; return the bytes in use at points in between, and their growth after the warm-up, a fifth."""
    every, samples = max(1, count // SAMPLES), []
    for number in range(count):
        work(number)
        if number % every == every - 1:
            samples.append((number + 1, resident()))
            if say is not None and len(samples) % 10 == 0:
                say(f"{number + 1} of {count}: {samples[-1][1] / 2**20:.1f} MiB")
    warm = [held for number, held in samples if number >= count / 5]
    third = max(1, len(warm) // 3)
    before, after = sorted(warm[:third])[third // 2], sorted(warm[-third:])[third // 2]
    return {"MiB": [round(held / 2**20, 2) for _, held in samples], "growth": round(after / before - 1, 5)}
