"""Options of optimizers are read at each step: a schedule or a search changes them without compiling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver import optimizer_updates
from daceml_train.training.optimizers import update_of
from tests.driver.test_optimizers import TOLERANCE, assert_alike, batch, model_of

pytestmark = pytest.mark.compiled

STEPS = 5


def betas(t: int) -> dict[str, Any]:
    """Both sides of 1/2, where `torch.lerp` starts from its other end and differs by rounding."""
    return {"betas": (0.2 + 0.15 * t, 0.9 + 0.01 * t), "eps": 1e-3 * (t + 1)}


CHANGING: dict[str, Callable[[int], dict[str, Any]]] = {
    "SGD": lambda t: {"momentum": 0.5 + 0.1 * t, "dampening": 0.1 + 0.1 * t, "weight_decay": 0.1 / (t + 1)},
    "Adam": lambda t: {**betas(t), "weight_decay": 0.1 / (t + 1)},
    "AdamW": lambda t: {**betas(t), "weight_decay": 0.1 / (t + 1)},
    "RMSprop": lambda t: {"alpha": 0.3 + 0.15 * t, "momentum": 0.1 + 0.1 * t, "eps": 1e-3 * (t + 1), "centered": True},
    "Adagrad": lambda t: {"lr_decay": 0.1 * (t + 1), "weight_decay": 0.1 / (t + 1), "eps": 1e-3 * (t + 1)},
    "Adadelta": lambda t: {"rho": 0.5 + 0.1 * t, "eps": 1e-2 / (t + 1), "weight_decay": 0.1 / (t + 1)},
    "Adamax": betas,
    "NAdam": lambda t: {**betas(t), "momentum_decay": 0.1 * (t + 1)},
    "RAdam": lambda t: {**betas(t), "weight_decay": 0.1 / (t + 1)},
    "Rprop": lambda t: {"etas": (0.2 + 0.1 * t, 1.1 + t), "step_sizes": (0.01 / (t + 1), 0.1 + t)},
    "ASGD": lambda t: {"lambd": 0.1 / (t + 1), "alpha": 0.5 + 0.1 * t, "t0": float(t + 1)},
}


def pair(kind: str, dtype: torch.dtype, **options: Any) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]:
    """Our model and optimizer, and PyTorch's."""
    theirs = model_of(dtype)
    ours = copy.deepcopy(theirs)
    of_kind = getattr(torch.optim, kind)
    return (ours, of_kind(ours.parameters(), lr=0.1, **options)), (
        theirs,
        of_kind(theirs.parameters(), lr=0.1, **options),
    )


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.wide)])
@pytest.mark.parametrize("kind", CHANGING)
def test_options_that_change_at_every_step(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    changing = CHANGING[kind]
    ours, theirs = pair(kind, dtype, **changing(0))
    step = dt.training_step(ours[0], F.mse_loss, ours[1], cache=tmp_path)
    for t in range(STEPS):
        for _, optimizer in (ours, theirs):
            optimizer.param_groups[0].update(changing(t))
        x, y = batch(t, dtype)
        step(x, y)
        eager_step(*theirs, x, y)
        assert_alike(ours, theirs, TOLERANCE[dtype])
    assert step.breaks == []
    assert len(step.records) == (2 if kind == "SGD" else 1)  # with dampening, the first step is another program


def test_zero_is_part_of_the_program(tmp_path: Path) -> None:
    ours, theirs = pair("AdamW", torch.float64, weight_decay=0.0)
    step = dt.training_step(ours[0], F.mse_loss, ours[1], cache=tmp_path)
    for t, decay in enumerate([0.0, 0.1, 0.2, 0.0, 0.3]):
        for _, optimizer in (ours, theirs):
            optimizer.param_groups[0]["weight_decay"] = decay
        x, y = batch(t, torch.float64)
        step(x, y)
        eager_step(*theirs, x, y)
        assert_alike(ours, theirs, TOLERANCE[torch.float64])
    assert len(step.records) == 2


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("how", ["step", "module"])
def test_a_schedule_of_momentum(kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`OneCycleLR` moves rate and momentum; the update of an optimized module compiles once, too."""
    built = []
    bound = optimizer_updates.BoundUpdate
    monkeypatch.setattr(optimizer_updates, "BoundUpdate", lambda *a: built.append(1) or bound(*a))
    ours, theirs = pair(kind, torch.float32, **({"momentum": 0.9} if kind == "SGD" else {}))
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9) for _, o in (ours, theirs)]
    step = dt.training_step(ours[0], F.mse_loss, ours[1], cache=tmp_path)
    module = dt.optimize(ours[0], cache=tmp_path)
    for t in range(7):
        x, y = batch(t, torch.float32)
        if how == "step":
            step(x, y)
        else:
            eager_step(module, ours[1], x, y)
        eager_step(*theirs, x, y)
        assert_alike(ours, theirs, TOLERANCE[torch.float32])
        for schedule in schedules:
            schedule.step()
    assert len(step.records) == (how == "step") and len(built) == (how == "module")


def test_parameters_of_16_bits_keep_constants() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([parameter])
    update = update_of(optimizer, optimizer.param_groups[0])
    assert update.op.given == () and update.op.has("beta2")


def test_a_list_of_options_changed_in_place_after_it_was_found_right(tmp_path: Path) -> None:
    """What an identity of objects cannot tell: the same list with a zero is another program."""
    ours, theirs = pair("Adam", torch.float64)
    for _, optimizer in (ours, theirs):
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    step = dt.training_step(ours[0], F.mse_loss, ours[1], cache=tmp_path)
    for t, beta in enumerate([0.9, 0.9, 0.9, 0.0, 0.0, 0.5]):
        for _, optimizer in (ours, theirs):
            optimizer.param_groups[0]["betas"][0] = beta
        x, y = batch(t, torch.float64)
        step(x, y)
        eager_step(*theirs, x, y)
        assert_alike(ours, theirs, TOLERANCE[torch.float64])
    assert len(step.records) == 2


REPLACED: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "the list of groups": lambda o: setattr(o, "param_groups", [*o.param_groups]),
    "the list of parameters": lambda o: o.param_groups[0].update(params=[*o.param_groups[0]["params"]]),
    "the order of parameters": lambda o: o.param_groups[0]["params"].reverse(),
    "a parameter less": lambda o: o.state.pop(o.param_groups[0]["params"].pop()),
    "weight decay": lambda o: o.param_groups[0].update(weight_decay=0.1),
    "a rate of another type": lambda o: o.param_groups[0].update(lr=1),
    "the state": lambda o: o.load_state_dict(o.state_dict()),
    "a tensor of the state": lambda o: o.state[o.param_groups[0]["params"][0]].update(
        exp_avg=torch.ones_like(o.param_groups[0]["params"][0])
    ),
    "no state": lambda o: o.state.clear(),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_replaced_in_an_optimizer_is_seen(what: str, tmp_path: Path) -> None:
    ours, theirs = pair("Adam", torch.float64)
    step = dt.training_step(ours[0], F.mse_loss, ours[1], cache=tmp_path)
    for t in range(7):
        if t == 4:
            for _, optimizer in (ours, theirs):
                REPLACED[what](optimizer)
        x, y = batch(t, torch.float64)
        step(x, y)
        eager_step(*theirs, x, y)
        assert_alike(ours, theirs, TOLERANCE[torch.float64])


def test_a_rate_that_changes_is_no_reason_to_look_at_the_other_options(tmp_path: Path) -> None:
    ours, _ = pair("Adam", torch.float64)
    step, found = dt.training_step(ours[0], F.mse_loss, ours[1], cache=tmp_path), []
    for t in range(6):
        ours[1].param_groups[0]["lr"] = 0.1 / (t + 1)
        step(*batch(t, torch.float64))
        found += [bound.bound_optimizer.right for ways in step._bound.values() for bound in ways]
    assert found[-1] is not None and found[-1] is found[-2] is found[-3]
