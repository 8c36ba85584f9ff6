"""Measure the gallery: forward and all gradients of each operator, as an expression and as PyTorch users compose it.

`python -m benchmarks.novel [operator ...] [--threads N] [--no-inductor] [--tune] [--save]`: milliseconds of processor
time per call, medians of interleaved visits. `--tune` adds the operator with measured schedules; `--save` writes
`benchmarks/results/novel.json` and `docs/results/novel.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import daceml_train as dt
from benchmarks.novel import compositions, operators
from benchmarks.novel.cases import LARGE, WINDOWS, operands
from benchmarks.novel.page import page, ratio
from benchmarks.provenance import commit

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "novel.json"
PAGE = ROOT / "docs" / "results" / "novel.md"

_DEFAULT = tempfile.TemporaryDirectory()
"""A cache without schedules."""
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


def timed(call: Callable[[], Any]) -> float:
    """Seconds of processor time of a call, over a visit."""
    start, spent, count = time.process_time(), 0.0, 0
    while spent < VISIT:
        call()
        count += 1
        spent = time.process_time() - start
    return spent / count


def _tuned(function: Callable[..., Any], given: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> Any:
    """The operator as a module whose kernels have measured schedules, and how long it took to find them."""
    module = dt.optimize(_Call(function))
    differentiated(module, given, seeds)()
    start = time.perf_counter()
    explored = dt.tune(module)
    seconds = time.perf_counter() - start
    torch._dynamo.reset()
    return dt.optimize(_Call(function)), explored, seconds


def measured(name: str, visits: int, inductor: bool, tune: bool = False) -> dict[str, float]:
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
    found: dict[str, float] = {}
    if tune:
        variants["tuned"], explored, found["tuning seconds"] = _tuned(ours, given, seeds)
        found["schedules"] = sum(len(nest.candidates) for nest in explored.nests)
        found["dropped schedules"] = len(explored.dropped)
        variants["optimized"] = dt.optimize(_Call(ours), cache=_DEFAULT.name)  # where no schedule is known
    calls = {label: differentiated(f, given, seeds) for label, f in variants.items()}
    expected = calls["eager"]()
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
            took[label].append(timed(call) * 1e3)
    return found | {label: statistics.median(v) for label, v in took.items()}


def main() -> None:
    """Print a row per operator and the geometric means."""
    parser = argparse.ArgumentParser(prog="benchmarks.novel")
    parser.add_argument("names", nargs="*", default=list(LARGE))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--visits", type=int, default=5)
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: dict[str, dict[str, Any]] = {}
    print("operator            eager   compile  expression  optimized  tuned    best PyTorch / best of ours   error")
    for name in options.names or list(LARGE):
        torch._dynamo.reset()
        row: dict[str, Any] = measured(name, options.visits, not options.no_inductor, options.tune)
        rows[name] = row | {"commit": commit(), "threads": options.threads}
        cells = [f"{row.get(v, math.nan):9.2f}" for v in ("eager", "compile", "expression", "optimized", "tuned")]
        error = max(row.get(f"{v} error", 0.0) for v in ("expression", "optimized", "tuned"))
        print(f"{name:18s}{' '.join(cells)}   {ratio(row):6.2f}   {error:.0e}", flush=True)
        if options.save:
            when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
            RESULTS.write_text(json.dumps({"when": when, "rows": rows}, indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(page(rows, when, WINDOWS), encoding="utf-8")
    for label, names in (("all", list(rows)), ("windows", [n for n in WINDOWS if n in rows])):
        known = [found for found in (ratio(rows[n]) for n in names) if not math.isnan(found)]
        if known:
            print(f"geometric mean, {label}: {math.exp(statistics.fmean(map(math.log, known))):.2f}")


if __name__ == "__main__":
    main()
