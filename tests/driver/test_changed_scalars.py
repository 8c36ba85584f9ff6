"""Numbers that change between steps, as a hyper-parameter search changes them: no program is compiled for a value."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.clipped import Clipped
from daceml_train.driver.step import TrainingStep

pytestmark = pytest.mark.compiled


def batch(t: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(t)
    return torch.randn(6, 8, generator=generator).to(dtype), torch.randn(6, 4, generator=generator).to(dtype)


def perceptron(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def clipped_steps(
    model: nn.Module, bounds: list[Any], name: str, dtype: torch.dtype, **options: Any
) -> tuple[TrainingStep, list[torch.Tensor]]:
    """A step with another bound at each call, and what it leaves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.training_step(model, F.mse_loss, optimizer, **{name: bounds[0]}, **options)
    found = []
    for t, bound in enumerate(bounds):
        setattr(step, name, bound)
        found.append(step(*batch(t, dtype)).clone())
        found += [p.detach().clone() for p in model.parameters()]
        found += [] if step.gradient_norm is None else [step.gradient_norm.clone()]
    return step, found


def clipped_in_pytorch(model: nn.Module, bounds: list[Any], name: str, dtype: torch.dtype, kind: float = 2.0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for t, bound in enumerate(bounds):
        x, y = batch(t, dtype)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if bound is not None and name == "clip_norm":
            nn.utils.clip_grad_norm_(model.parameters(), bound, kind)
        elif bound is not None:
            nn.utils.clip_grad_value_(model.parameters(), bound)
        optimizer.step()


CLIPPED = [
    ("clip_norm", {}),
    ("clip_norm", {"norm_type": 1.0}),
    ("clip_norm", {"micro_batches": 2, "reduction": "batch"}),
    ("clip_value", {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), CLIPPED)
def test_bounds_of_clipping(
    name: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what programs with the constants give; 16-bit parameters keep constants."""
    bounds = [0.3, 0.07, 0.011, float("inf"), 0.3]
    ours, constant, theirs = (perceptron(dtype) for _ in range(3))
    step, found = clipped_steps(ours, bounds, name, dtype, cache=tmp_path, **options)
    programs = {1.0: len(step.records)}
    clipped_in_pytorch(theirs, bounds, name, dtype, options.get("norm_type", 2.0))
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    monkeypatch.setattr(Clipped, "_compiled_clipping", lambda self: self.clipping)
    other, expected = clipped_steps(constant, bounds, name, dtype, cache=tmp_path, **options)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    assert step.breaks == other.breaks == []
    parts = options.get("micro_batches", 1)
    assert programs[1.0] == (len(other.records) if dtype is torch.bfloat16 else parts)
    assert len(other.records) == 4 + parts - 1


def test_a_bound_of_zero_and_none_are_part_of_the_program(tmp_path: Path) -> None:
    bounds = [0.3, 0.0, 0.2, None, 0.1, 0.0]
    ours, theirs = perceptron(), perceptron()
    step, _ = clipped_steps(ours, bounds, "clip_norm", torch.float32, cache=tmp_path)
    clipped_in_pytorch(theirs, bounds, "clip_norm", torch.float32)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    assert len(step.records) == 3 and step.breaks == []


def test_another_step_with_another_bound_loads_the_program(tmp_path: Path) -> None:
    for bound, warm in ((0.3, False), (0.1, True)):
        step, _ = clipped_steps(perceptron(), [bound], "clip_norm", torch.float32, cache=tmp_path)
        assert [record.warm for record in step.records] == [warm]


def test_a_bound_is_checked(tmp_path: Path) -> None:
    step = dt.training_step(model := perceptron(), F.mse_loss, torch.optim.SGD(model.parameters()), clip_norm=1.0)
    with pytest.raises(dt.errors.Invalid, match="clip_norm is a number of at least 0"):
        step.clip_norm = -1.0
    with pytest.raises(dt.errors.Invalid, match="exclude each other"):
        step.clip_value = 1.0
    assert step.clip_norm == 1.0 and copy.copy(step.bounds) == {"clip_norm": 1.0}
