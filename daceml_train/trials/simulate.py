"""The time of a stage tree on many workers, without training: longest path first, checkpoints where work moves."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from daceml_train.trials.tree import Stage, Tree


@dataclass(frozen=True)
class Makespan:
    """What a simulated run takes, in the unit of `per_step`.

    `bound` is what no schedule can beat. The steps after the first d of each trial cannot start before time d, so d
    plus their number divided by the workers is a bound: for d = 0 the work divided by the workers, and the longest
    path where no step is left.
    """

    time: float
    busy: float
    longest: float
    bound: float
    workers: int

    def __str__(self) -> str:
        share = self.time / self.bound - 1 if self.bound else 0.0
        return (
            f"{self.time:.0f} on {self.workers} workers, {share:.0%} over the bound of {self.bound:.0f} "
            f"(longest path {self.longest:.0f}, work {self.busy:.0f})"
        )


def simulate(tree: Tree, workers: int, per_step: float = 1.0, save: float = 0.0, load: float = 0.0) -> Makespan:
    """Run the stages of a tree on `workers`, each free one taking the ready stage with the longest path.

    A fork costs `save`, and `load` for each continuation but one, with which the worker goes on in memory.
    """
    ready: list[tuple[float, int, Stage]] = []
    running: list[tuple[float, int, Stage]] = []
    clock = busy = 0.0
    count, free = 0, workers
    longest = {id(stage): tree.longest(stage) * per_step for stage in tree.stages()}

    def push(stages: list[Stage]) -> None:
        nonlocal count
        for stage in stages:
            heapq.heappush(ready, (-longest[id(stage)], count, stage))
            count += 1

    push(tree.root.children)
    while ready or running:
        while ready and free:
            _, order, stage = heapq.heappop(ready)
            cost = stage.steps * per_step + _moves(stage, tree, save, load)
            heapq.heappush(running, (clock + cost, order, stage))
            busy += cost
            free -= 1
        clock, _, stage = heapq.heappop(running)
        free += 1
        push(stage.children)
    critical = max((longest[id(stage)] for stage in tree.root.children), default=0.0)
    return Makespan(clock, busy, critical, max(critical, _bound(tree, workers) * per_step), workers)


def simulate_helped(
    tree: Tree,
    workers: int,
    per_step: float = 1.0,
    save: float = 0.0,
    load: float = 0.0,
    most: int = 8,
    each: float = 0.9,
) -> Makespan:
    """As `simulate`, where workers that have no stage of their own help to train one, as data parallelism does.

    A stage has up to `most` workers, of which each further one adds `each` of a worker's speed. They go to the longest
    paths, and are distributed again whenever a stage ends. What results is equal up to rounding, not to the bit: a
    gradient that is summed over workers is summed in another order.
    """
    longest = {id(stage): tree.longest(stage) * per_step for stage in tree.stages()}
    ready = list(reversed(tree.root.children))  # the last one first: of equal paths, the earliest is taken
    left: dict[int, float] = {}
    active: list[Stage] = []
    clock = busy = 0.0
    while ready or active:
        ready.sort(key=lambda stage: longest[id(stage)])
        while ready and len(active) < workers:
            stage = ready.pop()
            left[id(stage)] = stage.steps * per_step + _moves(stage, tree, save, load)
            busy += left[id(stage)]
            active.append(stage)
        after = {id(stage): longest[id(stage)] - stage.steps * per_step for stage in active}
        helpers = _helpers([left[i] + after[i] for i in map(id, active)], workers, most, each)
        speed = {id(stage): 1 + each * more for stage, more in zip(active, helpers, strict=True)}
        passed = min(left[i] / speed[i] for i in speed)
        clock += passed
        for stage in active:
            left[id(stage)] -= passed * speed[id(stage)]
        ended = [stage for stage in active if left[id(stage)] <= 1e-9 * per_step]
        active = [stage for stage in active if left[id(stage)] > 1e-9 * per_step]
        ready = [child for stage in reversed(ended) for child in reversed(stage.children)] + ready
    critical = max((longest[id(stage)] for stage in tree.root.children), default=0.0)
    return Makespan(clock, busy, critical, max(critical / (1 + each * (most - 1)), busy / workers), workers)


def _helpers(paths: list[float], workers: int, most: int, each: float) -> list[int]:
    """How many further workers each of the active stages has, by what is left of the path that begins with it."""
    found = [0] * len(paths)
    queue = [(-path, place) for place, path in enumerate(paths)] if most > 1 else []
    heapq.heapify(queue)
    for _ in range(workers - len(paths)):
        if not queue:
            break
        _, place = heapq.heappop(queue)
        found[place] += 1
        if found[place] < most - 1:
            heapq.heappush(queue, (-paths[place] / (1 + each * found[place]), place))
    return found


def _bound(tree: Tree, workers: int) -> float:
    stages = list(tree.stages())
    depths = sorted({0, *(stage.start for stage in stages), *(stage.end for stage in stages)})
    later = (sum(max(0, s.end - max(s.start, depth)) for s in stages) for depth in depths)
    return max(depth + steps / workers for depth, steps in zip(depths, later, strict=True))


def _moves(stage: Stage, tree: Tree, save: float, load: float) -> float:
    """The time of saving a fork and of loading one."""
    parent = stage.parent
    if parent is None or parent is tree.root or not parent.is_fork:
        return save if stage.is_fork else 0.0
    goes_on = max(parent.children, key=tree.longest) is stage
    return (save if stage.is_fork else 0.0) + (0.0 if goes_on else load)


__all__ = ["Makespan", "simulate", "simulate_helped"]
