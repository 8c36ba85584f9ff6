"""The update as one program under a user's own loop, held to PyTorch's: parameters, state, rates, gradients that stay,
and all that is left to PyTorch.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

import daceml_train as dt
from daceml_train.driver import optimizer_updates
from daceml_train.driver.optimizer_updates import NEXT, PROGRAMS, BoundUpdate
from daceml_train.driver.step import ALLOWED_CHANGES
from tests.driver.test_optimizers import TOLERANCE, assert_alike, batch, model_of
from tests.ops.test_adaptive_optimizers import OPTIONS

pytestmark = pytest.mark.compiled


@pytest.fixture(name="runs")
def _runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each attempt to update by a program came to."""
    found: list[bool] = []
    run = BoundUpdate.run

    def watched(*arguments: Any) -> bool:
        found.append(run(*arguments))
        return found[-1]

    monkeypatch.setattr(BoundUpdate, "run", watched)
    return found


class Pair:
    """A model of ours and PyTorch's, with an optimizer each."""

    def __init__(self, kind: str = "AdamW", dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.theirs = model_of(dtype)
        self.ours = copy.deepcopy(self.theirs)
        self.called = dt.optimize(self.ours)
        self.optimizers = [self._optimizer(kind, m, options) for m in (self.ours, self.theirs)]
        self.dtype = dtype

    def _optimizer(self, kind: str, model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]  # type: ignore[index]
        result: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=0.01, **options)
        return result

    def backward(self, number: int) -> None:
        x, y = batch(number, self.dtype)
        for model, optimizer in zip((self.called, self.theirs), self.optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()

    def step(self, number: int) -> None:
        self.backward(number)
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self) -> None:
        first, second = self.optimizers
        assert_alike((self.ours, first), (self.theirs, second), TOLERANCE[self.dtype])
        for a, b in zip(self.ours.parameters(), self.theirs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None and b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("kind", "options"), [(k, o) for k, found in OPTIONS.items() for o in found])
def test_every_optimizer(kind: str, options: dict[str, Any], runs: list[bool]) -> None:
    """Seven steps under a schedule, the last of them from a saved state."""
    pair = Pair(kind, torch.float64, **options)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in pair.optimizers]
    for number in range(7):
        if number == 5:
            for optimizer in pair.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        pair.step(number)
        pair.check()
        for schedule in schedules:
            schedule.step()
    assert runs.count(True) >= 6


def test_parameters_without_a_gradient_stay(runs: list[bool]) -> None:
    pair = Pair()
    for number in range(8):
        pair.backward(number)
        for model, optimizer in zip((pair.ours, pair.theirs), pair.optimizers, strict=True):
            model[0].bias.grad = None if number % 3 == 2 else model[0].bias.grad  # type: ignore[index]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        pair.check()
    assert runs.count(True) == 7


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("what", ["parameter", "state", "state of a training step"])
def test_tensors_that_exchange_their_memory(what: str, kept: bool, runs: list[bool]) -> None:
    """As `Module.to` makes them under `torch.__future__.set_swap_module_params_on_conversion`."""
    pair, others = Pair(), []
    step = dt.training_step(pair.ours, F.mse_loss, pair.optimizers[0])
    for number in range(6):
        if number == 3:
            for model, optimizer in zip((pair.ours, pair.theirs), pair.optimizers, strict=True):
                weight = model[0].weight  # type: ignore[index]
                swapped = weight if what == "parameter" else optimizer.state[weight]["exp_avg"]
                other = swapped.detach() * 2
                torch.utils.swap_tensors(swapped, nn.Parameter(other) if what == "parameter" else other)
                others += [other] if kept else []
            del swapped, other
        if what == "state of a training step":
            x, y = batch(number, pair.dtype)
            step(x, y)
            pair.optimizers[1].zero_grad()
            F.mse_loss(pair.theirs(x), y).backward()
            pair.optimizers[1].step()
        else:
            pair.step(number)
        assert_alike((pair.ours, pair.optimizers[0]), (pair.theirs, pair.optimizers[1]), TOLERANCE[pair.dtype])
    assert what == "state of a training step" or runs.count(True) >= 4


