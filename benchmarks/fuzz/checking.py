"""Trains a case by compiled steps and compiled modules and holds every number to eager execution and to float64."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import daceml_train as dt
from benchmarks.fuzz.case import Case
from benchmarks.noise import LOST, RUNS, Rounding
from daceml_train.driver.module import Backend, state_of
from daceml_train.driver.options import Options
from daceml_train.errors import INTERNAL

FACTOR, FLOOR = 3.0, 1e-5
CALLED = (0, 0, 0, 3)
"""The inputs of the calls of a module: the third call runs without Python, the fourth may have other sizes."""
Values = dict[str, Tensor]


class Rejected(Exception):
    """PyTorch refuses the model, or computes no finite numbers with it."""


def _targets(case: Case, model: nn.Module) -> list[Tensor]:
    model = copy.deepcopy(model)
    return [case.target(_first(model(case.inputs(i))).detach(), i) for i in range(4)]


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    result = eval(f"torch.optim.{case.optimizer}", {"torch": torch, "p": list(model.parameters())})
    assert isinstance(result, torch.optim.Optimizer)
    return result


def _state(found: Values, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found.update({f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()})
    found.update({f"buffer {n}": b.clone() for n, b in model.named_buffers()})
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"state {key} of {name}"] = value.clone()


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((n, p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None)


def _step(case: Case, targets: Sequence[Tensor], pipeline: Any) -> tuple[Values, list[str]]:
    model = case.built()
    optimizer = _optimizer(case, model)
    step = dt.training_step(
        model, case.objective, optimizer, keep_gradients=True, pipeline=pipeline, jobs=2, dynamic=case.dynamic
    )
    found: Values = {}
    for i in range(4):
        found[f"loss {i}"] = step(case.inputs(i), targets[i])
        found.update({f"step {i} gradient {n}": g for n, g in _gradients(model)})
    _state(found, model, optimizer)
    return found, list(step.breaks)


def _eager(case: Case, targets: Sequence[Tensor], dtype: torch.dtype, noise: int = 0) -> Values:
    with Rounding(noise) if noise else contextlib.nullcontext():
        return _trained(case, targets, dtype)


def _trained(case: Case, targets: Sequence[Tensor], dtype: torch.dtype) -> Values:
    model = case.built().to(dtype)
    optimizer = _optimizer(case, model)
    found: Values = {}
    for i in range(4):
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (case.inputs(i), targets[i]))
        optimizer.zero_grad()
        value = case.objective(model(x), y)
        value.backward()
        found[f"loss {i}"] = value.detach()
        found.update({f"step {i} gradient {n}": g for n, g in _gradients(model)})
        optimizer.step()
    _state(found, model, optimizer)
    return found


def _module(
    case: Case, targets: Sequence[Tensor], dtype: torch.dtype, noise: int = 0, pipeline: Any = None
) -> tuple[Values, list[str]]:
    with Rounding(noise) if noise else contextlib.nullcontext():
        return _called(case, targets, dtype, pipeline)


def _called(case: Case, targets: Sequence[Tensor], dtype: torch.dtype, pipeline: Any) -> tuple[Values, list[str]]:
    model = case.built().to(dtype)
    called, breaks = (model, []) if pipeline is None else _compiled(case, model, pipeline)
    found: Values = {}
    for number, i in enumerate(CALLED):
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (case.inputs(i), targets[i]))
        x = x.detach().clone().requires_grad_(x.is_floating_point())
        for parameter in model.parameters():
            parameter.grad = None
        result = called(x)
        case.objective(result, y).backward()
        for k, output in enumerate(result if case.results else (result,)):
            found[f"output {number}" + f", result {k}" * (k > 0)] = output.detach().clone()
        if x.grad is not None:
            found[f"call {number} gradient of the input"] = x.grad
        found.update({f"call {number} gradient {n}": g for n, g in _gradients(model)})
    found.update({f"buffer {n}": b.clone() for n, b in model.named_buffers()})
    return found, list(breaks)


def _compiled(case: Case, model: nn.Module, pipeline: Any) -> tuple[Callable[..., Any], list[str]]:
    """The model from `optimize` or `torch.compile`, and the list of its fallbacks."""
    if case.backend:
        backend = Backend(Options(pipeline, jobs=2).settings())
        return torch.compile(model, backend=backend, dynamic=case.dynamic), backend.breaks
    called = dt.optimize(model, pipeline=pipeline, jobs=2, dynamic=case.dynamic)
    state = state_of(called)
    assert state is not None
    return called, state.backend.breaks


def wrong_in(found: Values, eager: Values, noisy: Sequence[Values], exact: Values) -> str:
    """Which number is wrong, or nothing.

    Where eager execution with noise loses a gradient (the sign of what is 0 but for rounding decides it), steps after
    that one train from other parameters: nothing of them can be compared.
    """
    if found.keys() != eager.keys():
        return f"names differ: {sorted(found.keys() ^ eager.keys())}"
    lost = math.inf
    typical = max((float(v.abs().max()) for n, v in exact.items() if "gradient" in n and v.numel()), default=0.0)
    for name, value in found.items():
        if value.shape != eager[name].shape or value.dtype != eager[name].dtype:
            return f"{name}: {value.dtype}{list(value.shape)} for {eager[name].dtype}{list(eager[name].shape)}"
        step = re.match(r"(?:loss|step) (\d+)|parameter|state", name)
        if not value.numel() or (step and float(step[1] or "inf") > lost):
            continue
        if value.dtype is torch.bool:
            if not torch.equal(value, eager[name]):
                return f"{name}: {int((value ^ eager[name]).sum())} of {value.numel()} differ"
            continue
        scale = max(float(exact[name].abs().max()), 3e-2 * typical, 1e-30)
        compared = (value, eager[name], *(run[name] for run in noisy))
        errors = [float((t.double() - exact[name].double()).abs().max()) / scale for t in compared]
        spread = max(errors[2:])
        if spread >= LOST and step and "gradient" in name:
            lost = float(step[1])
        if spread < LOST and not errors[0] <= max(FACTOR * max(errors[1:]), FLOOR):
            return f"{name}: {errors[0]:.1e} from float64, eager {errors[1]:.1e}, with noise {spread:.1e}"
    return ""


@dataclass
class Verdict:
    """What is wrong (nothing: ""), and why parts ran as PyTorch runs them."""

    wrong: str
    breaks: list[str]


def pipeline_of(case: Case) -> Any:
    """TRAINING without the passes that the case leaves out, and without a least size where it says so."""
    pipeline = dt.TRAINING.without(*{type(p) for p in dt.TRAINING if type(p).__name__ in case.without})
    if not case.unlimited:
        return pipeline
    return dt.Pipeline(**{level: tuple(map(_unlimited, passes)) for level, passes in pipeline.passes})


def _unlimited(given: dt.Pass) -> dt.Pass:
    limits = {"min_bytes": 0, "tiles": 0}
    return replace(given, **{name: least for name, least in limits.items() if hasattr(given, name)})


def references(case: Case) -> tuple[list[Tensor], list[Values], list[Values]]:
    """Targets, and PyTorch's results of steps and calls: in float64, in float32, with noise. Raises `Rejected`."""
    torch._dynamo.reset()
    torch.set_num_threads(case.threads)
    try:
        targets = _targets(case, case.built())
        kinds = ((torch.float64, 0), (torch.float32, 0), *((torch.float32, n + 1) for n in range(RUNS)))
        steps = [_eager(case, targets, dtype, noise) for dtype, noise in kinds]
        calls = [_module(case, targets, dtype, noise)[0] for dtype, noise in kinds]
    except Exception as error:
        raise Rejected(str(error)) from error
    if not all(v.isfinite().all() and v.abs().max() < 1e6 for r in steps + calls for v in r.values() if v.numel()):
        raise Rejected("not finite")
    return targets, steps, calls


def check(case: Case) -> Verdict:
    """Train the case in all ways. Raises `Rejected` where PyTorch does not take it."""
    targets, steps, calls = references(case)
    breaks: list[str] = []
    pipeline = pipeline_of(case)
    runs: list[tuple[str, list[Values], Callable[[], tuple[Values, list[str]]]]] = [
        ("training_step", steps, lambda: _step(case, targets, pipeline)),
        ("optimize", calls, lambda: _module(case, targets, torch.float32, pipeline=pipeline)),
    ]
    for path, (exact, eager, *noisy), run in runs:
        try:
            found, reasons = run()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return Verdict(f"{path} raises {type(error).__name__}: {error} ({where.filename}:{where.lineno})", breaks)
        breaks += reasons
        if internal := [reason for reason in reasons if reason.startswith(INTERNAL)]:
            return Verdict(f"{path} falls back: {internal[0]}", breaks)
        if wrong := wrong_in(found, eager, noisy, exact):
            return Verdict(f"{path}: {wrong}", breaks)
    return Verdict("", breaks)
