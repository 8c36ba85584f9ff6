"""Hooks on the gradients of parameters: those that compute are a part of the program, others are called by PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from benchmarks.recipes import user_optimizers as users

pytestmark = pytest.mark.compiled
STEPS = 6
Hooks = Callable[[nn.Module, list[Any]], Any]


def _scaled(model: nn.Module, log: list[Any]) -> None:
    for p in model.parameters():
        p.register_hook(lambda g: g * 2)


def _bounded(model: nn.Module, log: list[Any]) -> None:
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01) / (g.norm() + 0.1))


def _nothing(model: Any, log: list[Any]) -> None:
    model[0].weight.register_hook(lambda g: None)


def _two(model: Any, log: list[Any]) -> None:
    model[0].weight.register_hook(lambda g: g + 1)
    model[0].weight.register_hook(lambda g: g * 3)


def _masked(model: nn.Module, log: list[Any]) -> None:
    for p in model.parameters():
        mask = (torch.arange(p.numel()).view_as(p) % 2).to(p.dtype)
        p.register_hook(lambda g, mask=mask: g * mask)


def _in_place(model: nn.Module, log: list[Any]) -> None:
    for p in model.parameters():
        p.register_hook(lambda g: g.mul_(0.5))


def _after(model: nn.Module, log: list[Any]) -> None:
    def halved(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halved)


def _zeroed(p: Any) -> None:
    p.grad.zero_()


def _after_by_value(model: nn.Module, log: list[Any]) -> None:
    def decayed(p: Tensor) -> None:
        p.grad = p.grad + 0.1 * p.detach()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(decayed)
        p.register_hook(lambda g: g - g.mean())


def _logged(model: nn.Module, log: list[Any]) -> None:
    for p in model.parameters():
        p.register_hook(lambda g: log.append(float(g.norm())))


def _branching(model: nn.Module, log: list[Any]) -> None:
    for p in model.parameters():
        p.register_hook(lambda g: g / g.norm() if g.norm() > 0.1 else g)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(make: Any, hooks: Hooks, change: Any = None, clip: float | None = None) -> Any:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 3)).double()
    ours = copy.deepcopy(theirs)
    logs: tuple[list[Any], list[Any]] = [], []
    handles = [hooks(theirs, logs[0]), hooks(ours, logs[1])]
    first, second = make(theirs.parameters()), make(ours.parameters())
    step = dt.training_step(ours, F.mse_loss, second, clip_norm=clip)
    for number in range(STEPS):
        for model, handle in zip((theirs, ours), handles, strict=True):
            if change is not None:
                change(model, handle, number)
        x, y = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
        first.zero_grad()
        loss = F.mse_loss(theirs(x), y)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        first.step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-12, atol=1e-12)
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(sorted(logs[0]), sorted(logs[1]))
    return step


@pytest.mark.parametrize("make", [sgd, adam, users.Lion])
@pytest.mark.parametrize("hooks", [_scaled, _bounded, _nothing, _two, _masked, _in_place, _after, _after_by_value])
def test_hooks_that_compute_are_a_part_of_the_program(hooks: Hooks, make: Any) -> None:
    step = trained(make, hooks, clip=0.5 if make is adam else None)
    assert step.breaks == [] and step._captures == 1


@pytest.mark.parametrize(("hooks", "why"), [(_logged, "Python objects"), (_branching, "Data-dependent branching")])
def test_other_hooks_are_called_by_pytorch(hooks: Hooks, why: str) -> None:
    with pytest.warns(UserWarning, match="in pieces"):
        step = trained(sgd, hooks)
    assert len(step.breaks) == 1 and why in step.breaks[0]


def test_hooks_come_and_go_between_steps() -> None:
    def once(model: Any, log: list[Any]) -> Any:
        return [model[0].weight.register_hook(lambda g: g * 3)]

    def change(model: Any, handles: Any, number: int) -> None:
        if number == 2:
            handles.append(model[0].weight.register_hook(lambda g: g + 1))  # on a parameter that has one
        if number == 3:
            handles.pop(0).remove()
        if number == 4:
            handles.append(model[2].bias.register_post_accumulate_grad_hook(_zeroed))
        if number == 5:
            for handle in handles:
                handle.remove()

    assert trained(sgd, once, change).breaks == []


def test_a_hook_of_a_parameter_that_no_optimizer_updates() -> None:
    def frozen(parameters: Any) -> Any:
        return torch.optim.SGD(list(parameters)[2:], lr=0.1)

    with pytest.warns(UserWarning, match="in pieces"):
        step = trained(frozen, _scaled)
    assert "does not update" in step.breaks[0]


def test_a_hook_reads_what_changes() -> None:
    """A number in a closure is a guard, and not a constant for ever."""
    factors = [1.0, 2.0, 0.5, 0.25, 3.0, 4.0]
    now: dict[str, float] = {}

    def reading(model: Any, log: list[Any]) -> None:
        model[0].weight.register_hook(lambda g: g * now["factor"])

    def change(model: Any, handle: Any, number: int) -> None:
        now["factor"] = factors[number]

    trained(sgd, reading, change)


def test_a_hook_after_accumulation_that_returns_something_is_an_error() -> None:
    model = nn.Linear(3, 2)
    step = dt.training_step(model, F.mse_loss, sgd(model.parameters()))
    step(torch.randn(4, 3), torch.randn(4, 2))
    model.weight.register_post_accumulate_grad_hook(lambda p: p.grad)  # type: ignore[arg-type, return-value]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="should return None"):
            step(torch.randn(4, 3), torch.randn(4, 2))
