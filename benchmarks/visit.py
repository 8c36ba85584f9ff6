"""One network in a process of its own, for `benchmarks.train`: agreement first, then the variants in turn; JSON lines.

Run as `python -m benchmarks.visit NETWORK STEPS VARIANT...`. Lines are `{"done", "now"}` while it works, then the
figures or `{"error"}`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import daceml_train as dt
from benchmarks.agreement import Disagreement, agreement
from benchmarks.measure import Visit, timing, visits
from benchmarks.networks import NETWORKS
from benchmarks.variants import VARIANTS, Ours, Step


def say(**line: Any) -> None:
    """One JSON line."""
    print(json.dumps(line), flush=True)


def main(name: str, steps: int, variants: list[str]) -> int:
    """Measure and print; 1 where results differ."""
    network = NETWORKS[name]
    found: dict[str, Any] = {}
    if any(VARIANTS[v].ours for v in variants):
        say(done=0.0, now="comparing gradients")
        try:
            found["agreement"] = agreement(network)
        except Disagreement as error:
            say(error=f"results differ from PyTorch's, so nothing is timed: {error}")
            return 1
    made: dict[str, Step] = {}
    for variant in variants:
        say(done=0.0, now=f"first step of {variant}")
        step = VARIANTS[variant].of(network)
        assert step is not None, f"{name} has no variant {variant}"
        made[variant] = step
        step()
    seen: dict[str, list[Visit]] = {variant: [] for variant in variants}
    for variant, visit, done in visits(made, steps):
        seen[variant].append(visit)
        say(done=done, now=variant)
    timings = {variant: timing(of) for variant, of in seen.items()}
    theirs = [t.median for variant, t in timings.items() if not VARIANTS[variant].ours]
    found["best_pytorch_ms"] = min(theirs, default=None)
    found["variants"] = {variant: dataclasses.asdict(t) for variant, t in timings.items()}
    for variant, step in made.items():
        if isinstance(step, Ours):
            found["variants"][variant]["report"] = dt.report(step.compiled).as_dict()
    say(**found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
