"""One measurement in a process of its own: `python -m benchmarks.gpu.worker KIND NAME ...`.

It prepares (builds, compiles, warms up), says `ready`, waits for a line, measures, and says `result` with JSON.

    copy                            bytes per second of a copy
    kernel NAME DTYPE               a memory-bound operator, forward and backward, in all faces
    adam                            its update
    network NAME PRECISION VARIANT  a training step in one variant
    bytes NAME DIRECTION            bytes that reach memory, by Nsight Compute where it is there
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

Measure = Callable[[], Any]


def prepared(kind: str, *names: str) -> Measure:
    """What is left to do for a measurement once all is compiled."""
    from benchmarks.gpu import clock, dram, kernels, networks

    if kind == "copy":
        return lambda: {"bandwidth": clock.copy_bandwidth()}
    if kind == "kernel":
        return kernels.prepared(*names)
    if kind == "adam":
        return kernels.adam()
    if kind == "network":
        return networks.prepared(*names)
    return dram.prepared(*names)


def main() -> int:
    """Prepare, wait, measure."""
    measure = prepared(*sys.argv[1:])
    print("ready", flush=True)
    sys.stdin.readline()
    print("result", json.dumps(measure()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
