"""Device models: what a GPU can do per second, as data, and the seconds of a launch on it.

Passes and estimates read these figures, on a machine without such a device too. Rates are those of the vendor's
documents, dense and at boost clock; `source` names the document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from daceml_train.errors import Invalid, nearest

ACHIEVED = 0.9
"""The share of the bandwidth that a good kernel reaches: STREAM copies reach 0.90 to 0.94 of it on A100 and H100."""
ACHIEVED_MATMUL = 0.75
"""The share of the peak that large matmuls reach, for all types."""
L2_SHARE = 0.5
"""The share of the L2 that holds distinct data: on A100 and H100, each half keeps copies of the other's lines."""
LAUNCH_SECONDS = 2e-6
"""The least time of a kernel within a CUDA graph: some 1.5 us from start to end, and 0.5 us to the next one (NVIDIA,
Getting Started with CUDA Graphs, 2019: 3.4 us per launch of a kernel of 2.9 us)."""
FULL_THREADS = 512
"""Threads per multiprocessor from which memory-bound kernels reach the bandwidth: Little's law with accesses of 16
bytes and a latency of 0.6 us needs some 900 of these per multiprocessor of an H100, about two per thread."""
TILE = 64
"""Rows and columns of a result that a multiprocessor computes at a time in small matmuls."""
TILE_DEPTH = 512
"""Length of the sums from which libraries divide a matmul along them, too."""
CPU_BALANCE = 16.0
"""Operations per byte at which a core of a CPU computes as long as it moves."""

Peaks = Mapping[str, float]


@dataclass(frozen=True)
class DeviceModel:
    """One kind of GPU. Rates are per second, sizes in bytes."""

    name: str
    title: str
    architecture: tuple[int, int]
    """The compute capability."""
    processors: int
    """Multiprocessors."""
    threads: int
    """Threads that a multiprocessor holds."""
    memory: int
    bandwidth: float
    l2: int
    l2_bandwidth: float
    vector: float
    """Operations on float32 outside of matmul units."""
    peaks: Peaks
    """Operations of matmuls by the type in which they multiply: `tf32` for float32 with PyTorch's permission."""
    source: str
    launch_seconds: float = LAUNCH_SECONDS

    @property
    def balance(self) -> float:
        """Operations per byte above which a generated kernel is bound by arithmetic, not by memory."""
        return self.vector / self.bandwidth

    @property
    def resident(self) -> int:
        """Threads of the whole device."""
        return self.processors * self.threads

    def filled(self, threads: float) -> float:
        """The share of the bandwidth that a launch of so many threads can reach, at most 1."""
        return min(1.0, threads / (self.processors * FULL_THREADS))

    def memory_seconds(self, missed: float, moved: float, threads: float = math.inf) -> float:
        """Seconds for `moved` bytes of which `missed` are not in the L2."""
        share = ACHIEVED * self.filled(threads)
        return max(missed / self.bandwidth, moved / self.l2_bandwidth) / share if share else 0.0

    def matmul_seconds(self, flops: float, results: float, dtype: str) -> float:
        """Seconds of a matmul or convolution of so many operations and result elements."""
        if not flops:
            return 0.0
        depth = flops / (2 * max(1.0, results))
        tiles = max(1.0, results / TILE**2) * max(1.0, depth / TILE_DEPTH)
        waves = tiles / self.processors
        used = waves if waves < 1 else waves / math.ceil(waves)
        return flops / (self.peaks.get(dtype, self.vector) * ACHIEVED_MATMUL * used)


def _model(
    name: str, title: str, architecture: tuple[int, int], processors: int, threads: int,
    memory: tuple[int, float, int, float], vector: float, tensor: tuple[float, float, float], double: float,
    source: str,
) -> DeviceModel:  # fmt: skip
    """A row: memory is (GB, TB/s, MiB of L2, TB/s of L2), `tensor` TFLOP/s in (tf32, bfloat16, float16)."""
    size, bandwidth, l2, l2_bandwidth = memory
    names = ("tf32", "bfloat16", "float16")
    peaks = {"float32": vector, "float64": double} | dict(zip(names, tensor, strict=True))
    rates = {dtype: rate * 1e12 for dtype, rate in peaks.items()}
    return DeviceModel(
        name, title, architecture, processors, threads, size * 10**9, bandwidth * 1e12, l2 << 20, l2_bandwidth * 1e12,
        vector * 1e12, rates, source,
    )  # fmt: skip


