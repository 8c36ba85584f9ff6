"""Time on a CUDA device: events around batches of calls, warm, with inputs that rotate beyond the cache.

Without a device (`--dry`, which tries the measurements themselves) the processor's clock stands in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

BATCHES = 5
"""Batches whose median counts."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def milliseconds(calls: Sequence[Callable[[], object]], budget: float = 0.3) -> float:
    """Milliseconds per call, which takes the functions in turn: each has inputs of its own."""
    for call in calls:
        call()
    wait()
    once = _batch(calls, max(2, len(calls)))
    count = max(len(calls), min(1000, int(budget * 1e3 / BATCHES / max(once, 1e-3))))
    return statistics.median(_batch(calls, count) for _ in range(BATCHES))


def wait() -> None:
    """Until the device has done what was launched."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _batch(calls: Sequence[Callable[[], object]], count: int) -> float:
    if DEVICE == "cpu":
        began = time.perf_counter()
        for turn in range(count):
            calls[turn % len(calls)]()
        return 1e3 * (time.perf_counter() - began) / count
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for turn in range(count):
        calls[turn % len(calls)]()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def copies(bytes_each: int) -> int:
    """How many sets of inputs are beyond the second-level cache together."""
    cache = 64 << 20
    if DEVICE == "cuda":
        cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", cache)
    return max(2, min(8, -(-3 * cache // max(bytes_each, 1))))


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy on the device: the roof of memory-bound kernels."""
    size = 1 << (28 if DEVICE == "cuda" else 20)
    x, y = (torch.empty(size, dtype=torch.float32, device=DEVICE) for _ in range(2))
    return 2 * x.nbytes / (milliseconds([lambda: y.copy_(x)]) / 1e3)
