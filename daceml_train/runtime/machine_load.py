"""The machine on which times are measured, and whether other processes had it in the meantime."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from pathlib import Path

import torch

from daceml_train import processor

LOADED, LEAST_WAIT = 0.05, 1e-3
"""The share of the time, and the seconds, that threads of ours may wait for a processor while times are trusted."""


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def machine() -> str:
    """What measured times are valid for: PyTorch, the processor, and how many cores of it this process may use."""
    return f"{torch.__version__}, {cores()} cores of {processor.described()}"


class Load:
    """The load from its construction on."""

    def __init__(self) -> None:
        self.begin, self.before = time.perf_counter(), waited()

    def high(self) -> bool:
        """Whether our threads waited so long for processors that times measured since then are not trusted."""
        return waited() - self.before > max(LEAST_WAIT, LOADED * (time.perf_counter() - self.begin))


def waited() -> float:
    """Seconds that the threads of this process were ready and had no processor, so far; 0 where no system tells."""
    total = 0
    for place in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has ended
            total += int(place.read_text().split()[1])
    return total / 1e9
