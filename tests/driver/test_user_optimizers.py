"""Optimizers that users write: their step is a part of the program, with numbers, state and Python objects as in eager."""

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
STEPS = 8
Change = Callable[[nn.Module, Any, int], None]


class Net(nn.Module):
    """With a layer that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6)
        self.middle, self.last, self.unused = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.norm(self.first(x)))))


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are equal, numbers up to rounding in float64."""
    match a:
        case Tensor():
            return a.dtype is b.dtype and torch.allclose(a.double(), b.double(), rtol=1e-11, atol=1e-11)
        case dict():
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case None:
            return b is None
        case float():
            return abs(a - b) < 1e-12
    return bool(a == b)


def options(optimizer: Any) -> list[Any]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def trained(make: Any, change: Change | None = None, clip: float | None = None, keep: bool = False) -> Any:
    """The step after it and eager execution have trained, held to each other after every step."""
    torch.manual_seed(0)
    theirs = Net().double()
    ours = copy.deepcopy(theirs)
    first, second = make(theirs.parameters()), make(ours.parameters())
    step = dt.training_step(ours, F.mse_loss, second, clip_norm=clip, keep_gradients=keep)
    for number in range(STEPS):
        for model, optimizer in ((theirs, first), (ours, second)):
            if change is not None:
                change(model, optimizer, number)
        x, y = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
        first.zero_grad()
        loss = F.mse_loss(theirs(x), y)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        first.step()
        assert same(loss.detach(), step(x, y)), number
        assert same(theirs.state_dict(), ours.state_dict()), number
        assert same(first.state_dict()["state"], second.state_dict()["state"]), number
        assert same(options(first), options(second)), number
        assert vars(first).get("calls") == vars(second).get("calls")
        assert same([p.grad for p in theirs.parameters() if keep], [p.grad for p in ours.parameters() if keep])
        assert keep or all(p.grad is None for p in ours.parameters())
    return step


TRACED = [
    users.Lion, users.Lamb, users.Coupled, users.Remembering, users.Counting, users.Foreach, users.Orthogonal,
    users.AsPyTorchs,
]  # fmt: skip


@pytest.mark.parametrize("kind", TRACED)
def test_the_step_of_a_user_is_a_part_of_the_program(kind: Any) -> None:
    step = trained(kind)
    assert step.breaks == []
    assert step._captures == 1 and len(step.records) == 1 and not step.records[0].fallbacks
    assert "PyTorch took 2 steps" in str(dt.report(step))


@pytest.mark.parametrize("kind", [users.Lamb, users.Foreach])
def test_clipping_comes_before_the_users_step(kind: Any) -> None:
    step = trained(kind, clip=0.1)
    assert step.breaks == [] and step.gradient_norm > 0


@pytest.mark.parametrize("kind", [users.Lion, users.Counting])
def test_gradients_are_kept_as_the_users_step_leaves_them(kind: Any) -> None:
    step = trained(kind, keep=True, clip=0.5)
    assert step.breaks == [] and step._captures == 1


def _rates(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.05 / (number + 1)


def _zero(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.0 if number == 4 else 0.05


def test_rates_are_inputs() -> None:
    for change in (_rates, _zero):
        step = trained(users.Lamb, change)
        assert step.breaks == [] and step._captures == 1 and len(step.records) == 1


def _frozen(model: Any, optimizer: Any, number: int) -> None:
    model.first.weight.requires_grad_(not 4 <= number < 6)


def _thawed(model: Any, optimizer: Any, number: int) -> None:
    model.middle.requires_grad_(number >= 4)


def _grown(model: Any, optimizer: Any, number: int) -> None:
    if number == 4:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})


def _loaded(model: Any, optimizer: Any, number: int) -> None:
    if number == 4:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _reset(model: Any, optimizer: Any, number: int) -> None:
    if number == 4:
        optimizer.state.clear()


def _evaluating(model: Any, optimizer: Any, number: int) -> None:
    model.train(number not in (4, 5))


def _replaced(model: Any, optimizer: Any, number: int) -> None:
    if number != 4:
        return
    old, model.last.weight = model.last.weight, nn.Parameter(model.last.weight.detach() * 0.5)
    optimizer.state.pop(old, None)
    parameters = optimizer.param_groups[0]["params"]
    parameters[next(i for i, p in enumerate(parameters) if p is old)] = model.last.weight


