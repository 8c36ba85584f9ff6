"""One model through the compiler: compared with eager execution, and counted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd.profiler import profile, record_function

import daceml_train as dt
from benchmarks.models.model import Model
from benchmarks.models.outcome import Outcome
from benchmarks.models.sizes import LossAndResults, of_other_size, rows_of, takes_other_sizes
from benchmarks.models.training import (
    NOISY_RUNS,
    Run,
    difference,
    evaluated,
    optimizer_of,
    retrace,
    train,
    train_whole,
    train_with_noise,
    updates,
)
from daceml_train.driver import function
from daceml_train.driver import module as driver
from daceml_train.driver.function import CompiledGraph
from daceml_train.driver.module import state_of

GRAPH = "daceml_train graph"


def outcome(row: Model, cache: Path) -> Outcome:
    """Train `row` in all ways and compare."""
    result = Outcome(row.name, "right", control_flow=row.control_flow)
    model, batch = row.build()
    both = rows_of(batch), rows_of(of_other_size(batch))
    result.sizes = f"{both[0]}, {both[1]}" if takes_other_sizes(row) else str(both[0])
    eager = train(row, model, model, batch)
    others = _channels_last(row)
    exact = _exact(row)
    noisy: list[Run] = []

    def differing(ours: Run, again: Callable[[], Run]) -> str:
        message = difference(ours, eager, exact, others, noisy)
        if message and exact is not None and not noisy:
            noisy.extend(train_with_noise(row, seed) for seed in range(NOISY_RUNS))
            result.noise, message = message, difference(ours, eager, exact, others, noisy)
        if message and exact is not None:
            result.noise, message = f"{message}; from the same parameters every step is right", _retraced(row, again())
        return message

    try:
        ours = _through_optimize(row, cache, result)
        result.detail = differing(ours, lambda: _optimized_again(row, cache))
        if not result.detail:
            message = differing(_through_step(row, cache, result), lambda: _through_step(row, cache, result, keep=True))
            result.detail = f"training_step: {message}" if message else ""
        if not result.detail:
            message = differing(_with_results(row, cache, result), lambda: _with_results(row, cache, result, keep=True))
            result.detail = f"dynamic=True, results unused: {message}" if message else ""
    except Exception as error:
        result.kind, result.detail = "raised", f"{type(error).__name__}: {error}"
        return result
    internal = [reason for reason in (*result.breaks, result.whole, result.dynamic) if "internal error" in reason]
    if result.detail:
        result.kind = "wrong"
    elif internal:
        result.kind, result.detail = "raised", internal[0]
    return result


def _optimized_again(row: Model, cache: Path) -> Run:
    """Repeat the run through `optimize`, with the state before each step."""
    model, batch = row.build()
    return train(row, model, dt.optimize(model, cache=cache), batch, keep=True)


def _retraced(row: Model, ours: Run) -> str:
    """What differs from eager runs that begin each step with our parameters."""
    model, batch = row.build()
    runs = [retrace(row, model, batch, ours.starts)]
    if any(p.dim() == 4 for p in model.parameters()):
        last = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        runs.append(retrace(row, last, batch, ours.starts))
    model, batch = row.build(torch.float64)
    exact = retrace(row, model, batch, ours.starts)
    return difference(Run(ours.steps), runs[0], exact, runs[1:]) or updates(row, ours)


def _channels_last(row: Model) -> list[Run]:
    """A network of images in PyTorch's other memory format; nothing for others."""
    model, batch = row.build()
    if all(p.dim() != 4 for p in model.parameters()):
        return []
    model = model.to(memory_format=torch.channels_last)
    return [train(row, model, model, batch)]


def _exact(row: Model) -> Run | None:
    """The run in float64; None for a model that computes in float32 whatever it is given."""
    try:
        model, batch = row.build(torch.float64)
        return train(row, model, model, batch)
    except RuntimeError:
        return None


