"""Measure the first steps of training with `compile="background"`, of PyTorch alone, and of `torch.compile`.

`python -m benchmarks.first_step [network or operator ...] [--no-inductor] [--save]`: each way runs in a process of its
own with a cache of its own, imports PyTorch, builds the problem, and calls steps until it is at its final speed. Saved
are `benchmarks/results/first_step.json` and `docs/results/first_step.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.provenance import commit, origin

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "first_step.json"
PAGE = ROOT / "docs" / "results" / "first_step.md"
WAYS = ("eager", "background", "again", "first_call", "compile")
"""PyTorch; compiled in the background with an empty cache, and with a full one; in the first call; `torch.compile`."""
NETWORKS = ("resnet50", "mobilenet_v2", "mixer", "vit_s", "wavenet", "bert", "dlrm", "lstm")
OPERATORS = ("involution", "local_attention", "capsule", "mi_lstm", "tropical", "bilinear")
AT_MOST = 1.1, 0.05
"""The goal for the first step: times eager's, and seconds besides."""


def _problem(name: str) -> tuple[Any, Any, Any, Any, Any]:
    """Model, inputs, target, loss, optimizer."""
    import torch
    from torch import nn

    from benchmarks.networks.table import TWELVE
    from benchmarks.novel import operators
    from benchmarks.novel.cases import LARGE, operands

    if name in TWELVE:
        found = TWELVE[name].build()
        return found.model, found.inputs, found.targets, found.loss, found.optimizer
    torch.manual_seed(0)
    function = getattr(operators, name)
    given = operands(LARGE[name], torch.float32)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ParameterList(nn.Parameter(x.detach()) for x in given[1:] if x.is_floating_point())
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            own, rest = iter(self.own), iter(others)
            chosen = [next(own) if y.is_floating_point() else next(rest) for y in given[1:]]
            result = function(x * self.scale, *chosen)
            return result[0] if isinstance(result, tuple) else result

    inputs = tuple(x.detach() for x in given if x is given[0] or not x.is_floating_point())
    model = Model()
    target = torch.randn_like(model(*inputs))
    return model, inputs, target, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)


def _worker(name: str, way: str, seconds: float) -> None:
    """Print as JSON the seconds of each step, the time at which each ended, and when the last compiled."""
    import torch

    import daceml_train as dt

    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    model, inputs, target, loss, optimizer = _problem(name)
    start = time.perf_counter()
    step: Callable[..., Any]
    if way in ("background", "again", "first_call"):
        step = dt.training_step(model, loss, optimizer, compile="first_call" if way == "first_call" else "background")
    else:
        forward = torch.compile(model) if way == "compile" else model

        def step(inputs: Any, target: Any) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            value = loss(forward(*inputs) if isinstance(inputs, tuple) else forward(inputs), target)
            value.backward()
            optimizer.step()
            return value.detach()

    took: list[float] = []
    ended: list[float] = []
    losses: list[float] = []
    settled = 0
    while settled < 8 and (time.perf_counter() - start < seconds or len(took) < 10):
        begun = time.perf_counter()
        losses.append(float(step(inputs, target)))
        ended.append(time.perf_counter() - start)
        took.append(time.perf_counter() - begun)
        waits = way in ("background", "again") and not any(getattr(step, "_bound", {}).values())
        settled = 0 if waits and not getattr(step, "breaks", ()) else settled + 1
    notes = [*getattr(step, "compilation", ()), *getattr(step, "breaks", ())]
    print(json.dumps({"took": took, "ended": ended, "losses": losses[:3], "notes": notes}))


