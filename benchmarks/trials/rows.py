"""The rows: each a function of the number of kills that returns what was found."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil

import daceml_train as dt
from benchmarks.trials import digits
from daceml_train.trials.keys import Path as TrialPath
from daceml_train.trials.simulate import simulate
from daceml_train.trials.state import same
from daceml_train.trials.tree import merged

Row = dict[str, Any]


def late(kills: int) -> Row:
    """128 trials that part late: steps, time, and every tensor and generator beside separate trials."""
    trials = list(digits.late_drops())
    shared = digits.stages(evaluate=False)
    dict(shared.run(0, {"lr": 0.3}, 2))  # compiles
    shared = dt.Stages(shared.step, data=digits.data, seed=0, name="digits")
    start = time.perf_counter()
    shared.run_all(trials, digits.STEPS)
    seconds = time.perf_counter() - start
    equal, alone, steps = True, 0.0, 0
    for number, trial in enumerate(trials):
        shared.load(trial, digits.STEPS)
        state = shared.training.snapshot()
        shared.reset()
        single = dt.Stages(shared.step, data=digits.data, seed=0, name="digits")  # the same program and tensors
        start = time.perf_counter()
        dict(single.run(number, trial, digits.STEPS))
        alone += time.perf_counter() - start
        steps += single.report().steps
        equal &= same(state, single.training.snapshot())
    report = shared.report()
    return {
        "searches": [
            {
                "name": "late drops, 128 trials of 200 steps",
                "alone": steps,
                "steps": report.steps,
                "alone seconds": alone,
                "seconds": seconds,
                "equal": equal,
            }
        ]
    }


def with_optuna(kills: int) -> Row:
    """Optuna's samplers and pruners: what they are told, and the best trial."""
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
        keys = ("told", "best")
        row = {"name": name, "alone": alone["steps"], "steps": shared["steps"]}
        row |= {"alone seconds": alone["seconds"], "seconds": shared["seconds"], "distinct": shared["distinct"]}
        found.append(row | {"equal": all(shared[key] == alone[key] for key in keys), "best": shared["best"][2]})
    return {"searches": found}


def _study(sampler: Any, pruner: Any, each: bool) -> Row:
    import optuna

    own = digits.stages()
    dict(own.run(0, {"lr": 0.3}, 2))  # compiles
    own.reset()
    told, steps = [], 0

    def new() -> dt.Stages:
        own.reset()
        return dt.Stages(own.step, data=digits.data, evaluate=digits.accuracy, seed=0, name="digits")

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
    return {"told": told, "best": best, "steps": trained, "seconds": seconds, "distinct": shared.tree.steps()}


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
    budgets = _halving(len(paths), (12, 50, 200), 4)
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
        made, alone = simulate(tree, 40, 1.0, 0.05, 0.05), simulate(separate, 40)
        row = {"name": name, "alone": tree.requested, "steps": tree.steps(), "makespan": made.time}
        found.append(
            row | {"bound": made.bound, "simple bound": max(made.longest, made.busy / 40), "alone makespan": alone.time}
        )
    return {"searches": found}


def _apart(number: int, until: tuple[int, ...]) -> TrialPath:
    return TrialPath("root", {"trial": number}, until[-1])


def _halving(trials: int, rungs: tuple[int, ...], factor: int) -> list[int]:
    """How far each trial gets where a quarter goes on at each rung, the scores drawn at random."""
    chance, alive, budget = random.Random(0), list(range(trials)), [rungs[0]] * trials
    for rung in rungs:
        for trial in alive:
            budget[trial] = rung
        alive = sorted(chance.sample(alive, max(1, len(alive) // factor)))
    return budget


def killed(kills: int) -> Row:
    """Searches by two processes of which one is killed at random moments: the values of an undisturbed one."""
    chance, trials, done, wrong, rounds = random.Random(0), list(digits.late_drops(60))[::8], 0, 0, 0
    undisturbed = digits.stages().run_all(trials, 60)
    requested = twice = 0
    start = time.perf_counter()
    while done < kills:
        rounds += 1
        with tempfile.TemporaryDirectory() as folder:
            process = multiprocessing.get_context("spawn").Process(target=_search, args=(folder,))
            process.start()
            while process.is_alive() and done < kills:
                time.sleep(chance.uniform(0.5, 3.0))
                done += _kill_one(process.pid, chance)
            process.join()
            stages = digits.stages(storage=folder)
            own = stages.run_all(trials, 60)
            wrong += own != undisturbed
            report = stages.report()
            requested, twice = requested + report.requested, twice + report.twice
    name = f"{done} kills of one of two processes at random moments, {rounds} searches of 16 trials"
    seconds = time.perf_counter() - start
    return {"searches": [{"name": name, "equal": not wrong, "twice": twice, "seconds": seconds}]}


def _search(folder: str) -> None:
    dt.run_trials(functools.partial(digits.small, folder), list(digits.late_drops(60))[::8], 60, restarts=1000)


def _kill_one(process: int | None, chance: random.Random) -> int:
    """Kill the search itself, or one of its workers: those with work, not Python's resource tracker."""
    try:
        family = psutil.Process(process).children()
        workers = [child for child in family if "spawn_main" in " ".join(child.cmdline())]
        if not workers:
            return 0
        os.kill(chance.choice(workers).pid, signal.SIGKILL)
        return 1
    except (psutil.NoSuchProcess, ProcessLookupError):
        return 0


ROWS: dict[str, Callable[[int], Row]] = {
    "late": late,
    "optuna": with_optuna,
    "residual": residual,
    "simulated": simulated,
    "kills": killed,
}