@pytest.mark.parametrize("what", ["closure", "hook", "global hook", "transposed gradient", "another optimizer"])
def test_what_is_left_to_pytorch(what: str, runs: list[bool]) -> None:
    pair = Pair()
    seen: list[int] = []

    def hook(optimizer: Any, *_: Any) -> None:
        seen.append(sum(p.grad is not None for group in optimizer.param_groups for p in group["params"]))

    handle: Any = None
    if what == "hook":
        pair.optimizers[0].register_step_post_hook(hook)
    if what == "global hook":
        handle = register_optimizer_step_post_hook(hook)
    if what == "another optimizer":

        class Mine(torch.optim.AdamW):
            pass

        pair.optimizers = [pair._optimizer("AdamW", m, {}) for m in (pair.ours, pair.theirs)]
        pair.optimizers[0].__class__ = Mine
    for number in range(4):
        pair.backward(number)
        for model, optimizer in zip((pair.ours, pair.theirs), pair.optimizers, strict=True):
            if what == "transposed gradient":
                weight: Any = model[0].weight  # type: ignore[index]
                weight.grad = weight.grad.t().contiguous().t()
            optimizer.step(lambda: torch.tensor(1.0)) if what == "closure" else optimizer.step()
        pair.check()
    if handle is not None:
        handle.remove()
    assert True not in runs
    assert set(seen) == ({4} if "hook" in what else set())


def test_a_graph_from_before_the_update_is_known_to_be_stale(runs: list[bool]) -> None:
    """PyTorch raises where a parameter that a backward pass reads was updated in between."""
    pair = Pair()
    for number in range(3):
        pair.step(number)
    weight: Any = pair.ours[2].weight  # type: ignore[index]
    kept = (weight * weight).sum()
    pair.step(3)
    assert runs[-1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_options_that_change_at_every_step_end_in_pytorch(runs: list[bool]) -> None:
    """Of options that no update is given: here one of the user's own."""
    pair = Pair()
    for number in range(PROGRAMS + 5):
        for optimizer in pair.optimizers:
            for group in optimizer.param_groups:
                group["betas"] = (0.9 - 0.01 * number, 0.99)
                group["number"] = number
        pair.step(number)
        pair.check()
    assert runs.count(True) == PROGRAMS
    assert "AdamW.step: the optimizer has other options" in str(dt.report(pair.called))


def test_a_new_optimizer_for_every_task(runs: list[bool]) -> None:
    """A program that is bound for a few steps costs more than it saves: one that stays has it later."""
    pair = Pair()
    for task in range(5):
        for number in range(3 if task < 4 else NEXT + 2):
            pair.step(number)
        assert runs.count(True) == (2 if task < 4 else 4)
        pair.check()
        if task < 4:
            pair.optimizers = [pair._optimizer("AdamW", m, {}) for m in (pair.ours, pair.theirs)]


def test_a_scaler(runs: list[bool]) -> None:
    pair = Pair("SGD", momentum=0.9)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for number in range(5):
        x, y = batch(number, torch.float32)
        y = y * float("inf") if number == 2 else y
        for model, optimizer, scaler in zip((pair.called, pair.theirs), pair.optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for a, b in zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    assert runs.count(True) == 3


def test_optimizers_of_other_models_are_not_touched(runs: list[bool]) -> None:
    dt.optimize(model_of(torch.float32))
    model = model_of(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    assert not runs and optimizer_updates._known[optimizer][1] is None
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


class Doubled(torch.autograd.Function):
    """A function that no path follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


def test_a_step_in_pieces(runs: list[bool]) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            return self.last(Doubled.apply(h) if h.mean().item() > -1 else h)

    ours = Branching()
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (ours, theirs)]
    step = dt.training_step(ours, F.mse_loss, optimizers[0])
    for number in range(7):
        x, y = batch(number, torch.float32)
        optimizers[1].zero_grad()
        expected = F.mse_loss(theirs(x), y)
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(x, y), expected.detach())
        assert_alike((ours, optimizers[0]), (theirs, optimizers[1]), TOLERANCE[torch.float32])
    assert runs.count(True) == 5 and all(paths.refused for paths in step.paths.values())


def test_scheduled_options_of_16_bit_parameters_end_in_pieces() -> None:
    """Their updates are compiled for options: a schedule of them may not compile a program at every step."""
    ours, theirs = (model_of(torch.float32).bfloat16() for _ in range(2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (ours, theirs)]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40) for o in optimizers]
    step = dt.training_step(ours, F.mse_loss, optimizers[0])
    for number in range(2 * ALLOWED_CHANGES):
        x, y = batch(number, torch.bfloat16)
        optimizers[1].zero_grad()
        expected = F.mse_loss(theirs(x), y)
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(x, y), expected.detach(), rtol=0.03, atol=0)  # bfloat16 has eight bits
        for schedule in schedules:
            schedule.step()
    assert len(step.records) == ALLOWED_CHANGES and any("options of the optimizer" in text for text in step.breaks)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        yield
