"""Roofline: how fast this machine copies memory and multiplies matrices, measured once and stored in the cache.

Williams et al., Roofline: An Insightful Visual Performance Model for Multicore Architectures, 2009.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from daceml_train import processor
from daceml_train.storage.files import keep

COPIED = 1 << 28
"""Bytes of the arrays that are copied: larger than caches."""
MATRIX = 2048
REPEATS = 7


@dataclass(frozen=True)
class Machine:
    """Bytes per second that a copy reads and writes, and floating-point operations per second of a float32 matmul."""

    processor: str
    threads: int
    bandwidth: float
    peak: float

    @property
    def balance(self) -> float:
        """Operations per byte above which a program is bound by arithmetic, not memory."""
        return self.peak / self.bandwidth

    def seconds(self, moved: float, flops: float) -> float:
        """The least time for these bytes and operations."""
        return max(moved / self.bandwidth, flops / self.peak)


def machine(folder: Path | None = None, again: bool = False) -> Machine:
    """The figures for the present number of threads, read from `folder` or measured (which takes a second)."""
    name, threads = processor.described(), torch.get_num_threads()
    path = folder / f"roofline-{threads}.json" if folder is not None else None
    if path is not None and not again:
        with contextlib.suppress(OSError, ValueError, TypeError):
            kept = Machine(**json.loads(path.read_text(encoding="utf-8")))
            if (kept.processor, kept.threads) == (name, threads):
                return kept
    measured = Machine(name, threads, bandwidth(), peak())
    if path is not None:
        keep(path, (json.dumps(asdict(measured)) + "\n").encode())
    return measured


def bandwidth(copied: int = COPIED) -> float:
    """Bytes per second read and written by the fastest of several copies."""
    source = torch.ones(copied // 4, device="cpu")
    target = torch.zeros_like(source)
    return 2 * copied / best(lambda: target.copy_(source))


def peak(size: int = MATRIX) -> float:
    """Operations per second of the fastest matmul, by either of PyTorch's libraries."""
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    calls: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    if torch.backends.mkldnn.is_available():
        calls.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    with torch.no_grad():
        return 2 * size**3 / min(best(call) for call in calls)


def best(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the fastest of several calls."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
