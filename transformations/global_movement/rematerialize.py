"""Rematerialize: the backward pass keeps or recomputes activations so that the step fits a memory budget."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from daceml_train.analysis.device_model import CPU_BALANCE, DeviceModel
from daceml_train.analysis.memory import memory
from daceml_train.errors import BudgetInfeasible, Invalid
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.control import draws
from daceml_train.passes.base import Candidate, Measured, Pass
from daceml_train.transformations.global_movement.dead_code import DeadCode
from daceml_train.transformations.global_movement.remat_costs import FOLLOWING, finished, remat_costs_of
from daceml_train.transformations.global_movement.remat_plan import RematPlan, RematStages
from daceml_train.transformations.global_movement.rematerialized_graph import rebuilt

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Rematerialize(Pass):
    """Rematerialize arrays for their late readers instead of keeping them, where the memory budget requires it.

        x -> [f] -> a -> [g] -> y, ..., a, dy -> [h] -> da
            =>     x -> [f] -> a -> [g] -> y, ..., x -> [f] -> a', a', dy -> [h] -> da

    `budget` bounds the bytes of arena and pool (parameters, optimizer state and the batch are the user's and not in
    it): a number of bytes, a text such as "2 GiB", or a share of what the step takes without this pass (0.7). The
    choice minimizes the time of rematerialization: bytes moved, and operations at `intensity` per byte (None: what the
    device does while it moves a byte). `keep` and `recompute` fix the choice for arrays by name or for modules by path
    (`*` matches anything): the former are kept whatever the budget, the latter are always rematerialized. Operators
    that draw from PyTorch's generator never run twice; this package's random numbers are a function of seed and index,
    so they are reproduced. What a step writes (running statistics, parameters) it writes once. Raises
    `BudgetInfeasible` for a budget below the minimum, which the message names.

    The peak is measured after the passes that follow in the pipeline.
    """

    level = "global_movement"
    budget: str | int | float | None = None
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    intensity: float | None = None
    stages: int = 8

    def on(self, model: DeviceModel) -> Pass:
        return self if self.intensity is not None else replace(self, intensity=model.balance)

    def run(self, graph: Graph) -> Graph:
        return self.run_before(graph, FOLLOWING)

    def run_before(self, graph: Graph, rest: Sequence[Pass]) -> Graph:
        if (self.budget is None and not self.recompute) or graph.kept or not graph.nodes:
            return graph  # a forward graph whose backward pass is another graph has nothing to rematerialize
        search = _Search(self, graph, rest)
        limit = None if self.budget is None else budget_bytes(self.budget, search.default)
        if not self.recompute and limit is not None and search.default <= limit:
            return graph
        return search.best(limit)

    def matches(self, graph: Graph) -> Sequence[Candidate]:
        """One match per array that the backward pass reads late and that can be rematerialized, largest first."""
        if graph.kept or not graph.outputs:
            return []
        stages = (search := _Search(self, graph, FOLLOWING)).program()
        late = [b for b in stages.big if stages.movable(b)]
        found = []
        for block in sorted(late, key=lambda b: (-stages.items.bytes[b], b)):
            name = stages.items.names[block]
            alone = Rematerialize(recompute=(name,), intensity=self.intensity, stages=self.stages)
            where = f"%{name}, {show_bytes(stages.items.bytes[block])}"
            found.append(Measured(self, search.given, where, (name,), functools.partial(alone.run, graph), slow=True))
        return found


def budget_bytes(budget: str | int | float, default: int) -> int:
    """A budget in bytes; a float up to 1 is a share of `default`. Raises `Invalid` for anything else."""
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", budget)
        unit = found and found[2].lower()
        if found is None or unit not in UNITS:
            raise Invalid(f"a budget is a number of bytes such as '2 GiB', given {budget!r}")
        return int(float(found[1]) * UNITS[unit])
    if isinstance(budget, float) and 0 < budget <= 1:
        return int(budget * default)
    if budget <= 0 or (isinstance(budget, float) and budget != int(budget)):
        raise Invalid(f"a budget is a positive number of bytes or a share up to 1, given {budget}")
    return int(budget)


def show_bytes(size: int) -> str:
    """Bytes in a readable unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size / factor < 1000 else f"{size / factor:.0f} {unit}"
    return f"{size} bytes"


TRIES = 6
"""How many programs are solved to find the cheapest choice within the budget."""


