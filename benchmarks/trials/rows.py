"""The rows: each a function of the number of kills that returns what was found."""

from __future__ import annotations

import functools
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import daceml_train as dt
from benchmarks.faults.children import begin, finished
from benchmarks.trials import digits
from benchmarks.trials.programs import compiled
from daceml_train.driver.stacked import StackedStep
from daceml_train.trials.keys import Path as TrialPath
from daceml_train.trials.pool import train_tree
from daceml_train.trials.simulate import simulate, simulate_helped
from daceml_train.trials.tree import merged
from daceml_train.trials.values import same

Row = dict[str, Any]
KILLS_EACH = 8
"""Kills of a search at most, so that searches end."""
INITIALIZATIONS = 10
"""With how many initial parameters each search by Optuna runs: what it prunes and samples depends on the values."""
HELPED, EACH = 4, 0.9
"""How many workers train a stage at most in a simulation with helpers, and the speed that each further one adds."""
LONGEST = 3.0
"""Seconds between two kills at most; a search takes about so long."""


def late(kills: int) -> Row:
    """128 trials that part late: steps, time, and every tensor and generator beside separate trials.

    The search by stages runs four times, each followed by a quarter of the separate trials, so that both have their
    share of a machine that grows faster or slower; its time is the mean.
    """
    trials = list(digits.late_drops())
    shared = digits.stages(evaluate=False)
    dict(shared.run(0, {"lr": 0.3}, 2))  # compiles
    together, apart, equal, steps = _Spent(), _Spent(), True, 0
    for quarter in range(4):
        shared.reset()
        shared = dt.Stages(shared.step, data=digits.data, seed=0, name="digits")
        with together:
            shared.run_all(trials, digits.STEPS)
        for number in range(quarter, len(trials), 4):
            shared.load(trials[number], digits.STEPS)
            state = shared.training.snapshot()
            shared.reset()
            single = dt.Stages(shared.step, data=digits.data, seed=0, name="digits")  # the same program and tensors
            with apart:
                dict(single.run(number, trials[number], digits.STEPS))
            steps += single.report().steps
            single.load(trials[number], digits.STEPS)  # with its generators, which `run` leaves as they were
            equal &= same(state, single.training.snapshot())
    row = {"name": "late drops, 128 trials of 200 steps", "alone": steps, "steps": shared.report().steps}
    row |= {"alone seconds": apart.wall, "seconds": together.wall / 4, "equal": equal}
    return {
        "searches": [row | {"alone processor seconds": apart.processor, "processor seconds": together.processor / 4}]
    }


class _Spent:
    """Seconds of wall clock and of the processor within its contexts."""

    def __init__(self) -> None:
        self.wall = self.processor = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        self.wall += time.perf_counter() - self._begun[0]
        self.processor += time.process_time() - self._begun[1]