def _run(name: str, way: str, cache: str, seconds: float) -> dict[str, Any]:
    """The figures of one way, measured in a process of its own."""
    environment = {**os.environ, "DACEML_TRAIN_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    command = [sys.executable, "-m", "benchmarks.first_step", name, "--worker", way, "--seconds", str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:200]}
    found = json.loads(done.stdout.strip().splitlines()[-1])
    took, ended = found["took"], found["ended"]
    final = statistics.median(took[-8:])
    swap = next((i for i, note in enumerate(found["notes"]) if "takes over" in note), None)
    fast = next(i for i in range(len(took)) if statistics.median(took[i : i + 5]) <= final / 0.9)
    result = {"first": took[0], "final": final, "steps": len(took), "settled": ended[fast], "loss": found["losses"][0]}
    if way in ("background", "again"):
        result["slowest"] = max(took[1:])
        result["swapped"] = swap is not None
        if swap is None:  # it was still in PyTorch when its time was over
            result["settled"] = None
        result["notes"] = found["notes"]
    return result


def measured(name: str, ways: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """The row of a network or an operator."""
    row: dict[str, Any] = {"commit": commit(), "ways": {}}
    with tempfile.TemporaryDirectory() as cache:
        for way in ways:
            own = cache if way in ("background", "again") else f"{cache}-{way}"
            row["ways"][way] = _run(name, way, own, seconds)
            print(f"{name:18s} {way:11s} {json.dumps(row['ways'][way])[:160]}", flush=True)
    return row


def page(rows: Mapping[str, Mapping[str, Any]], when: str) -> str:
    """The page of the results."""
    lines = [
        "# First steps",
        "",
        "Generated; do not edit. To measure again:",
        "",
        "    .venv/bin/python -m benchmarks.first_step --save            # all rows: about an hour on two cores",
        "    .venv/bin/python -m benchmarks.first_step resnet50 --save   # one row",
        "",
        "The first step of training, and the time until steps run at 90 % of their final speed, with",
        '`compile="background"` beside PyTorch and `torch.compile`, in wall clock on one thread. Each way has a',
        "process and an empty cache of its own; *full cache* is a second process with the cache of the first.",
        "*Longest step* is the longest one after the first: the step of the swap, which captures the model, loads the",
        "programs, and runs both ways. Within the goal is a first step of at most 1.1 times that of eager PyTorch and",
        "50 ms.",
        "",
        f"Measured {when} on a machine that other processes used at the same time.",
        origin(str(row["commit"]) for row in rows.values()),
        "",
        "| | first step: eager | background | within the goal | first call compiles | torch.compile | "
        "90 % of final speed: background | full cache | torch.compile | longest step | full cache | "
        "final step: eager | background |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        ways = row["ways"]

        def cell(way: str, key: str, ways: Any = ways) -> str:
            found = ways.get(way, {})
            if key != "first" and not found.get("swapped", True):
                return "still compiling"
            return "" if found.get(key) is None else _text(found[key])

        first, goal = ways["background"].get("first"), AT_MOST[0] * ways["eager"]["first"] + AT_MOST[1]
        within = "" if first is None else "yes" if first <= goal else f"no, {_text(goal)}"
        cells = [name, cell("eager", "first"), cell("background", "first"), within]
        cells += [cell("first_call", "first"), cell("compile", "first"), cell("background", "settled")]
        cells += [cell("again", "settled"), cell("compile", "settled"), cell("background", "slowest")]
        cells += [cell("again", "slowest"), cell("eager", "final"), cell("background", "final")]
        lines.append(f"| {' | '.join(cells)} |")
    both = [w for w in (r["ways"] for r in rows.values()) if "first" in w["background"]]
    ratio = math.exp(statistics.fmean(math.log(w["background"]["first"] / w["eager"]["first"]) for w in both))
    lines += ["", f"In the geometric mean, the first step takes {ratio:.2f} times as long as eager PyTorch's."]
    return "\n".join(lines) + "\n"


def _text(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def main() -> None:
    """Measure, print, and save."""
    parser = argparse.ArgumentParser(prog="benchmarks.first_step")
    parser.add_argument("names", nargs="*", default=[*NETWORKS, *OPERATORS])
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--seconds", type=float, default=240.0, help="the most seconds of a way")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _worker(options.names[0], options.worker, options.seconds)
        return
    ways = tuple(way for way in WAYS if way != "compile" or not options.no_inductor)
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
    for name in options.names:
        found["rows"][name] = measured(name, ways, options.seconds)
        found["when"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        if options.save:
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(page(found["rows"], found["when"]), encoding="utf-8")


if __name__ == "__main__":
    main()
