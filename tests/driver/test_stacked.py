"""Trials in one program end as separate trials do in eager PyTorch: losses, parameters, buffers, and optimizer state.

Matmuls of all trials may sum in another order than those of one, so results are equal up to rounding, which grows from
step to step; float64 keeps it far below what a wrong rule would change.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.driver.stacked import StackedStep
from daceml_train.errors import Unsupported
from daceml_train.trials.state import Training

pytestmark = pytest.mark.compiled
COUNT, STEPS = 5, 6
NEAR = {"rtol": 1e-9, "atol": 1e-11}
X = torch.rand(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X[:, :4].argmax(1)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))


class Case:
    """A kind of optimizer, and what differs between trials."""

    def __init__(
        self, new: Callable[..., torch.optim.Optimizer], clip: bool = False, **values: Callable[[int], Any]
    ) -> None:
        self.new, self.clip, self.values = new, clip, values

    def options(self, trial: int) -> dict[str, Any]:
        return {name: value(trial) for name, value in self.values.items()}


CASES = {
    "rates": Case(torch.optim.SGD, lr=lambda t: 0.1 * (t + 1)),
    "momentum": Case(torch.optim.SGD, lr=lambda t: 0.2 / (t + 1), momentum=lambda t: 0.5 + 0.1 * t, weight_decay=lambda t: 0.01 * (t + 1)),
    "adamw": Case(torch.optim.AdamW, lr=lambda t: 0.01 * (t + 1), betas=lambda t: (0.8 + t / 50, 0.9 + t / 60), weight_decay=lambda t: 0.1 + t),
    "clipped": Case(torch.optim.SGD, clip=True, lr=lambda t: 0.3),
    "rmsprop": Case(torch.optim.RMSprop, lr=lambda t: 0.01 * (t + 1), alpha=lambda t: 0.5 + 0.05 * t),
}  # fmt: skip


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.randint(0, len(X), (8,), generator=torch.Generator().manual_seed(step))
    return X[chosen], Y[chosen]


def trials(case: Case) -> list[tuple[Net, torch.optim.Optimizer]]:
    """Different initial parameters, and the optimizer of each."""
    found = []
    for trial in range(COUNT):
        torch.manual_seed(trial)
        model = Net().double()
        found.append((model, case.new(model.parameters(), **case.options(trial))))
    return found


def bound_of(trial: int, case: Case) -> float | None:
    return 0.05 * (trial + 1) if case.clip else None


def alone(case: Case) -> tuple[list[list[float]], list[tuple[Net, torch.optim.Optimizer]]]:
    """The trials one by one, in eager PyTorch."""
    losses, results = [], trials(case)
    for number, (model, optimizer) in enumerate(results):
        losses.append([])
        for step in range(STEPS):
            x, y = batches(step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), bound_of(number, case))
            optimizer.step()
            losses[-1].append(loss.item())
    return losses, results


def together(case: Case) -> tuple[list[list[float]], list[Any], StackedStep]:
    """The trials on one step: the first step of each by itself, which creates the optimizer's state, then all at once.

    Returns losses and final states.
    """
    results, states = trials(case), []
    model = Net().double()
    optimizer = case.new(model.parameters(), **case.options(0))
    step = dt.training_step(model, nn.functional.cross_entropy, optimizer, clip_norm=bound_of(0, case))
    training, losses = Training(step), []
    start = training.snapshot()
    for number, (own, _) in enumerate(results):
        training.restore(start)
        model.load_state_dict(own.state_dict())
        apply(step, case, number)
        losses.append([step(*batches(0)).item()])
        states.append(training.snapshot())
    stack = StackedStep(step, COUNT, *batches(1))
    for number, state in enumerate(states):
        training.restore(state)
        apply(step, case, number)
        stack.load(number)
        assert stack.read(number, *batches(1))
    for position in range(1, STEPS):
        for number, loss in enumerate(stack(*batches(position))):
            losses[number].append(loss.item())
    for number, state in enumerate(states):
        training.restore(state)
        stack.store(number)
        states[number] = training.snapshot()
    return losses, states, stack


def apply(step: Any, case: Case, trial: int) -> None:
    step.optimizer.param_groups[0].update(case.options(trial))
    step.clip_norm = bound_of(trial, case)


@pytest.mark.parametrize("name", CASES)
def test_trials_end_as_separate_ones_in_eager_pytorch(name: str) -> None:
    expected, before = alone(CASES[name])
    losses, after, _ = together(CASES[name])
    torch.testing.assert_close(losses, expected, **NEAR)
    for state, (model, optimizer) in zip(after, before, strict=True):
        ended = {name.removeprefix("model."): tensor for name, tensor in state["tensors"].items()}
        torch.testing.assert_close(ended, dict(model.state_dict()), **NEAR)
        own = [optimizer.state.get(parameter, {}) for parameter in model.parameters()]
        given = [{name: value for name, value in each.items() if value is not None} for each in own]
        torch.testing.assert_close(state["optimizer"], given, **NEAR, check_dtype=False)
        other = Net().double()
        other.load_state_dict(ended)
        model.eval(), other.eval()
        assert torch.equal(model(X).argmax(1), other(X).argmax(1))
    assert len({tuple(each) for each in losses}) == COUNT


def test_norms_of_all_trials() -> None:
    *_, stack = together(CASES["clipped"])
    assert stack.norms is not None and stack.norms.shape == (COUNT,)
    assert len(set(stack.norms.tolist())) == COUNT


def test_dropout_masks_are_those_of_a_trial_alone() -> None:
    """One seed per step, as separate trials with equal generators draw."""
    torch.manual_seed(0)
    model = Net(0.4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.training_step(model, nn.CrossEntropyLoss(label_smoothing=0.1), optimizer)
    step(*batches(0))
    start, stack, states = copy.deepcopy(model.state_dict()), StackedStep(step, COUNT, *batches(0)), []
    probabilities, smoothing = [0.1 + 0.15 * t for t in range(COUNT)], [0.05 + 0.1 * t for t in range(COUNT)]
    for number in range(COUNT):
        model.dropout.p, step.loss.label_smoothing = probabilities[number], smoothing[number]
        stack.load(number)
        assert stack.read(number, *batches(0))
    torch.manual_seed(3)
    losses = torch.stack([stack(*batches(position)) for position in range(4)])
    generator = torch.get_rng_state()
    for number in range(COUNT):
        stack.store(number)
        states.append(copy.deepcopy(model.state_dict()))
    for number in range(COUNT):
        model.load_state_dict(start)
        model.dropout.p, step.loss.label_smoothing = probabilities[number], smoothing[number]
        torch.manual_seed(3)
        expected = torch.stack([step(*batches(position)) for position in range(4)])
        assert torch.equal(torch.get_rng_state(), generator)
        torch.testing.assert_close(losses[:, number], expected, **NEAR)
        torch.testing.assert_close(states[number], model.state_dict(), **NEAR)


def test_another_pattern_of_zeros_is_another_program() -> None:
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.training_step(model, nn.functional.cross_entropy, optimizer)
    step(*batches(0))
    stack = StackedStep(step, 2, *batches(0))
    optimizer.param_groups[0]["lr"] = 0.2
    assert stack.read(0, *batches(0))
    optimizer.param_groups[0]["weight_decay"] = 0.1
    assert not stack.read(0, *batches(0))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor, other: torch.Tensor, factor: float) -> torch.Tensor:
        return (x - 0.5 * other) @ self.weight * factor


def test_arguments_of_another_kind_are_refused() -> None:
    model = Scaled()
    step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batches(0)
    other = x.clone()
    stack = StackedStep(step, 2, (x, other, 2.0), y)
    expected = nn.functional.cross_entropy((x - 0.5 * other) @ torch.ones(8, 4, dtype=torch.float64) * 2.0, y)
    torch.testing.assert_close(stack((x, other, 2.0), y), expected.expand(2), **NEAR)
    wrong = [
        ((x[:4], other[:4], 2.0), y[:4]),
        ((x.float(), other, 2.0), y),
        ((x.t().contiguous().t(), other, 2.0), y),
        ((x, x, 2.0), y),
        ((x, other, 3.0), y),
        ((x, other, 2.0), y, y),
        ((x, other), y),
    ]
    for arguments in wrong:
        with pytest.raises(dt.Invalid, match="arguments of another kind"):
            stack(*arguments)


class Counting(Net):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def first_step() -> Any:
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)
    return dt.training_step(model, nn.functional.cross_entropy, optimizer)


def counting() -> Any:
    model = Counting().double()
    return dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))


def kept() -> Any:
    model = Net().double()
    return dt.training_step(
        model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), keep_gradients=True
    )


def drawing() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dt.training_step(model, nn.functional.cross_entropy, optimizer, random="eager")


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (first_step, "the first step of an optimizer"),
        (counting, "changes Python objects"),
        (kept, "gradients that are kept"),
        (drawing, "a probability that each trial may have"),
    ],
)
def test_refusals(new: Callable[[], Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        StackedStep(new(), 2, *batches(0))
    with pytest.raises(dt.Invalid, match="the number of trials is positive"):
        StackedStep(new(), 0, *batches(0))
