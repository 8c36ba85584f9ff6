"""One variant in a process of its own: seconds to the first step, the compiler's stages, peak memory; prints JSON.

Run as `python -m benchmarks.start NETWORK VARIANT FOLDER`; both compilers keep in FOLDER what they compile. The stages
of ours are the capture by TorchDynamo, then either passes, lowering and the compiler's work, or loading.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import daceml_train as dt
from benchmarks.networks import NETWORKS
from benchmarks.variants import VARIANTS, Ours

STEPS = 5


def main(network: str, variant: str, folder: str) -> None:
    """Measure and print."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    step = VARIANTS[variant].of(NETWORKS[network], Path(folder) / "daceml_train")
    assert step is not None, f"{network} has no variant {variant}"
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    first = seconds[0] - min(seconds[1:])
    stages: dict[str, float] = {}
    if isinstance(step, Ours):
        for function in dt.report(step.compiled).functions:
            for stage, spent in function.stages.items():
                stages[stage] = stages.get(stage, 0.0) + spent
        stages = {"capture": first - sum(stages.values())} | stages
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": first, "stages": stages, "peak_bytes": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
