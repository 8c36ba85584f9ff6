"""Optimizers inside the program, held to PyTorch's loop: parameters, state under its names, and rates that change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from tests.ops.test_adaptive_optimizers import OPTIONS

pytestmark = pytest.mark.compiled

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4}
"""In units of the largest element. RAdam and Adadelta divide by roots of squares that are near zero at first."""


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(7, 9, generator=generator, dtype=torch.float64).to(dtype)
    return x[:, :6].contiguous(), x[:, 6:].contiguous()


def assert_near(found: Any, expected: Any, tolerance: float, what: str) -> None:
    if not isinstance(expected, Tensor):
        assert found == expected, what
        return
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    error = float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-3)
    assert error <= (1e-6 if expected.ndim == 0 else tolerance), f"{what} is off by {error:.1e}"


def assert_alike(ours: tuple[Any, Any], theirs: tuple[Any, Any], tolerance: float) -> None:
    for (name, a), b in zip(ours[0].named_parameters(), theirs[0].parameters(), strict=True):
        assert_near(a.detach(), b.detach(), tolerance, name)
    mine, their = ours[1].state_dict(), theirs[1].state_dict()
    assert mine["param_groups"] == their["param_groups"]
    for key, state in their["state"].items():
        assert list(mine["state"][key]) == list(state)
        for name, value in state.items():
            assert_near(mine["state"][key][name], value, tolerance, f"{name} of {key}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("kind", "options"), [(k, o) for k, found in OPTIONS.items() for o in found])
def test_steps(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Seven steps under a schedule, the last of them from a saved state."""
    theirs = model_of(dtype)
    ours = copy.deepcopy(theirs)
    first, second = (
        getattr(torch.optim, kind)(
            [{"params": m[0].parameters()}, {"params": m[2].parameters(), "lr": 0.02}],  # type: ignore[index]
            lr=0.01,
            **options,
        )
        for m in (theirs, ours)
    )
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (first, second)]
    step = dt.training_step(ours, F.mse_loss, second)
    for number in range(7):
        if number == 5:
            for optimizer in (first, second):  # which casts numbers to the parameters' type
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        x, y = batch(number, dtype)
        first.zero_grad()
        expected = F.mse_loss(theirs(x), y)
        expected.backward()
        first.step()
        found = step(x, y)
        assert_near(found, expected.detach(), 1e-6, "loss")
        assert_alike((ours, second), (theirs, first), TOLERANCE[dtype])
        for schedule in schedules:
            schedule.step()
    assert step.breaks == [] and step.pieces is None


@pytest.mark.parametrize("kind", ["NAdam", "ASGD"])
def test_steps_that_a_scaler_skips_leave_all_numbers(kind: str) -> None:
    theirs = model_of(torch.float32)
    ours = copy.deepcopy(theirs)
    first, second = (getattr(torch.optim, kind)(m.parameters(), lr=0.01) for m in (theirs, ours))
    scalers = [torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=1e-6) for _ in range(2)]
    step = dt.training_step(ours, F.mse_loss, second, scaler=scalers[1])
    skipped = []
    for number in range(5):
        x, y = batch(number, torch.float32)
        first.zero_grad()
        scalers[0].scale(F.mse_loss(theirs(x), 100 * y)).backward()
        scalers[0].step(first)
        scalers[0].update()
        step(x, 100 * y)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        skipped.append(not first.state)
        if first.state:
            assert_alike((ours, second), (theirs, first), 1e-3)
    assert skipped[0] and not skipped[-1] and step.breaks == []


def test_an_optimizer_that_extends_one_of_them_is_pytorchs_own() -> None:
    class Mine(torch.optim.NAdam):
        pass

    model = model_of(torch.float32)
    step = dt.training_step(model, F.mse_loss, Mine(model.parameters()))
    with pytest.warns(UserWarning, match=r"Mine has no update inside the graph; SGD, .*, Rprop and ASGD have"):
        step(*batch(0, torch.float32))
    assert len(step.breaks) == 1