def with_optuna(kills: int) -> Row:
    """Optuna's samplers and pruners: what they are told, and the best trial.

    `save_at` names the steps of the space's drops, which a user knows: the first trial to pass one cannot. PyTorch is
    seeded once: masks of dropout are drawn after the initial parameters.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    samplers, pruners = optuna.samplers, optuna.pruners
    searches: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "Optuna, random + successive halving, 60 trials": (
            lambda: samplers.RandomSampler(seed=1),
            lambda: pruners.SuccessiveHalvingPruner(10, 4),
        ),
        "Optuna, TPE + Hyperband, 60 trials": (
            lambda: samplers.TPESampler(seed=1),
            lambda: pruners.HyperbandPruner(10, 160, 4),
        ),
        "Optuna, TPE alone, 60 trials": (lambda: samplers.TPESampler(seed=1), pruners.NopPruner),
    }
    found = []
    for name, (sampler, pruner) in searches.items():
        shared, alone = (_study(sampler(), pruner(), each) for each in (False, True))
        others = [_study(sampler(), pruner(), False, seed) for seed in range(INITIALIZATIONS)]
        keys = ("told", "best")
        row = {"name": name, "alone": alone["steps"], "steps": shared["steps"]}
        row |= {"alone seconds": alone["seconds"], "seconds": shared["seconds"], "distinct": shared["distinct"]}
        row["ratios"] = [study["requested"] / study["steps"] for study in others]
        row["limits"] = [study["requested"] / study["distinct"] for study in others]
        found.append(row | {"equal": all(shared[key] == alone[key] for key in keys), "best": shared["best"][2]})
    return {"searches": found}


def _study(sampler: Any, pruner: Any, each: bool, seed: int = 0) -> Row:
    import optuna

    own = digits.stages(seed=seed, once=True)
    dict(own.run(0, {"lr": 0.3}, 2))  # compiles
    own.reset()
    told, steps = [], 0

    def new() -> dt.Stages:
        own.reset()
        return dt.Stages(
            own.step, data=digits.data, evaluate=digits.accuracy, name="digits", save_at=(60, 80, 110, 130)
        )

    shared = new()

    def objective(trial: Any) -> float:
        nonlocal steps
        lr = trial.suggest_categorical("lr", [0.2, 0.1, 0.05, 0.02])
        first, second = (trial.suggest_categorical(name, [0.5, 0.2, 0.1]) for name in ("f1", "f2"))
        at = trial.suggest_categorical("m1", [60, 80]), trial.suggest_categorical("m2", [110, 130])
        settings = {"lr": dt.schedule.steps(lr, {at[0]: first, at[1]: second})}
        stages, value = new() if each else shared, 0.0
        try:
            for reached, value in stages.run(trial, settings, (10, 40, 160)):
                told.append((trial.number, reached, value))
                trial.report(value, reached)
                if trial.should_prune():
                    raise optuna.TrialPruned()
        finally:
            steps += stages.report().steps if each else 0
        return value

    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner, study_name="digits")
    start = time.perf_counter()
    study.optimize(objective, n_trials=60)
    seconds = time.perf_counter() - start
    best = study.best_trial.number, study.best_params, study.best_value
    trained = steps or shared.report().steps
    requested = sum({number: reached for number, reached, _ in told}.values())
    found = {"told": told, "best": best, "steps": trained, "seconds": seconds}
    return found | {"requested": requested, "distinct": shared.tree.steps()}


def residual(kills: int, steps: int = 60) -> Row:
    """A residual network, warm-up and drops, 64 trials on two processes; the first two beside separate trials."""
    trials = list(digits.warm_up_and_drops(steps))
    with tempfile.TemporaryDirectory() as folder:
        dict(digits.stages(digits.residual).run(0, {"lr": 0.3}, 2))  # compiles
        start = time.perf_counter()
        values = dt.run_trials(functools.partial(digits.convolutional, folder), trials, steps, workers=2)
        seconds = time.perf_counter() - start
        report = digits.stages(digits.residual, folder).report()
    equal = True
    for number in (0, 63):
        equal &= dict(digits.stages(digits.residual).run(number, trials[number], steps)) == values[number]
    name = f"residual network, warm-up and drops, 64 trials of {steps} steps, two processes"
    row = {"name": name, "alone": report.requested, "steps": report.steps, "seconds": seconds, "equal": equal}
    return {"searches": [row | {"best": max(value[steps] for value in values)}]}


def simulated(kills: int) -> Row:
    """Grid and successive halving of step decay on 40 workers; nothing is trained."""
    paths = [TrialPath("root", trial, 200) for trial in digits.step_decay()]
    late = [TrialPath("root", trial, 200) for trial in digits.late_drops()]
    budgets = _halving(paths, (12, 50, 200), 4)
    spaces = {
        "grid, step decay, 216 trials of 200 epochs": [(path, None) for path in paths],
        "successive halving (12, 50, 200), step decay, 216 trials": [
            (path, tuple(r for r in (12, 50, 200) if r <= budget)) for path, budget in zip(paths, budgets, strict=True)
        ],
        "grid, late drops, 128 trials of 200 epochs": [(path, None) for path in late],
    }
    found = []
    for name, trials in spaces.items():
        tree = merged("root", trials)
        separate = merged(
            "root", [(_apart(n, until or (200,)), until or (200,)) for n, (_, until) in enumerate(trials)]
        )
        result, alone = simulate(tree, 40, 1.0, 0.05, 0.05), simulate(separate, 40)
        row = {"name": name, "alone": tree.requested, "steps": tree.steps(), "makespan": result.time}
        helped = simulate_helped(tree, 40, 1.0, 0.05, 0.05, HELPED, EACH)
        found.append(
            row
            | {
                "helped makespan": helped.time,
                "helped bound": helped.bound,
                "bound": result.bound,
                "simple bound": max(result.longest, result.busy / 40),
                "alone makespan": alone.time,
            }
        )
    return {"searches": found}


def _apart(number: int, until: tuple[int, ...]) -> TrialPath:
    return TrialPath("root", {"trial": number}, until[-1])


def _halving(paths: list[TrialPath], rungs: tuple[int, ...], factor: int) -> list[int]:
    """How far each trial gets where a quarter goes on at each rung.

    Trials that are equal up to a rung have one score there, drawn at random; of these, the first ones go on.
    """
    alive, budget = list(range(len(paths))), [rungs[0]] * len(paths)
    for rung in rungs:
        for trial in alive:
            budget[trial] = rung
        alive = sorted(alive, key=lambda trial, rung=rung: (paths[trial].key(rung), trial))
        alive = alive[: max(1, len(alive) // factor)]
    return budget


def killed(kills: int) -> Row:
    """Two processes train on one storage; one is killed at a random moment and replaced, eight times a search."""
    chance, moments = random.Random(0), Counter[str]()
    undisturbed = finished(_undisturbed).result
    assert isinstance(undisturbed, list), undisturbed
    done = searches = wrong = steps = distinct = 0
    start = time.perf_counter()
    while done < kills:
        with tempfile.TemporaryDirectory() as folder:
            work, wanted = functools.partial(_work, folder), min(KILLS_EACH, kills - done)
            children = [begin(work), begin(work)]
            while wanted:
                position = chance.randrange(2)
                children[position].listen(time.monotonic() + chance.uniform(0, LONGEST))
                if children[position].status is None:
                    children[position].kill()
                    children[position].end()
                    moments[children[position].moment] += 1
                    done, wanted = done + 1, wanted - 1
                    children[position] = begin(work)
                else:  # it has ended: nothing is left to kill
                    wanted = 0
            for child in children:
                child.end()
                values, trained, distinct = child.result
                wrong += values != undisturbed
            searches, steps = searches + 1, steps + trained
    seconds = time.perf_counter() - start
    name = f"{done} kills, {searches} searches of 16 trials by two processes"
    found = {"name": name, "equal": not wrong, "steps": steps, "distinct": distinct * searches, "seconds": seconds}
    return {"searches": [found | {"moments": dict(moments)}]}


def _stages(folder: str | None) -> dt.Stages:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = digits.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = dt.training_step(model, torch.nn.functional.cross_entropy, optimizer)
    return dt.Stages(step, data=_slow, evaluate=digits.accuracy, storage=folder, seed=0, name="digits, slowly")


def _slow(step: int, settings: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, after a while, so that most kills come while a stage trains."""
    time.sleep(0.01)
    return digits.data(step, settings)


