"""Sizes that depend on the values of arguments: masks, `nonzero`, `unique`, `repeat_interleave` in one program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.frontends.torch.capture.selections import FEW

pytestmark = pytest.mark.compiled


class Model(nn.Module):
    last: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.rows = nn.Linear(5, 7), nn.Linear(7, 11), nn.Embedding(11, 7)
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("fixed", torch.arange(36).view(4, 9) % 3 > 0)


def losses(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    """Masked language models, as they are usually written."""
    labels = torch.where(mask, (x[..., 0] * 9).abs().long() % 11, -100)
    kept = labels != -100
    chosen = F.cross_entropy(m.outer(m.inner(x)[kept]), labels[kept], label_smoothing=0.1)
    hidden = m.inner(x).masked_select(kept.unsqueeze(-1))
    return chosen + hidden.std() + F.binary_cross_entropy_with_logits(m.inner(x)[kept, 0], x[kept, 0].sigmoid())


def rows(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    """Statistics, products, orders and concatenations of what is selected."""
    h = m.norm(m.inner(x)[mask])
    weights = (h @ h.t() / 3).softmax(-1)
    joined = torch.cat([weights @ h, h[:1], h.flip(0)]).cumsum(0).tanh()
    spread = h.std(0).sum() + h.amax(0).sum() + h.sort(0).values[0].sum() + h.logsumexp(0).sum() + h.norm()
    return joined.mean() + spread + h.sum() / h.shape[0] + m.inner(x)[~mask].mean()


def written(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    """What is selected is changed, scattered, and stored."""
    h = m.inner(x)[mask]
    h[:, 0] = 0.0
    h.mul_(2)
    spread = x.new_zeros(4, 9, 7)
    spread[mask] = h.tanh()
    rows, columns = mask.nonzero(as_tuple=True)
    summed = x.new_zeros(4, 7).index_add(0, rows, m.inner(x[rows, columns]))
    scattered = x.new_zeros(4, 9, 7).masked_scatter(mask.unsqueeze(-1), h)
    padded = F.pad(h, (0, 0, 0, 36 - h.shape[0]))
    m.last = h.detach()
    return (spread.sum(1) ** 2).mean() + summed.pow(2).mean() + (scattered.sum(1) ** 2).mean() + padded.pow(2).mean()


def chained(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    """Selections from selections, by values and by buffers."""
    places = mask.long().cumsum(1)[mask]
    kept = places[places > 1]
    values, inverse, counts = torch.unique(mask.long().cumsum(1), return_inverse=True, return_counts=True)
    embedded = m.rows(values % 11)
    repeated = torch.repeat_interleave(m.inner(x)[:, 0], mask.sum(1), dim=0)
    several = (embedded * counts[:, None]).sum() + embedded[inverse].pow(2).mean() + repeated.pow(2).sum()
    first, second = torch.where(mask)
    positive = m.inner(x)[first, second].where(m.inner(x)[first, second] > 0, 0.0)
    return several + m.rows(kept % 11).pow(2).sum() + positive.sum() + m.inner(x)[m.fixed].pow(2).mean()


def emptiness(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    """Python decides on whether anything is selected."""
    h = m.inner(x)[mask]
    return m.outer.bias.sum() if h.numel() == 0 else h.pow(2).mean()


def by_activations(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    h = m.inner(x)
    return m.outer(h[(h.sum(-1) > 0) & mask]).pow(2).sum()


def by_random_numbers(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return m.inner(x)[torch.rand_like(x[..., 0]) > 0.5].pow(2).sum()


def by_changed_mask(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    kept = mask.clone()
    kept[:, 0] = True
    return m.inner(x)[kept].pow(2).sum()


def returned(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    m.last = mask.nonzero()
    return m.inner(x)[mask].pow(2).sum()


ONE_PROGRAM = (losses, rows, written, chained, emptiness)
NOT_BEFORE = (by_activations, by_random_numbers, by_changed_mask, returned)


def call(number: int) -> tuple[Tensor, Tensor]:
    """Arguments of one call: some elements selected, then none, one, all, two, and some again."""
    generator = torch.Generator().manual_seed(number)
    x, mask = torch.randn(4, 9, 5, generator=generator), torch.rand(4, 9, generator=generator) > 0.6
    exact = {2: 0, 3: 1, 4: 36, 5: 2}.get(number)
    return x, mask if exact is None else (torch.randperm(36, generator=generator) < exact).view(4, 9)


@pytest.mark.parametrize("forward", [*ONE_PROGRAM, *NOT_BEFORE], ids=lambda f: f.__name__)
def test_steps_as_in_eager_execution(forward: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    ours = type(forward.__name__, (Model,), {"forward": forward})().double()
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (ours, theirs)]
    step = dt.training_step(ours, lambda loss: loss * 1.0, optimizers[0], random="eager")
    start = copy.deepcopy(theirs.state_dict())
    for number in range(9):
        x, mask = call(number)
        torch.manual_seed(number)
        try:
            expected = theirs(x.double(), mask)
        except (RuntimeError, ValueError, IndexError):
            assert number in (2, 3)  # with one element or none
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                step((x.double(), mask))
            continue
        torch.manual_seed(number)
        loss = step((x.double(), mask))
        optimizers[1].zero_grad()
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), equal_nan=True)
        torch.testing.assert_close(ours.last, theirs.last)
        if not expected.isfinite():  # a mean of nothing
            ours.load_state_dict(start)
            theirs.load_state_dict(start)
            for optimizer in optimizers:
                optimizer.state.clear()
        start = copy.deepcopy(theirs.state_dict())
    if forward in ONE_PROGRAM:
        assert len(step.records) <= 2 and step.breaks == [FEW], step.breaks
    else:
        assert step.breaks and FEW not in step.breaks
