"""Micro-batches give the loss and the gradients of the whole batch, whatever the loss is a mean over."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.analysis.interpret import interpret
from daceml_train.autodiff.whole_batch import split_loss
from daceml_train.driver.micro_batches import split
from daceml_train.driver.whole import batch_of
from daceml_train.errors import BudgetInfeasible

pytestmark = pytest.mark.compiled

CLASSES = 5
WEIGHTS = torch.tensor([0.2, 1.5, 0.7, 3.0, 1.0], dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, CLASSES)).double()


def sequences(rows: int = 8, length: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets of which few count in some parts and none in one, and the mask of those that count."""
    torch.manual_seed(rows + length)
    x, y = torch.randn(rows, length, 6, dtype=torch.float64), torch.randint(0, CLASSES, (rows, length))
    kept = torch.arange(length) < torch.tensor([[0], [0], [7], [1], [2], [5], [3], [6]]).repeat(rows // 8, 1)
    return x, torch.where(kept, y, -100), kept


def flat(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output.flatten(0, 1), target.flatten()


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    mask = target != -100
    each = F.cross_entropy(*flat(output, target.clamp(min=0)), reduction="none").view(target.shape)
    return (each * mask).sum() / mask.sum()


def clamped_mean(output: Tensor, target: Tensor) -> Tensor:
    mask = (target != -100).double()
    each = F.cross_entropy(output.transpose(1, 2), target.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1.0)


def normalized_weights(output: Tensor, target: Tensor) -> Tensor:
    mask = (target != -100).double()
    each = F.cross_entropy(output.transpose(1, 2), target.clamp(min=0), reduction="none")
    return (each * (mask / mask.sum())).sum()


def with_penalty(output: Tensor, target: Tensor) -> Tensor:
    return masked_mean(output, target) + 0.1 * output.square().mean() + 0.5


def mean_of_means(output: Tensor, target: Tensor) -> Tensor:
    """Of each sequence first, padding counted by one so that none divides by zero."""
    mask = (target != -100).double()
    each = F.cross_entropy(output.transpose(1, 2), target.clamp(min=0), reduction="none")
    return ((each * mask).sum(1) / (1 + mask.sum(1))).mean()


def over_the_size(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(*flat(output, target), reduction="sum") / output.shape[0]


def time_major(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(0, 1).flatten(0, 1), target.t().flatten())


def shifted(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].reshape(-1, CLASSES), target[:, 1:].reshape(-1))


def per_class(output: Tensor, target: Tensor) -> Tensor:
    """Each class counts by how rare it is in the batch."""
    hot = F.one_hot(target.clamp(min=0), CLASSES).double() * (target != -100)[..., None]
    return -((hot * F.log_softmax(output, -1)).sum((0, 1)) / (1 + hot.sum((0, 1)))).sum()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "ignore_index": (lambda o, t: F.cross_entropy(*flat(o, t)), True),
    "class weights": (lambda o, t: F.cross_entropy(*flat(o, t), weight=WEIGHTS), True),
    "label smoothing": (lambda o, t: F.cross_entropy(*flat(o, t), label_smoothing=0.1), True),
    "weights and smoothing": (lambda o, t: F.cross_entropy(*flat(o, t), weight=WEIGHTS, label_smoothing=0.1), True),
    "nll": (lambda o, t: F.nll_loss(F.log_softmax(o.flatten(0, 1), -1), t.flatten()), True),
    "masked mean": (masked_mean, True),
    "clamped mean": (clamped_mean, True),
    "normalized weights": (normalized_weights, True),
    "penalty": (with_penalty, True),
    "time major": (time_major, True),
    "shifted": (shifted, True),
    "per class": (per_class, True),
    "sum": (lambda o, t: F.cross_entropy(*flat(o, t), reduction="sum"), False),
    "mean": (lambda o, t: o.square().mean(), False),
    "mean of means": (mean_of_means, False),
    "over the size": (over_the_size, False),
    "two means": (lambda o, t: o.square().mean() + 3 * (o.sum(-1) ** 2).mean(), False),
    "constant": (lambda o, t: o.mean() + 2.0, False),
    "tiny constants": (lambda o, t: (1e9 * o).square().sum() * (1e-20 / o.shape[0]), False),
    "logarithm of the size": (lambda o, t: o.square().sum() * math.log(2 + o.shape[0]), False),
}
"""Name -> loss, and whether it divides by what only the whole batch tells."""


COMPILED = ("ignore_index", "class weights", "penalty", "over the size")


def step_for(loss: Any, kind: Any = torch.optim.SGD, model: nn.Module | None = None, **options: Any) -> Any:
    model = network() if model is None else model
    return dt.training_step(model, loss, kind(model.parameters(), lr=0.1), micro_batches=4, **options)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_parts_add_up(name: str) -> None:
    """The graphs of the parts, interpreted; none but the whole batch's values that they ask for are given to them."""
    loss, divides = LOSSES[name]
    step, (x, y, _) = step_for(loss), sequences()
    whole, parts = step.wholes.looking.seen(x, y), split(x, (y,), 4)
    total = 0.0
    for inputs, targets in parts:
        seen = step.seen(inputs, *targets)
        found = split_loss(batch_of(seen, whole, 4))
        assert (found.share is None) == divides
        given = arrays(seen)
        if found.graph is not None:
            values = interpret(found.whole, arrays(whole)).values
            given |= {k: values[array] for k, array in found.denominators.items()}
        graph = found.graph or seen.captured.graph
        total += (found.share or 1.0) * float(interpret(graph, given).outputs[0])
    torch.testing.assert_close(total, loss(step.model(x), y).item(), rtol=1e-12, atol=1e-12)


def arrays(seen: Any) -> dict[str, Any]:
    return {name: tensor.detach().numpy() for name, tensor in seen.tensors.items()}


@pytest.mark.parametrize("name", COMPILED)
def test_loss_and_gradients_are_those_of_the_whole_batch(name: str) -> None:
    loss, _ = LOSSES[name]
    step, theirs = step_for(loss), network()
    their = torch.optim.SGD(theirs.parameters(), lr=0.1)
    sizes = ((8, 7), (16, 7), (8, 9), (8, 7)) if name == "ignore_index" else ((8, 7),)
    for rows, length in sizes:
        x, y, _ = sequences(rows, length)
        their.zero_grad()
        expected = loss(theirs(x), y)
        expected.backward()
        their.step()
        torch.testing.assert_close(step(x, y), expected.detach(), rtol=1e-12, atol=1e-12)
        for a, b in zip(step.model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert step.breaks == [] and step.accumulating.breaks == []


def test_weights_that_change_are_seen() -> None:
    """The class weights are a buffer, changed in place and then replaced between calls."""
    loss, (x, y, _) = nn.CrossEntropyLoss(weight=WEIGHTS.clone()), sequences()
    step, theirs = step_for(lambda o, t: loss(o.transpose(1, 2), t)), network()
    their = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for change in (
        lambda: None,
        lambda: loss.weight.mul_(torch.arange(1.0, 6)),
        lambda: setattr(loss, "weight", WEIGHTS.flip(0)),
    ):
        with torch.no_grad():
            change()
        their.zero_grad()
        expected = loss(theirs(x).transpose(1, 2), y)
        expected.backward()
        their.step()
        torch.testing.assert_close(step(x, y), expected.detach(), rtol=1e-12, atol=1e-12)


def test_a_count_needs_no_dropout() -> None:
    """The divisor of a mean over classes that are not ignored depends on targets alone, not on the seed of dropout.

    The probability is so small that nothing is dropped.
    """
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 8), nn.Dropout(1e-9), nn.Linear(8, 4))
    theirs = copy.deepcopy(ours)
    step = dt.training_step(ours, F.cross_entropy, torch.optim.SGD(ours.parameters(), lr=0.1), micro_batches=2)
    their = torch.optim.SGD(theirs.parameters(), lr=0.1)
    x, y = torch.randn(8, 6), torch.tensor([0, 1, -100, -100, 2, 3, 1, -100])
    for _ in range(3):
        their.zero_grad()
        expected = F.cross_entropy(theirs(x), y)
        expected.backward()
        their.step()
        assert float(step(x, y)) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert step.breaks == [] and step.accumulating.breaks == []
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_batch_statistics_are_those_of_a_part() -> None:
    """As in eager execution on the parts: normalization, and running statistics, which move once for each."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)).double()
    theirs, x, y = copy.deepcopy(ours), torch.randn(16, 6, dtype=torch.float64), torch.randint(0, CLASSES, (16,))
    y[:6] = -100
    step, their = step_for(F.cross_entropy, model=ours), torch.optim.SGD(theirs.parameters(), lr=0.1)
    losses = [F.cross_entropy(theirs(a), b, reduction="sum") for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    expected = torch.stack(losses).sum() / (y != -100).sum()
    expected.backward()
    their.step()
    torch.testing.assert_close(step(x, y), expected.detach(), rtol=1e-12, atol=1e-12)
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "root": (lambda o, t: o.square().mean().sqrt(), "sqrt .*test_whole_batch.py:[0-9]+. needs a sum over the rows"),
    "contrast": (lambda o, t: (o.flatten(1) @ o.flatten(1).t()).logsumexp(1).mean(), "matmul .* with one another"),
    "largest": (lambda o, t: o.square().mean((1, 2)).max(), "max over the rows|needs a sum over the rows"),
    "first": (lambda o, t: o[0].square().mean(), "slice .* some of the rows|index .* rows"),
    "centered": (lambda o, t: (o - o.mean(0)).square().mean(), "sub .* needs a sum over the rows"),
    "numbered": (lambda o, t: (o.mean((1, 2)) * torch.arange(o.shape[0])).mean(), "numbers the rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused(name: str) -> None:
    loss, why = REFUSED[name]
    step, (x, y, _) = step_for(loss), sequences()
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(BudgetInfeasible, match=why) as error:
        step(x, y)
    assert 'reduction="mean" or "sum"' in str(error.value) and "test_whole_batch.py" in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), step.model.state_dict().values(), strict=True))


@pytest.mark.filterwarnings("ignore:daceml_train runs")
def test_in_pieces() -> None:
    """An optimizer without an update of ours takes the gradients of the whole batch; a model that is not one graph
    cannot be told.
    """
    step, theirs, (x, y, _) = step_for(masked_mean, torch.optim.Adafactor), network(), sequences()
    their = torch.optim.Adafactor(theirs.parameters(), lr=0.1)
    for _ in range(2):
        their.zero_grad()
        expected = masked_mean(theirs(x), y)
        expected.backward()
        their.step()
        torch.testing.assert_close(step(x, y), expected.detach(), rtol=1e-12, atol=1e-12)
    for a, b in zip(step.model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert "Adafactor" in step.breaks[0] and all(p.grad is None for p in step.model.parameters())

    def broken(output: Tensor, target: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return output.square().mean()

    with pytest.raises(BudgetInfeasible, match="not one graph"):
        step_for(broken)(x, y)
    assert torch.isfinite(step_for(broken, reduction="mean")(x, y))
