"""Memory: planned peaks of a training step, as it was captured, by default, and under a budget.

    python -m benchmarks.memory [--budget 0.7] [--time] [NETWORK...]

prints MiB of arena and pool: live bytes at the peak in the order in which operators were captured and differentiated,
live bytes by default, the plan for them, and the same under `Rematerialize(budget)` with what it adds in bytes moved
and in operations. Parameters, optimizer state and the batch are not in these figures. With `--time`, steps under the
budget and by default run in turns; the median of the ratios of their times stands last. Else nothing runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator

import daceml_train as dt
from benchmarks.networks import TWELVE, Network
from daceml_train.analysis.memory import Memory, memory
from daceml_train.analysis.traffic import traffic
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.lowering.arena import Lifetime, plan_arena
from daceml_train.passes.pipeline import Step
from daceml_train.transformations.global_movement.dead_code import DeadCode
from daceml_train.transformations.global_movement.remat_costs import finished
from daceml_train.transformations.global_movement.rematerialize import Rematerialize
from daceml_train.transformations.global_movement.update_in_place import UpdateInPlace
from daceml_train.transformations.pipelines import TRAINING

MIB = 2**20


class _Enough(BaseException):
    """Ends compilation once the graph is there."""


def step_graph(network: Network, small: bool = False) -> Graph:
    """A network's training step after the levels of fusion and layout."""
    problem = network.build(small=small)
    found: list[Graph] = []
    last = len(TRAINING) - len(TRAINING.level("global_movement")) - 1

    def watch(step: Step) -> None:
        if step.position == last:
            assert step.graph is not None
            found.append(step.graph)
            raise _Enough

    with tempfile.TemporaryDirectory() as folder:
        step = dt.training_step(problem.model, problem.loss, problem.optimizer, cache=folder, pass_callback=watch)
        try:
            step(problem.inputs, problem.targets)
        except _Enough:
            pass
    if not found:
        raise Invalid(f"the step is not a single program: {', '.join(step.breaks)}")
    return found[0]


def planned(model: Memory) -> int:
    """The planned arena for all arrays, including those that library calls allocate."""
    return plan_arena([Lifetime(a.bytes, a.first, a.last) for a in model.arrays])[1]


def time_ratio(network: Network, budget: float | str, small: bool, runs: int = 15) -> float:
    """Time of a step under the budget, in terms of one by default."""
    steps = []
    for pipeline in (TRAINING, TRAINING.before("update_in_place", Rematerialize(budget=budget))):
        problem = network.build(small=small)
        step = dt.training_step(problem.model, problem.loss, problem.optimizer, pipeline=pipeline)
        for _ in range(3):
            step(problem.inputs, problem.targets)
        assert not step.breaks, step.breaks
        steps.append((step, problem))
    ratios = []
    for _ in range(runs):
        taken = []
        for step, problem in steps:
            start = time.perf_counter()
            step(problem.inputs, problem.targets)
            taken.append(time.perf_counter() - start)
        ratios.append(taken[1] / taken[0])
    return statistics.median(ratios)


def row(name: str, network: Network, budget: float | str, small: bool = False, timed: bool = False) -> Iterator[str]:
    """The cells of a network's line."""
    graph = DeadCode().run(step_graph(network, small))
    before, default = memory(UpdateInPlace().run(graph)), finished(graph)
    now, moved = memory(default), traffic(default)
    yield f"{name:16s}"
    yield f"{before.peak / MIB:8.1f}"
    yield f"{now.peak / MIB:8.1f}"
    yield f"{planned(now) / MIB:8.1f}"
    start = time.process_time()
    try:
        after = finished(Rematerialize(budget=budget).run(graph))
    except Invalid as error:
        yield f"  {error.message}"
        return
    seconds = time.process_time() - start
    less, again = memory(after), traffic(after)
    yield f"{less.peak / MIB:8.1f}"
    yield f"{planned(less) / MIB:8.1f}"
    yield f"{less.peak / now.peak:6.2f}"
    yield f"{100 * (again.bytes / moved.bytes - 1):+6.1f} %"
    yield f"{100 * (again.flops / moved.flops - 1):+6.1f} %"
    yield f"{seconds:6.1f} s"
    if timed:
        yield f"{time_ratio(network, budget, small):6.3f}"


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory")
    parser.add_argument("networks", nargs="*", default=list(TWELVE))
    parser.add_argument("--budget", default="0.7", help="a share of the default or a size such as '200 MiB'")
    parser.add_argument("--small", action="store_true", help="the small sizes that tests use")
    parser.add_argument("--time", action="store_true", help="run steps, too")
    given = parser.parse_args(arguments)
    budget = float(given.budget) if given.budget.replace(".", "", 1).isdigit() else given.budget
    head = "network          captured default  planned  budget  planned  share  bytes    flops   search"
    print(head + "  time" * given.time)
    for name in given.networks:
        print(" ".join(row(name, TWELVE[name], budget, given.small, given.time)), flush=True)


if __name__ == "__main__":
    main()
