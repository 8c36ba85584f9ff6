"""The measurements; each returns rows of plain data."""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import daceml_train as dt
from benchmarks.concurrency.branching import BRANCHING, TINY
from benchmarks.networks import NETWORKS
from benchmarks.networks.network import Problem
from daceml_train.reporting.cores import MANY_CORES, programs_of, simulate, together
from daceml_train.runtime.bound_plan import BoundPlan
from daceml_train.runtime.timing import per_launch
from daceml_train.transformations.global_movement.concurrency import Concurrency
from daceml_train.transformations.pipelines import TRAINING

Row = dict[str, Any]
WARM = 30
"""Calls before the first that is measured: threads and lanes are chosen in them."""
SIX = ("experts", "cells", "inception", "dlrm", "mobilenet_v2", "vit_s")
"""Networks whose steps are simulated on many cores."""


def problem(name: str) -> Problem:
    """A network with its batch, equal each time."""
    torch.manual_seed(0)
    known = {**BRANCHING, **TINY}
    return known[name][1]() if name in known else NETWORKS[name].build()


def title(name: str) -> str:
    """The name of a network on the page."""
    known = {**BRANCHING, **TINY}
    return known[name][0] if name in known else NETWORKS[name].title


def step_of(name: str, **options: Any) -> tuple[Callable[[], object], Any]:
    """What calls a compiled step of a network, and the step."""
    given = problem(name)
    step = dt.training_step(given.model, given.loss, given.optimizer, **options)
    return (lambda: step(given.inputs, given.targets)), step


def plan_of(step: Any) -> BoundPlan:
    """The plan that the step's calls run."""
    *_, ways = step._bound.values()
    found: BoundPlan = ways[-1].plan
    return found


def in_turn(calls: Mapping[str, Callable[[], object]], seconds: float, block: int = 5) -> dict[str, list[float]]:
    """Seconds of single calls, in blocks that take turns; the first call of a block is not counted."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, found.values())) < 2 * block:
        for name, call in calls.items():
            call()
            for _ in range(block):
                begin = time.perf_counter()
                call()
                found[name].append(time.perf_counter() - begin)
    return found


def threads(count: int) -> None:
    """Let PyTorch and our kernels have so many threads."""
    torch.set_num_threads(count)


# ---- tiny steps ---
def tiny(seconds: float) -> list[Row]:
    """Microseconds a call by default, on one thread, and by hand in C."""
    rows = []
    for name in TINY:
        threads(2)
        call, step = step_of(name)
        eager = problem(name)
        calls: dict[str, Callable[[], object]] = {"call": call, "eager": eager.step}
        if name == "tiny_mlp":
            calls["by hand"] = by_hand(problem(name))
        for _ in range(WARM):
            for each in calls.values():
                each()
        times = in_turn(calls, seconds, 30)
        bound = next(iter(step._bound.values()))[-1]
        native = in_turn(
            {"native": lambda bound=bound: bound.plan.plan.run_addresses(bound.addresses)}, seconds / 4, 30
        )
        rows.append({"network": title(name)} | {key: median(of) for key, of in (times | native).items()})
    return rows


def by_hand(given: Problem) -> Callable[[], object]:
    """The step of `mlp.c` on a network's own parameters."""
    library = Path(tempfile.mkdtemp()) / "mlp.so"
    source = Path(__file__).with_name("mlp.c")
    flags = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    subprocess.run([os.environ.get("CC", "gcc"), *flags, str(source), "-lm", "-o", str(library)], check=True)
    native = ctypes.CDLL(str(library))
    native.step.restype = ctypes.c_float
    weights = [p.data for p in given.model.parameters()]
    momenta = [torch.zeros_like(w) for w in weights]
    x, y = given.inputs, given.targets
    assert isinstance(x, torch.Tensor)
    pointers = [(ctypes.c_void_p * len(of))(*[t.data_ptr() for t in of]) for of in (weights, momenta)]
    arguments = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), *pointers, ctypes.c_float(1e-3)
    kept = weights, momenta, x, y
    return lambda: (native.step(*arguments), kept)


# ---- lanes ---
def lanes(seconds: float) -> list[Row]:
    """Times as fast by default as with all threads for each launch, and as without lanes; the arena."""
    rows = []
    for name in BRANCHING:
        threads(2)
        ways = {
            "default": step_of(name),
            "in order": step_of(name, pipeline=TRAINING.without(Concurrency)),
            "all threads": step_of(name, concurrency="off"),
        }
        for call, _ in ways.values():
            for _ in range(WARM):
                call()
        times = in_turn({way: call for way, (call, _) in ways.items()}, seconds)
        found, in_order = plan_of(ways["default"][1]), plan_of(ways["in order"][1])
        trial = found.trial
        simulated = 0.0
        if trial is not None and trial.seconds:
            least = [min(each) for each in zip(*trial.seconds, strict=True)]
            proposed = trial.proposed(least)
            simulated = sum(least) / proposed.seconds if proposed is not None else 1.0
        rows.append(
            {"network": title(name), "launches": len(found.program.launches)}
            | {way: median(of) for way, of in times.items()}
            | {"lanes": 1 if found.lanes is None else found.lanes.lanes, "simulated": simulated}
            | {"memory": found.arena_bytes / max(in_order.arena_bytes, 1)}
        )
    return rows