class _Search:
    """Solves programs whose byte limit is adjusted until the exact memory model meets the budget."""

    def __init__(self, options: Rematerialize, graph: Graph, rest: Sequence[Pass]) -> None:
        self.options, self.given, self.rest = options, graph, rest
        self.runs = remat_costs_of(graph, options.intensity or CPU_BALANCE, rest)
        self.items, self.default = self.runs.items, self.runs.peak

    def program(self, finer: int = 1) -> RematStages:
        """The integer program over the order in which the step runs without this pass, with this multiple of stages."""
        runs, items = self.runs, self.items
        possible = frozenset(b for b, item in runs.makers.items() if runs.pure[item]) - items.kept
        kept = self._chosen(self.options.keep, "keep", frozenset(range(len(items.bytes))))
        dropped = self._chosen(self.options.recompute, "recompute", possible)
        if both := kept & dropped:
            raise BudgetInfeasible(f"{items.names[min(both)]} is named in keep and in recompute")
        count = finer * self.options.stages
        order = range(len(items.nodes))
        return RematStages(items, order, runs.pure, runs.costs, frozenset(kept), frozenset(dropped), count)

    def _chosen(self, patterns: Sequence[str], option: str, possible: frozenset[int]) -> set[int]:
        """The blocks that patterns name: by the array or by the path of the module that produced it."""
        found: set[int] = set()
        producers = self.runs.makers
        for pattern in patterns:
            matched = set()
            for block, name in enumerate(self.items.names):
                path = self.items.nodes[producers[block]].origin.module
                if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(path, pattern) or _under(path, pattern):
                    matched.add(block)
            if not matched:
                raise BudgetInfeasible(
                    f"option {option} of recompute names {pattern!r}, which is no array and no module's path"
                )
            if matched.isdisjoint(possible):
                raise BudgetInfeasible(self._impossible(min(matched)))
            found |= matched & possible
        return found

    def _impossible(self, block: int) -> str:
        """Why an array cannot be rematerialized."""
        producer = self.items.nodes[self.runs.makers[block]]
        name = f"{self.items.names[block]} cannot be rematerialized"
        if draws(producer.op):
            return f"{name}: {producer.op.label} draws from PyTorch's generator"
        if block in self.items.kept:
            return f"{name}: it is a result of the step"
        return f"{name}: it does not belong to the forward pass"

    # ---- search -------------------------------------------------------------------------------------------------
    def best(self, limit: int | None) -> Graph:
        """The graph of the cheapest choice found whose peak is within `limit`.

        If no choice over these stages fits, finer stages are tried. Raises `BudgetInfeasible`, naming the least bytes
        that were found, if no choice fits there either.
        """
        if limit is None:
            choice = self.program().solve(float("1e30"))
            assert choice is not None
            return self.graph_of(choice)
        self.lowest = self.default
        for finer in (1, 2):
            stages = self.program(finer)
            if (found := self._within(stages, limit) or self._least(stages, limit)) is not None:
                return found
        raise BudgetInfeasible(
            f"a budget of {show_bytes(limit)} is below the minimum of {show_bytes(self.lowest)} for {self.given.name}",
            advice=f"it takes {show_bytes(self.default)} without recomputation; parameters and optimizer state are not "
            "counted",
        )

    def _tried(self, choice: RematPlan) -> tuple[Graph, int]:
        """The graph of a choice and its peak."""
        graph = self.graph_of(choice)
        peak = memory(finished(graph, self.rest)).peak
        self.lowest = min(self.lowest, peak)
        return graph, peak

    def _within(self, stages: RematStages, limit: int) -> Graph | None:
        """The cheapest choice within the limit: the program's own limit is adjusted until the peak is just below it."""
        found: tuple[float, Graph] | None = None
        target = float(limit)
        tight, loose = 0.0, 2.0 * self.default  # estimates whose peak was within the budget, and beyond it
        for _ in range(TRIES):
            choice = stages.solve(target)
            if choice is None:  # infeasible: a looser estimate may still have a peak within the budget
                tight = max(tight, target)
                target = (target + min(loose, 1.2 * target)) / 2
                continue
            graph, peak = self._tried(choice)
            if peak <= limit:
                found = min(found or (choice.cost, graph), (choice.cost, graph), key=lambda pair: pair[0])
                if peak > 0.98 * limit:
                    break
                tight, target = target, min(target + (limit - peak), (target + loose) / 2)
            else:
                loose = target
                target = max(target - max(1.2 * (peak - limit), 0.01 * limit), (tight + target) / 2)
            if loose - tight < 0.002 * limit:
                break
        return found and found[1]

    def _least(self, stages: RematStages, limit: int) -> Graph | None:
        """The first choice within the limit while the bytes are minimized; `lowest` is the minimum found."""
        targets = [None, *(share * self.lowest for share in (0.95, 0.9, 0.85, 0.8, 0.75))]
        for target in targets:
            choice = stages.solve(target)
            if choice is None:
                break
            graph, peak = self._tried(choice)
            if peak <= limit:
                return graph
        return None

    def graph_of(self, choice: RematPlan) -> Graph:
        """The graph of a choice, without dead code."""
        return DeadCode().run(rebuilt(self.runs.graph, self.items, choice))


def _under(path: str, pattern: str) -> bool:
    return bool(path) and (path == pattern or path.startswith(f"{pattern}."))


def rematerialized(graph: Graph) -> list[Node]:
    """The operators that run a second time in a graph that `Rematerialize` produced."""
    return [node for node in graph.nodes if any("_again" in name for name in node.outputs)]
