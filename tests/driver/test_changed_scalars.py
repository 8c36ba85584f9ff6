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
from daceml_train.frontends.torch.dynamo import floats

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
    """Bit for bit what programs with the constants give; in 16 bits up to roundings, which kernels with constants omit."""
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
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if dtype is torch.bfloat16:
            torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
        else:
            assert torch.equal(ours, theirs)
    assert step.breaks == other.breaks == []
    parts = options.get("micro_batches", 1)
    assert programs[1.0] == parts
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


class Weighted(nn.Module):
    """A loss with numbers of its own, one of which chooses what is computed."""

    def __init__(self, smoothing: float = 0.1, weight: float = 0.5, reduction: str = "mean") -> None:
        super().__init__()
        self.entropy = nn.CrossEntropyLoss(label_smoothing=smoothing, reduction=reduction)
        self.weight, self.sharpness, self.threshold = weight, 2.0, 0.25

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        more = output.square().mean() if self.threshold > 0.5 else output.abs().mean()
        return self.entropy(output, target).sum() / self.sharpness + self.weight * more


class Dropping(nn.Module):
    """Dropout as a module with a probability of its own, between layers and before a loss."""

    def __init__(self, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.second = nn.Linear(8, 64), nn.Dropout(p), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.tanh(self.first(x))))


def labelled(t: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x, _ = batch(t, dtype)
    target = torch.arange(6) % 4
    target[t % 6] = -100  # ignored
    return x, target


def run(
    values: list[float], constants: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> tuple[TrainingStep, list[torch.Tensor]]:
    """A step with other numbers everywhere at each call, as inputs or as constants."""
    with monkeypatch.context() as patch:
        if constants:
            patch.setattr(floats, "_hyperparameter", lambda builder, value: False)
        model, loss = Dropping(values[0]).to(dtype), Weighted(values[0], 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        steps = []
        for t, value in enumerate(values):
            model.drop.p, loss.entropy.label_smoothing = value, value / 2
            if constants or not steps:  # a step of its own, so that no number has ever changed
                steps.append(dt.training_step(model, loss, optimizer, cache=tmp_path))
            torch.manual_seed(t)
            found.append(steps[-1](*labelled(t, dtype)).clone())
            found += [p.detach().clone() for p in model.parameters()]
            assert steps[-1].breaks == []
    return steps[0], found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_and_smoothing(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are, bit for bit, those of programs with these constants, each compiled for itself.

    The compiler contracts other pairs of a sum of multiplied numbers, so that the loss may differ by its last digit.
    """
    values = [0.1, 0.25, 0.3333333, 0.7, 0.999, 0.1]
    step, found = run(values, False, tmp_path, monkeypatch, dtype)
    _, expected = run(values, True, tmp_path, monkeypatch, dtype)
    assert len(step.records) == 1
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.0}
    for position, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if position % 5:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, **close)


def test_nothing_and_everything_dropped_are_programs_of_their_own(tmp_path: Path) -> None:
    model = Dropping(0.0)
    theirs = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
    step = dt.training_step(model, F.cross_entropy, optimizers[0], cache=tmp_path)
    for t, p in enumerate([0.0, 1.0, 0.0, 1.0]):
        model.drop.p = theirs.drop.p = p
        loss = step(*labelled(t))
        x, target = labelled(t)
        optimizers[1].zero_grad()
        expected = F.cross_entropy(theirs(x), target)
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.state_dict(), theirs.state_dict())
    model.drop.p = 0.5
    step(*labelled(0))
    count = len(step.records)
    for p in (0.4, 0.0, 1.0, 0.6):
        model.drop.p = p
        step(*labelled(0))
    assert len(step.records) == count <= 4 and step.breaks == []
    model.drop.p = 1.5
    with pytest.raises(Exception, match="dropout probability has to be between 0 and 1"):
        step(*labelled(0))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_smoothing_and_branches_of_losses_against_pytorch(reduction: str, tmp_path: Path) -> None:
    model, loss = perceptron(torch.float64), Weighted(0.1, 0.5, reduction)
    theirs = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
    step = dt.training_step(model, loss, optimizers[0], cache=tmp_path)
    changes = [(0.1, 0.5, 0.25), (0.2, 0.1, 0.3), (0.0, 0.2, 0.3), (1.0, 0.0, 0.9), (0.3, 0.7, 0.8)]
    for t, (smoothing, weight, threshold) in enumerate(changes):
        loss.entropy.label_smoothing, loss.weight, loss.threshold = smoothing, weight, threshold
        x, target = labelled(t, torch.float64)
        found = step(x, target)
        optimizers[1].zero_grad()
        expected = loss(theirs(x), target)
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-12)
    assert step.breaks == [] and len(step.records) <= 3  # smoothing or none, one side of the branch or the other


class Counted(Weighted):
    """Numbers of the loss are a size and an exponent: they have to be constants."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output[: int(self.weight * 6)].square().mean() ** int(self.sharpness)


def test_numbers_that_are_sizes_are_constants(tmp_path: Path) -> None:
    model, loss = perceptron(torch.float64), Counted()
    theirs = copy.deepcopy(model)
    step = dt.training_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.0), cache=tmp_path)
    for t, (weight, sharpness) in enumerate([(0.5, 2.0), (0.5, 3.0), (1.0, 3.0)]):
        loss.weight, loss.sharpness = weight, sharpness
        x, target = labelled(t, torch.float64)
        torch.testing.assert_close(step(x, target), loss(theirs(x), target).detach(), rtol=1e-12, atol=1e-12)
    assert step.breaks == []


def test_another_process_with_other_numbers_would_load_the_program(tmp_path: Path) -> None:
    """The key of a program contains no value: a new model and step find it."""
    for value, warm in ((0.1, False), (0.3, True)):
        model, loss = Dropping(value), Weighted(value, value)
        step = dt.training_step(model, loss, torch.optim.SGD(model.parameters(), lr=value), cache=tmp_path)
        step(*labelled(0))
        assert [record.warm for record in step.records] == [warm]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_smoothing_with_weights(reduction: str, tmp_path: Path) -> None:
    """Class weights, classes that are ignored, and a change of smoothing, against PyTorch in float64."""
    model, loss = perceptron(torch.float64), Weighted(0.1, 0.5, reduction)
    loss.entropy.weight = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)
    theirs = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
    step = dt.training_step(model, loss, optimizers[0], cache=tmp_path)
    for t, smoothing in enumerate([0.1, 0.25, 0.9, 0.3]):
        loss.entropy.label_smoothing = smoothing
        x, target = labelled(t, torch.float64)
        found = step(x, target)
        optimizers[1].zero_grad()
        expected = loss(theirs(x), target)
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-12)
    assert step.breaks == [] and len(step.records) == 1