def _trials() -> list[dict[str, Any]]:
    return list(digits.late_drops(60))[::8]


def _undisturbed(marks: int) -> list[dict[int, Any]]:
    return _stages(None).run_all(_trials(), 60)


def _work(folder: str, marks: int) -> tuple[list[dict[int, Any]], int, int]:
    """Train with the others on this storage; the values, the steps that all finished stages have, and the least."""
    stages = _stages(folder)
    tree = stages.know([stages.path(trial, 60) for trial in _trials()], (60,))
    train_tree(stages, tree, lambda told: os.write(marks, b"training\n"))
    os.write(marks, b"values\n")
    values = stages.run_all(_trials(), 60)
    return values, stages.report().steps, tree.steps()


def in_one_program(kills: int, steps: int = 20) -> Row:
    """Trials of a 64-64-10 network, each with a rate of its own, as one program beside one at a time."""
    return {"searches": [_stacked(count, steps) for count in (4, 16, 64)]}


def _stacked(count: int, steps: int) -> Row:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.training_step(model, torch.nn.functional.cross_entropy, optimizer)
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    step(x, y)
    start = [p.detach().clone() for p in model.parameters()]
    stack, far = StackedStep(step, count, x, y), 0.0
    for trial in range(count):
        optimizer.param_groups[0]["lr"] = 0.3 * (trial + 1) / count
        stack.load(trial)
        assert stack.read(trial, x, y)
    for _ in range(steps):
        stack(x, y)
    for trial in range(count):
        optimizer.param_groups[0]["lr"] = 0.3 * (trial + 1) / count
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        for _ in range(steps):
            step(x, y)
        ended = [p.detach().clone() for p in model.parameters()]
        stack.store((trial + 1) % count)
        assert not torch.equal(ended[0], next(model.parameters())), "trials have rates of their own"
        stack.store(trial)
        far = max(far, *(float((a - b.detach()).abs().max()) for a, b in zip(ended, model.parameters(), strict=True)))
    alone, together = _processor_time(lambda: step(x, y), 200), _processor_time(lambda: stack(x, y), 400 // count)
    return {"name": f"{count} trials", "alone us": alone * 1e6, "us": together / count * 1e6, "far": far}


def together(kills: int) -> Row:
    """Late drops, where ready stages of equal range are one program if that is faster; beside stages one at a time."""
    trials = list(digits.late_drops())
    shared = digits.stages(evaluate=False)
    dict(shared.run(0, {"lr": 0.3}, 2))  # compiles
    times: dict[int, list[float]] = {}
    ends: dict[int, list[Any]] = {}
    for _ in range(4):  # the first one compiles
        for count in (1, 8, 16):
            own = dt.Stages(shared.step, data=digits.data, seed=0, name="digits", stacked=count)
            start = time.process_time()
            own.run_all(trials, digits.STEPS)
            times.setdefault(count, []).append(time.process_time() - start)
            ends[count] = []
            for trial in trials[::9]:
                own.load(trial, digits.STEPS)
                ends[count].append([p.detach().clone() for p in own.step.model.parameters()])
            shared.reset()
    one, found = min(times.pop(1)), []
    for count, seconds in times.items():
        pairs = ((a, b) for x, y in zip(ends[1], ends[count], strict=True) for a, b in zip(x, y, strict=True))
        far = max(float((a - b).abs().max()) for a, b in pairs)
        found.append({"name": f"late drops, up to {count} stages", "one": one, "seconds": min(seconds), "far": far})
    return {"searches": found}


def _processor_time(call: Callable[[], Any], times: int, rounds: int = 7) -> float:
    """The least of several mean times of one call, on this thread."""
    found = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(times):
            call()
        found.append((time.process_time() - start) / times)
    return min(found)


ROWS: dict[str, Callable[[int], Row]] = {
    "late": late,
    "optuna": with_optuna,
    "residual": residual,
    "programs": compiled,
    "stacked": in_one_program,
    "together": together,
    "simulated": simulated,
    "kills": killed,
}
