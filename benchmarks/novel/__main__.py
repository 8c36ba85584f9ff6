"""Measure the gallery: forward and all gradients of each operator, as an expression and as PyTorch users compose it.

`python -m benchmarks.novel [operator ...] [--threads N] [--no-inductor]`: milliseconds of processor time per call,
medians of interleaved visits.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import daceml_train as dt
from benchmarks.novel import compositions, operators
from benchmarks.novel.cases import LARGE, WINDOWS, operands

VISIT = 0.05
"""Seconds of one visit at least."""


class _Call(nn.Module):
    """A module that calls one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def differentiated(function: Callable[..., Any], given: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> Any:
    """A call without arguments: the gradients of all operands."""
    wanted = [x for x in given if x.requires_grad]
    return lambda: torch.autograd.grad(_tuple(function(*given)), wanted, list(seeds))


def _timed(call: Callable[[], Any]) -> float:
    start, spent, count = time.process_time(), 0.0, 0
    while spent < VISIT:
        call()
        count += 1
        spent = time.process_time() - start
    return spent / count


def measured(name: str, visits: int, inductor: bool) -> dict[str, float]:
    """Variant -> milliseconds. The first calls are compared with eager's."""
    torch.manual_seed(0)
    given = operands(LARGE[name], torch.float32)
    ours, theirs = getattr(operators, name), getattr(compositions, name)
    seeds = [torch.randn_like(r) for r in _tuple(theirs(*given))]
    variants: dict[str, Callable[..., Any]] = {
        "eager": theirs,
        "expression": ours,
        "optimized": dt.optimize(_Call(ours)),
    }
    if inductor:
        variants["compile"] = torch.compile(theirs)
    calls = {label: differentiated(f, given, seeds) for label, f in variants.items()}
    expected = calls["eager"]()
    found: dict[str, float] = {}
    for label, call in list(calls.items()):
        start = time.perf_counter()
        try:
            got = call()
        except Exception as error:
            print(f"  {label} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
            del calls[label]
            continue
        found[f"{label} first"] = (time.perf_counter() - start) * 1e3
        found[f"{label} error"] = max(
            float((a - b).norm() / (b.norm() + 1e-30)) for a, b in zip(got, expected, strict=True)
        )
    took: dict[str, list[float]] = {label: [] for label in calls}
    for call in calls.values():
        call()
    for _ in range(visits):
        for label, call in calls.items():
            took[label].append(_timed(call) * 1e3)
    return found | {label: statistics.median(v) for label, v in took.items()}


def main() -> None:
    """Print a row per operator and the geometric means."""
    parser = argparse.ArgumentParser(prog="benchmarks.novel")
    parser.add_argument("names", nargs="*", default=list(LARGE))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--visits", type=int, default=5)
    parser.add_argument("--no-inductor", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ratios: dict[str, float] = {}
    print("operator            eager   compile  expression  optimized  best PyTorch / optimized   error")
    for name in options.names or list(LARGE):
        torch._dynamo.reset()
        row = measured(name, options.visits, not options.no_inductor)
        best = min(row[v] for v in ("eager", "compile") if v in row)
        ratios[name] = best / row["optimized"] if "optimized" in row else math.nan
        cells = [f"{row.get(v, math.nan):9.2f}" for v in ("eager", "compile", "expression", "optimized")]
        error = max(row.get(f"{v} error", math.nan) for v in ("expression", "optimized"))
        print(f"{name:18s}{' '.join(cells)}   {ratios[name]:6.2f}   {error:.0e}", flush=True)
    for label, names in (("all", list(ratios)), ("windows", [n for n in WINDOWS if n in ratios])):
        known = [ratios[n] for n in names if ratios[n] == ratios[n]]
        if known:
            print(f"geometric mean, {label}: {math.exp(statistics.fmean(map(math.log, known))):.2f}")


if __name__ == "__main__":
    main()
