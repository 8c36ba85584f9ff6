"""What a call costs beyond its kernels: `python -m benchmarks.overhead`.

Networks of a few tiny layers, where the arithmetic takes next to nothing: microseconds per training step, per native
run, and inside kernels and library calls; the slope over the number of parameters is what each parameter costs. Then
modules from `optimize` beside the same modules in eager execution, call by call in turns.
"""

from __future__ import annotations

import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import daceml_train as dt
from benchmarks.networks.mlp import mlp

LAYERS = (2, 11, 101)
WIDTH = 8
VISITS = 5


def microseconds(function: Callable[[], object], repeats: int = 300) -> float:
    """The median time of a call."""
    for _ in range(20):
        function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        function()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def main() -> int:
    """Measure and print."""
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title="Microseconds per training step", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("parameters", "PyTorch eager", "a call", "native run", "kernels and calls", "Python's part"):
        table.add_column(heading, justify="right")
    points = []
    for layers in LAYERS:
        row = measured(layers)
        points.append((2 * layers, row[1] - row[2]))
        table.add_row(str(2 * layers), *(f"{value:.1f}" for value in (*row, row[1] - row[2])))
    console.print(table)
    slope = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    console.print(f"Python's part grows by {1e3 * slope:.0f} ns per parameter\n")
    console.print(_modules())
    return 0


def _modules() -> Table:
    table = Table(title="Microseconds per call of a module", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("parameters", justify="right")
    for what in ("forward, backward", "forward", "inference"):
        for heading in (what, "eager", "faster"):
            table.add_column(heading, justify="right")
    for layers in LAYERS:
        cells = [str(2 * layers)]
        for ours, eager in module(layers):
            cells += [f"{ours:.1f}", f"{eager:.1f}", f"{eager / ours:.2f}"]
        table.add_row(*cells)
    return table


def module(layers: int) -> list[tuple[float, float]]:
    """Microseconds of forward and backward, forward alone, and inference: from `optimize`, and in eager execution."""
    torch.manual_seed(0)
    x, cotangent = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    plain = mlp([WIDTH] * (layers + 1))
    compiled = dt.optimize(copy.deepcopy(plain))

    def both(of: torch.nn.Module) -> None:
        of(x).backward(cotangent)

    def forward(of: torch.nn.Module) -> None:
        of(x)

    def inference(of: torch.nn.Module) -> None:
        with torch.no_grad():
            of(x)

    found = []
    for run in (both, forward, inference):
        visits = []
        for _ in range(VISITS):
            visits.append([microseconds(functools.partial(run, of)) for of in (compiled, plain)])
        found.append((statistics.median(v[0] for v in visits), statistics.median(v[1] for v in visits)))
    return found


def measured(layers: int) -> tuple[float, float, float, float]:
    """Microseconds of an eager step, of a call, of its native run, and of what the native run launches."""
    torch.manual_seed(0)
    x, y = torch.randn(4, WIDTH), torch.randint(0, WIDTH, (4,))
    model, plain = mlp([WIDTH] * (layers + 1)), mlp([WIDTH] * (layers + 1))
    own = torch.optim.SGD(model.parameters(), lr=1e-3)
    theirs = torch.optim.SGD(plain.parameters(), lr=1e-3)
    step = dt.training_step(model, F.cross_entropy, own)

    def eager() -> None:
        theirs.zero_grad(set_to_none=True)
        F.cross_entropy(plain(x), y).backward()
        theirs.step()

    step(x, y)
    if step.breaks:
        raise SystemExit(f"the step is not one program: {step.breaks[0]}")
    ((bound,),) = step._bound.values()
    plan, addresses = bound.plan, bound.addresses

    def launches() -> float:
        plan.plan.run_addresses(addresses, profile=True)
        return 1e6 * sum(plan.plan.seconds())

    inside = statistics.median(launches() for _ in range(100))
    run = microseconds(lambda: plan.run_addresses(addresses))
    return microseconds(eager, 100), microseconds(lambda: step(x, y)), run, inside


if __name__ == "__main__":
    sys.exit(main())