def _through_optimize(row: Model, cache: Path, result: Outcome) -> Run:
    model, batch = row.build()
    plain = row.build()[0]
    compiled = dt.optimize(model, cache=cache)
    state = state_of(compiled)
    assert state is not None
    torch._dynamo.utils.counters["graph_break"].clear()  # of what ran in this process before
    with _stages() as inside:
        start = time.perf_counter()
        run = train(row, model, compiled, batch)
        inside["all"] = time.perf_counter() - start
    backend = state.backend
    result.graphs = backend.graphs
    result.breaks = [*dict.fromkeys(backend.breaks), *map(_short, torch._dynamo.utils.counters["graph_break"])]
    captured = sum(r.passes[0].operators_before for r in backend.records if r.passes and "backward" not in r.name)
    for name, _ in (fallback for record in backend.records for fallback in record.fallbacks):
        result.fallbacks[name] = result.fallbacks.get(name, 0) + 1
    result.native = 1 - sum(result.fallbacks.values()) / max(captured, 1)
    result.seconds = _seconds(inside, backend.records)
    run.evaluated = evaluated(model, compiled, batch)
    result.operators, _ = counted(plain, batch)
    _, outside = counted(compiled, batch)
    result.share = 1 - outside / max(result.operators, 1)
    return run


def _through_step(row: Model, cache: Path, result: Outcome, keep: bool = False) -> Run:
    model, batch = row.build()
    step = dt.training_step(model, row.loss, optimizer_of(model, row.rate), keep_gradients=True, cache=cache)
    run = train_whole(row, step, model, batch, keep=keep)
    result.whole = "; ".join(dict.fromkeys(step.breaks))
    return run


def _with_results(row: Model, cache: Path, result: Outcome, keep: bool = False) -> Run:
    """Through `optimize(dynamic=True)`, of a model that returns its loss and results that nobody uses."""
    model, batch = row.build()
    compiled = dt.optimize(LossAndResults(model, row), dynamic=True, cache=cache)
    run = train(row, model, compiled, batch, keep=keep, objective=lambda results: results[0])
    state = state_of(compiled)
    assert state is not None
    result.dynamic = "; ".join(dict.fromkeys(state.backend.breaks))
    return run


def _short(reason: str) -> str:
    lines = (line.strip() for line in reason.splitlines())
    return " ".join(line for line in lines if line and not line.startswith(("Hint:", "Developer", "For more")))[:200]


# ---- what runs where ------------------------------------------------------------------------------------------------
def counted(module: nn.Module, batch: dict[str, Any]) -> tuple[int, int]:
    """How many operators a forward pass runs in PyTorch, and how many of them outside compiled graphs.

    Operators that other operators call are not counted.
    """
    with _marked(), profile(record_shapes=False) as found:
        module(**batch)
    total = outside = 0
    for event in found.function_events:
        if not event.name.startswith("aten::"):
            continue
        above, within = event.cpu_parent, False
        while above is not None and not above.name.startswith("aten::"):
            within = within or above.name == GRAPH
            above = above.cpu_parent
        if above is None:
            total += 1
            outside += not within
    return total, outside


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    """Runs of compiled graphs appear in profiles, in which Python calls them, and so does what they keep."""
    with contextlib.ExitStack() as patches:
        for owner, name in ((CompiledGraph, "forward"), (function, "without_history")):
            patches.enter_context(mock.patch.object(owner, name, _recorded(getattr(owner, name))))
        yield


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(*arguments: Any) -> Any:
        with record_function(GRAPH):
            return function(*arguments)

    return recorded


@contextlib.contextmanager
def _stages() -> Iterator[dict[str, float]]:
    """Seconds within our backend, and within its capture."""
    spent = {"backend": 0.0, "capture": 0.0}
    compile_, capture = driver.Backend.compile, driver.capture

    def timed(key: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[key] += time.perf_counter() - start

        return call

    driver.Backend.compile, driver.capture = timed("backend", compile_), timed("capture", capture)  # type: ignore
    try:
        yield spent
    finally:
        driver.Backend.compile, driver.capture = compile_, capture  # type: ignore


def _seconds(spent: dict[str, float], records: list[Any]) -> dict[str, float]:
    kernels = sum(record.seconds.get("kernels", 0.0) for record in records)
    return {
        "Dynamo": spent["all"] - spent["backend"],
        "capture": spent["capture"],
        "passes": spent["backend"] - spent["capture"] - kernels,
        "kernels": kernels,
    }