@pytest.mark.parametrize("change", [_frozen, _thawed, _grown, _loaded, _reset, _evaluating, _replaced])
@pytest.mark.parametrize("kind", [users.Lamb, users.Remembering])
def test_what_changes_between_steps(kind: Any, change: Change) -> None:
    assert trained(kind, change).breaks == []


def test_a_scheduler_may_wrap_the_step() -> None:
    schedulers: dict[Any, Any] = {}

    def scheduled(model: nn.Module, optimizer: Any, number: int) -> None:
        if number == 0:
            schedulers[optimizer] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        else:
            schedulers[optimizer].step()

    step = trained(users.Lion, scheduled)
    assert step.breaks == [] and step._captures == 1


OTHERS = [
    (users.Lookahead, "graph_break"),
    (users.Looking, "Data-dependent branching"),
    (users.Replacing, "memory is replaced"),
]


@pytest.mark.parametrize(("kind", "why"), OTHERS)
def test_what_cannot_be_traced_is_pytorchs_with_a_reason(kind: Any, why: str) -> None:
    with pytest.warns(UserWarning, match="in pieces"):
        step = trained(kind)
    assert len(step.breaks) == 1 and why in step.breaks[0] and "internal" not in step.breaks[0]


def test_a_step_that_a_scaler_may_skip() -> None:
    """Tensors keep their values; an optimizer that counts in Python is PyTorch's."""
    for kind, broken in ((users.Lion, False), (users.Lamb, True)):
        torch.manual_seed(0)
        theirs = nn.Linear(3, 2)
        ours = copy.deepcopy(theirs)
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**122, growth_interval=2) for _ in range(2)]
        first, second = kind(theirs.parameters()), kind(ours.parameters())
        step = dt.training_step(ours, F.mse_loss, second, scaler=scalers[1])
        skipped = []
        for number in range(16):
            x, y = torch.randn(4, 3), 1e2 * torch.randn(4, 2)
            before = theirs.weight.detach().clone()
            first.zero_grad()
            scalers[0].scale(F.mse_loss(theirs(x), y)).backward()
            scalers[0].step(first)
            scalers[0].update()
            step(x, y)
            skipped.append(bool((before == theirs.weight).all()))
            assert scalers[0].get_scale() == scalers[1].get_scale(), number
            torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-6)
        assert any(skipped[8:]) and not all(skipped[8:]), skipped
        assert bool(step.breaks) == broken, step.breaks


@pytest.mark.parametrize("how", ["instance", "method", "class"])
def test_another_step_of_one_of_pytorchs_optimizers_is_called(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.optim.SGD.step

    def doubled(optimizer: Any, closure: Any = None) -> Any:
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(2)
        return original(optimizer, closure)

    def make(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        if how == "instance":
            optimizer.step = lambda closure=None: doubled(optimizer, closure)
        elif how == "method":
            optimizer.step = doubled.__get__(optimizer)
        return optimizer

    if how == "class":
        monkeypatch.setattr(torch.optim.SGD, "step", doubled)
    with pytest.warns(UserWarning, match="in pieces"):
        step = trained(make)
    assert "step" in step.breaks[0]


def test_a_step_that_is_replaced_between_two_steps() -> None:
    def replaced(model: nn.Module, optimizer: Any, number: int) -> None:
        if number == 4:
            own = optimizer.step
            optimizer.step = lambda: (optimizer.param_groups[0]["params"][0].grad.mul_(3), own())

    with pytest.warns(UserWarning, match="in pieces"):
        trained(lambda parameters: torch.optim.SGD(parameters, lr=0.1), replaced)


def test_functions_of_lists_are_functions_of_each_tensor() -> None:
    """In a model, with gradients, too."""

    def function(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        sums = torch._foreach_add(xs, ys, alpha=2)
        products = torch._foreach_addcmul(torch._foreach_mul(sums, [0.5, 2.0]), xs, ys, 3.0)
        bounded = torch._foreach_maximum(torch._foreach_clamp_max(products, 1.5), -1.0)
        return [*bounded, *torch._foreach_norm(products), *torch._foreach_addcdiv(xs, ys, sums, [1.0, 2.0])]

    compiled = torch.compile(function, backend="daceml_train")
    results = []
    for run in (function, compiled):
        torch.manual_seed(0)
        leaves = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(4)]
        values = run(leaves[:2], leaves[2:])
        sum(v.sum() for v in values).backward()
        results.append(([v.detach() for v in values], [x.grad for x in leaves]))
    assert same(*results)