# ---- threads ---
def chosen(seconds: float) -> list[Row]:
    """The sum over all launches with the chosen threads, against the best of one and two for each."""
    rows = []
    for name in (*BRANCHING, *TINY):
        threads(2)
        call, step = step_of(name, pipeline=TRAINING.without(Concurrency))
        for _ in range(WARM):
            call()
        plan = plan_of(step)
        search = None if plan.launch_threads is None else plan.launch_threads.search
        if search is None or not search.done:
            continue
        bound = next(iter(step._bound.values()))[-1]
        native, least = bound.plan.plan, dict[str, list[float]]()
        adjusted = [key is not None and key in search.times for key in search.keys]
        one = [int(a and 1 not in search.times[str(k)].unequal) for a, k in zip(adjusted, search.keys, strict=True)]
        counts = {"chosen": search.counts, "one": one, "two": [0] * len(one)}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for way, count in counts.items():
                native.threads([count[launch] for launch in plan.order])
                for _ in range(3):
                    native.run_addresses(bound.addresses, profile=True)
                    spent = native.seconds()
                    known = least.setdefault(way, spent)
                    least[way] = [min(pair) for pair in zip(known, spent, strict=True)]
        best = sum(min(pair) for pair in zip(least["one"], least["two"], strict=True))
        row = {"network": title(name), "chosen": sum(least["chosen"]), "best": best, "runs": search.runs}
        rows.append(row | {"all": sum(least["two"])})
    return rows


# ---- a busy loop ---
def busy(seconds: float) -> list[Row]:
    """Steps beside a process that keeps one core busy: by default, with all threads, and on one thread."""
    rows = []
    for name in ("tiny_mlp", "experts"):
        threads(2)
        steps = {"default": step_of(name), "all threads": step_of(name, concurrency="off")}
        for call, _ in steps.values():
            for _ in range(WARM):
                call()
        single, _ = step_of(name)
        threads(1)
        for _ in range(WARM):
            single()
        loop = subprocess.Popen([sys.executable, "-c", _LOOP.format(core=max(os.sched_getaffinity(0)))])
        try:
            time.sleep(0.5)
            found = {}
            for way, call, count in (
                ("one thread", single, 1),
                ("default", steps["default"][0], 2),
                ("all threads", steps["all threads"][0], 2),
            ):
                threads(count)
                for _ in range(5):
                    call()
                found[way] = in_turn({way: call}, seconds)[way]
        finally:
            loop.terminate()
            loop.wait()
        one = statistics.median(found["one thread"])
        rows.append(
            {"network": title(name), "one thread": one}
            | {way: statistics.median(found[way]) / one for way in ("default", "all threads")}
            | {f"{way} 99 %": quantile(found[way], 0.99) / one for way in ("one thread", "default", "all threads")}
            | {f"{way} worst": max(found[way]) / one for way in ("one thread", "default", "all threads")}
        )
    return rows


_LOOP = """
import os
os.sched_setaffinity(0, {{{core}}})
while True:
    pass
"""


# ---- many cores ---
def least(step: Any, runs: int) -> list[float]:
    """The least seconds of each launch: load adds to times, and the least is what it adds least to."""
    bound, plan = next(iter(step._bound.values()))[-1], plan_of(step)
    found: list[float] = []
    for _ in range(runs):
        plan.plan.run_addresses(bound.addresses, profile=True)
        spent = per_launch(plan.order, plan.plan.seconds())
        found = [min(pair) for pair in zip(found or spent, spent, strict=True)]
    return found


def many_cores(runs: int) -> list[Row]:
    """A step on many cores, simulated from its launches on one thread."""
    rows = []
    for name in SIX:
        threads(1)
        call, step = step_of(name)
        for _ in range(3):
            call()
        launches = dt.report(step).functions[-1].launches
        seconds = least(step, runs)
        measured = [replace(launch, seconds=spent) for launch, spent in zip(launches, seconds, strict=True)]
        begin = time.process_time()
        found = together(simulate(program, MANY_CORES) for program in programs_of(measured))
        rows.append(
            {"network": title(name), "launches": found.launches, "all cores": found.all_cores, "best": found.best_each}
            | {"lanes": found.lanes, "bound": found.bound, "scheduling": time.process_time() - begin}
        )
    return rows


def median(times: list[float]) -> float:
    """The median."""
    return statistics.median(times)


def quantile(times: list[float], share: float) -> float:
    """The value below which this share of the times is."""
    return sorted(times)[min(math.floor(share * len(times)), len(times) - 1)]


def mean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0