_ROWS = (
    _model("a100", "NVIDIA A100 80 GB SXM", (8, 0), 108, 2048, (80, 2.039, 40, 4.7), 19.5, (156, 312, 312), 19.5,
           "NVIDIA A100 Tensor Core GPU datasheet and architecture whitepaper: L2 reads 5120 bytes per clock"),
    _model("h100", "NVIDIA H100 80 GB SXM", (9, 0), 132, 2048, (80, 3.35, 50, 5.8), 66.9, (494.7, 989.4, 989.4), 66.9,
           "NVIDIA H100 Tensor Core GPU architecture whitepaper; L2 as in the A100, 5120 bytes per clock"),
    _model("h200", "NVIDIA H200 141 GB SXM", (9, 0), 132, 2048, (141, 4.8, 50, 5.8), 66.9, (494.7, 989.4, 989.4), 66.9,
           "NVIDIA H200 Tensor Core GPU datasheet; the chip is the H100's"),
    _model("l4", "NVIDIA L4 24 GB", (8, 9), 58, 1536, (24, 0.3, 48, 1.6), 30.3, (60, 121, 121), 0.49,
           "NVIDIA L4 Tensor Core GPU datasheet, halves of those with sparsity; L2 in proportion to the RTX 4090"),
    _model("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 1536, (24, 1.008, 72, 3.5), 82.6, (82.6, 165.2, 165.2),
           1.29,
           "NVIDIA Ada GPU architecture whitepaper, sums in float32; L2 as measured by Chips and Cheese, 2022"),
    _model("b200", "NVIDIA B200 180 GB SXM", (10, 0), 148, 2048, (180, 7.7, 126, 11.6), 75, (1100, 2250, 2250), 37,
           "NVIDIA HGX B200 datasheet, an eighth of the board, without sparsity; L2 as two of the H100's"),
)  # fmt: skip
"""L2 bandwidths are 0.65 of bytes per clock times clock, the share that reads reach in published measurements."""

DEVICES: Mapping[str, DeviceModel] = {row.name: row for row in _ROWS}
"""The devices whose figures are known, by their short names."""


def device_model(name: str) -> DeviceModel:
    """The device of this name. Raises `Invalid`, which lists the known ones."""
    key = name.lower().replace(" ", "").replace("_", "").replace("-", "")
    if key not in DEVICES:
        raise Invalid(f"no device is called {name!r}{nearest(key, DEVICES)}", advice=f"known: {', '.join(DEVICES)}")
    return DEVICES[key]


def present(properties: Any) -> DeviceModel:
    """The model of a device that is there, from PyTorch's `get_device_properties`.

    Sizes and bandwidth are the device's. Rates are those of the device of that name, or else those of the nearest
    architecture, in proportion to multiprocessors and clock.
    """
    architecture = (int(properties.major), int(properties.minor))
    title = str(properties.name)
    words = title.lower().replace(" ", "").replace("-", "")
    named = next((row for row in _ROWS if row.name in words), None)
    base = named or min(_ROWS, key=lambda row: (_apart(row.architecture, architecture), row.processors))
    processors = int(properties.multi_processor_count)
    scale = processors / base.processors
    clock, width = (int(getattr(properties, name, 0) or 0) for name in ("memory_clock_rate", "memory_bus_width"))
    bandwidth = 2.0 * clock * 1e3 * width / 8 or (base.bandwidth if named else base.bandwidth * scale)
    return replace(
        base,
        name=named.name if named else words,
        title=title,
        architecture=architecture,
        processors=processors,
        threads=int(getattr(properties, "max_threads_per_multi_processor", base.threads)),
        memory=int(getattr(properties, "total_memory", 0)) or base.memory,
        bandwidth=bandwidth,
        l2=int(getattr(properties, "L2_cache_size", 0)) or base.l2,
        l2_bandwidth=base.l2_bandwidth * scale,
        vector=base.vector * scale,
        peaks={dtype: peak * scale for dtype, peak in base.peaks.items()},
        source=f"the device's properties; rates: {base.source}",
    )


def _apart(one: tuple[int, int], other: tuple[int, int]) -> int:
    """How far apart two architectures are; an older one is nearer than a newer one of the same distance."""
    difference = (other[0] - one[0]) * 10 + other[1] - one[1]
    return 2 * abs(difference) + (difference < 0)
