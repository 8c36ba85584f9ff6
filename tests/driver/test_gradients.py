"""Clipping and loss scaling inside a step, and RMSprop and Adagrad, held to PyTorch's loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver import TrainingStep
from daceml_train.errors import Invalid
from tests.driver.conformity import assert_tensors_conform, distance
from tests.driver.networks import mlp

pytestmark = pytest.mark.compiled

Optimizer = Callable[[Any], torch.optim.Optimizer]


def batch(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return scale * torch.randn(6, 8), torch.randn(6, 4)


def eager_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """One step of PyTorch's loop; the loss and the gradients' norm."""
    optimizer.zero_grad()
    scaler: torch.amp.GradScaler | None = options.get("scaler")
    loss = F.mse_loss(model(x), y)
    (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.unscale_(optimizer)
    norm = None
    if "clip_norm" in options:
        norm = nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"], options.get("norm_type", 2.0))
    if "clip_value" in options:
        nn.utils.clip_grad_value_(model.parameters(), options["clip_value"])
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    return loss.detach(), norm


def assert_alike(ours: nn.Module, mine: torch.optim.Optimizer, theirs: nn.Module, their: torch.optim.Optimizer) -> None:
    expected = dict(theirs.state_dict())
    assert_tensors_conform(ours.state_dict(), expected, expected, 2e-5)
    for key, entry in their.state_dict()["state"].items():
        tensors = {n: t for n, t in entry.items() if isinstance(t, Tensor)}
        found = mine.state_dict()["state"][key]
        assert_tensors_conform({n: found[n] for n in tensors}, tensors, tensors, 1e-4)


def train(optimizer: Optimizer, steps: int = 3, scale: float = 1.0, **options: Any) -> TrainingStep:
    """Both loops side by side."""
    theirs = mlp()
    ours = copy.deepcopy(theirs)
    their, mine = optimizer(theirs.parameters()), optimizer(ours.parameters())
    step = dt.training_step(ours, F.mse_loss, mine, **copy.deepcopy(options))
    for _ in range(steps):
        x, y = batch(scale)
        loss, norm = eager_step(theirs, their, x, y, options)
        assert distance(step(x, y), loss) < 1e-4
        assert (step.gradient_norm is None) == (norm is None)
        if norm is not None:
            assert step.gradient_norm is not None and distance(step.gradient_norm, norm) < 1e-5
        assert_alike(ours, mine, theirs, their)
    assert step.breaks == [] and step.pieces is None
    return step


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.1},
        {"clip_norm": 1e3},
        {"clip_norm": 0.2, "norm_type": 1},
        {"clip_norm": 0.02, "norm_type": float("inf")},
        {"clip_norm": 0.05, "norm_type": 3.0},
        {"clip_value": 0.01},
    ],
)
def test_clipping(options: dict[str, Any]) -> None:
    train(sgd, **options)


# With the default eps of 1e-8 an update is the sign of a gradient that is nearly zero, thus of its rounding error.
@pytest.mark.parametrize(
    "options",
    [
        {"eps": 1e-4},
        {"eps": 1e-4, "momentum": 0.9, "weight_decay": 0.1},
        {"centered": True, "momentum": 0.5, "maximize": True, "eps": 1e-3},
    ],
)
def test_rmsprop(options: dict[str, Any]) -> None:
    train(lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, **options))


@pytest.mark.parametrize(
    "options", [{}, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3}, {"maximize": True}]
)
def test_adagrad(options: dict[str, Any]) -> None:
    train(lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, **options))


def test_a_parameter_that_joins_adagrad_later() -> None:
    theirs = mlp()
    ours = copy.deepcopy(theirs)
    both = []
    for model in (theirs, ours):
        optimizer = torch.optim.Adagrad(model[0].parameters(), initial_accumulator_value=0.5)  # type: ignore[index]
        optimizer.add_param_group({"params": list(model[2].parameters())})  # type: ignore[index]
        both.append(optimizer)
    step = dt.training_step(ours, F.mse_loss, both[1])
    for _ in range(2):
        x, y = batch()
        eager_step(theirs, both[0], x, y, {})
        step(x, y)
        assert_alike(ours, both[1], theirs, both[0])


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.AdamW])
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}])
def test_loss_scaling_skips_backs_off_and_grows(optimizer: Optimizer, clip: dict[str, Any]) -> None:
    """The scale is so large that gradients overflow at first, and then grows every second step."""
    theirs = mlp()
    ours = copy.deepcopy(theirs)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=0.01, growth_interval=2) for _ in range(2)]
    their, mine = optimizer(theirs.parameters()), optimizer(ours.parameters())
    step = dt.training_step(ours, F.mse_loss, mine, scaler=scalers[1], **clip)
    scales = []
    for _ in range(6):
        x, y = batch(100.0)
        loss, _ = eager_step(theirs, their, x, y, {"scaler": scalers[0], **clip})
        assert distance(step(x, y), loss) < 1e-4
        scales.append(scalers[0].get_scale())
        assert scalers[1].get_scale() == scales[-1]
        assert scalers[1].state_dict() == scalers[0].state_dict()
        expected = dict(theirs.state_dict())
        assert_tensors_conform(ours.state_dict(), expected, expected, 2e-5)
    assert scales[0] < 1e38 and max(scales[1:]) > min(scales)
    assert step.breaks == [] and step.pieces is None


def test_a_scaler_changed_between_steps() -> None:
    theirs = mlp()
    ours = copy.deepcopy(theirs)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in range(2)]
    their, mine = sgd(theirs.parameters()), sgd(ours.parameters())
    step = dt.training_step(ours, F.mse_loss, mine, scaler=scalers[1])
    for change in (lambda s: s, lambda s: s.set_growth_factor(4.0), lambda s: s.update(3.0), lambda s: s):
        for scaler in scalers:
            change(scaler)
        x, y = batch()
        eager_step(theirs, their, x, y, {"scaler": scalers[0]})
        step(x, y)
        assert scalers[1].get_scale() == scalers[0].get_scale()
        assert_alike(ours, mine, theirs, their)


def test_a_scaler_that_is_switched_off() -> None:
    train(sgd, scaler=torch.amp.GradScaler("cpu", enabled=False))


@pytest.mark.parametrize("scaled", [False, True])
def test_micro_batches(scaled: bool) -> None:
    """What is clipped is the gradient of the whole batch."""
    theirs = mlp()
    ours = copy.deepcopy(theirs)
    scalers = [torch.amp.GradScaler("cpu", growth_interval=2) if scaled else None for _ in range(2)]
    their, mine = sgd(theirs.parameters()), sgd(ours.parameters())
    step = dt.training_step(ours, F.mse_loss, mine, micro_batches=3, clip_norm=0.1, scaler=scalers[1])
    for _ in range(3):
        x, y = batch()
        eager_step(theirs, their, x, y, {"clip_norm": 0.1, "scaler": scalers[0]})
        step(x, y)
        assert_alike(ours, mine, theirs, their)
    assert step.breaks == []


def test_in_pieces() -> None:
    """A step that is not one program clips and scales, too."""
    theirs = mlp()
    ours = copy.deepcopy(theirs)
    scalers = [torch.amp.GradScaler("cpu") for _ in range(2)]
    their, mine = torch.optim.Adafactor(theirs.parameters()), torch.optim.Adafactor(ours.parameters())
    step = dt.training_step(ours, F.mse_loss, mine, clip_norm=0.1, scaler=scalers[1])
    for _ in range(2):
        x, y = batch()
        _, norm = eager_step(theirs, their, x, y, {"clip_norm": 0.1, "scaler": scalers[0]})
        step(x, y)
        assert norm is not None and step.gradient_norm is not None and distance(step.gradient_norm, norm) < 1e-5
        assert_alike(ours, mine, theirs, their)
    assert step.pieces is not None


def test_kept_gradients_are_the_clipped_ones() -> None:
    theirs = mlp()
    ours = copy.deepcopy(theirs)
    their, mine = sgd(theirs.parameters()), sgd(ours.parameters())
    step = dt.training_step(ours, F.mse_loss, mine, clip_norm=0.1, keep_gradients=True)
    x, y = batch()
    eager_step(theirs, their, x, y, {"clip_norm": 0.1})
    step(x, y)
    expected = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert_tensors_conform(
        {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}, expected, expected, 1e-5
    )


def test_options_are_checked() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    with pytest.raises(Invalid, match="clip_norm and clip_value exclude each other"):
        dt.training_step(model, F.mse_loss, optimizer, clip_norm=1.0, clip_value=1.0)
    with pytest.raises(Invalid, match="clip_norm is a number of at least 0, given -1"):
        dt.training_step(model, F.mse_loss, optimizer, clip_norm=-1)
    with pytest.raises(Invalid, match=r"scaler is a torch.amp.GradScaler, given float"):
        dt.training_step(model, F.mse_loss, optimizer, scaler=1.0)  # type: ignore[arg-type]
