"""One variant of one network in a process of its own, for `benchmarks.train`; JSON lines.

Run as `python -m benchmarks.visit NETWORK VARIANT FOLDER`; what the compilers keep lies in FOLDER. It runs a first
step and a few more, says what starting took, then runs as many steps as each line of its input says and tells how
long they took; at the input's end it says what the compiler reports.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import daceml_train as dt
from benchmarks.measure import visit
from benchmarks.networks import NETWORKS
from benchmarks.variants import VARIANTS, Ours, Step

STEPS = 5
"""Steps that determine the start: the time by which the first exceeds the fastest of the others."""


def say(**line: Any) -> None:
    """One JSON line."""
    print(json.dumps(line), flush=True)


def started(step: Step) -> dict[str, Any]:
    """Seconds that the first step takes longer than later ones, the compiler's stages, and peak memory.

    The stages of ours are the capture by TorchDynamo, then either passes, lowering and the compiler's work, or loading.
    """
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
    return {"seconds": first, "stages": stages, "peak_bytes": peak}


KEPT = ("name", "captured", "moved", "levels", "kernels", "distinct_kernels", "calls", "arena")
"""What of a compiled function's report goes to the results: not its thousands of launches."""


def reported(step: Ours) -> dict[str, Any]:
    """What the compiler reports, in short."""
    report = dt.report(step.compiled).as_dict()
    functions = [{key: function[key] for key in KEPT} for function in report["functions"]]
    return {"breaks": report["breaks"], "functions": functions}


def stay(step: Step) -> None:
    """From now on updates are computed and change nothing.

    Hundreds of steps on one batch learn it by heart, and then gradients are subnormal numbers, with which some
    processors take ten times as long.
    """
    for group in step.problem.optimizer.param_groups:
        group["lr"] = 0.0


def main(network: str, variant: str, folder: str) -> None:
    """Start, then serve."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    step = VARIANTS[variant].of(NETWORKS[network], Path(folder) / "daceml_train")
    assert step is not None, f"{network} has no variant {variant}"
    say(start=started(step))
    stay(step)
    for line in sys.stdin:
        say(visit=dataclasses.asdict(visit(step, int(line))))
    say(report=reported(step) if isinstance(step, Ours) else {})


if __name__ == "__main__":
    main(*sys.argv[1:])
