"""Steps along paths: any Python in the model, with eager execution's numbers, effects and random streams; programs are
compiled for ways through the code; nothing is written before the last look at a value.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.faster import COSTLY, LEFT_CALLS, PathCosts
from daceml_train.driver.paths import EARLY_PATHS
from tests.driver.imperative import BATCH, SIZE, Imperative, Pair, assert_alike, batches, kept, loss_of
from tests.driver.imperative_models import OTHERS, REFUSED, Averages
from tests.driver.imperative_programs import NOT_FOLLOWED, PROGRAMS

pytestmark = pytest.mark.compiled


class Branching(Imperative):
    """Three decisions on values, each of which the batch settles: two layers and one without operators."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        if h[0, 0].item() > 0:
            self.notes.append("first")
            h = h * 2
        h = self.r(h)
        if h.detach().mean() > 0:
            h = h.relu() + h
        if float(h.sum()) > 0:
            self.notes.append(round(float(h.sum()), 3))
        return h


class Decided(Imperative):
    """Three decisions that its caller settles, by values that pass through the model."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for position in range(3):
            h = self.l(h).tanh()
            if (h.detach()[0, 0] * 0 + x[0, position]).item() > 0:
                self.notes.append(position)
                h = self.r(h).tanh() * 2
        return h + self.r(h)


def settled(bits: tuple[int, ...]) -> Tensor:
    x = batches(1)[0].clone()
    x[0, :3] = torch.tensor([1.0 if bit else -1.0 for bit in bits])
    return x


def test_a_branch_that_flips_at_every_position() -> None:
    pair = Pair(Decided())
    ways = list(itertools.product((0, 1), repeat=3))
    pair.train([settled(ways[0])] * 3)
    for way in ways:  # each differs from the one before at some position
        pair.train([settled(way), settled(ways[0])])
    before = len(pair.step.records)
    pair.train([settled(way) for way in (*ways, *reversed(ways)) for _ in range(2)])
    assert pair.paths.compiled >= 8 and not pair.paths.refused
    before = len(pair.step.records)
    misses = pair.paths.misses
    pair.train([settled(way) for way in ways])
    assert len(pair.step.records) == before and pair.paths.misses == misses


def test_values_decide() -> None:
    pair = Pair(Branching())
    pair.train(batches(16))
    assert not pair.paths.refused and pair.paths.misses < 12


class Failing(Imperative):
    """Raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SIZE)
        self.raises = -1
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        self.last = h.detach()
        for position in range(3):
            if position == self.raises:
                raise ArithmeticError(f"at {position}: {h.shape}")
            h = self.l(h).tanh()
            self.notes.append(float(h.mean()))
        return self.r(h)


@pytest.mark.parametrize("position", range(3))
def test_a_step_that_raises_writes_nothing(position: int) -> None:
    pair = Pair(Failing())
    pair.train(batches(4))
    model, optimizer = pair.ours, pair.optimizers[0]
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))]
    before = [t.detach().clone() for t in tensors]
    pair.ours.raises = pair.theirs.raises = position  # type: ignore[assignment]
    x = batches(1)[0]
    for module in (pair.ours, pair.theirs):
        with pytest.raises(ArithmeticError, match=f"at {position}"):
            pair.step(x, torch.ones(BATCH, SIZE, dtype=torch.float64)) if module is pair.ours else module(x)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert_alike(kept(pair.ours), kept(pair.theirs))
    pair.ours.raises = pair.theirs.raises = -1  # type: ignore[assignment]
    pair.train(batches(4))


class Coins(Imperative):
    """Random numbers of all three streams, before and after operators of the path."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        if random.random() < 0.5:
            h = h + torch.randn_like(h)
        h = F.dropout(h, 0.3, self.training)
        scale = float(np.random.uniform(0.5, 1.5))
        h = F.dropout2d(h[:, :, None, None], 0.5)[:, :, 0, 0] * scale
        index = torch.randperm(BATCH)
        noise = torch.empty_like(h).uniform_()
        picked = torch.multinomial(h.detach().softmax(-1), 2)
        self.notes.append(picked.tolist())
        return self.r(h[index] + noise)


def test_random_streams_are_those_of_eager_execution() -> None:
    pair = Pair(Coins())
    pair.train(batches(16))
    assert not pair.paths.refused and pair.paths.compiled <= 4


class Noted(Imperative):
    """Lists that grow, numbers that change, values that NumPy computes."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.power = 0.5, 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rate = max(0.1, self.rate * 0.97)
        h = self.l(x)
        low, high = np.quantile(h.detach().numpy(), [0.2, 0.8])
        self.notes.append((float(high), len(self.notes)))
        h = h.clamp(float(low), float(high)) * self.calls + self.rate
        print(f"{h.std().item():.3f}")
        return self.r(F.dropout(h / (1 + self.calls), self.rate))


def test_numbers_and_lists_compile_nothing() -> None:
    pair = Pair(Noted())
    pair.train(batches(6))
    before = len(pair.step.records)
    pair.train(batches(40))
    assert len(pair.step.records) == before and not pair.paths.refused


class States(Imperative):
    """Tensors that the model keeps, with and without gradients, and in a list that it shortens."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.history = torch.zeros(BATCH, SIZE, dtype=torch.float64), list[Tensor]()
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.l(x) + self.r(self.state))
        if h.detach().mean().item() > 1e9:
            self.notes.append("never")
        self.state, self.last = h.detach(), h
        self.history = [*self.history[-2:], h.detach().mean(0)]
        return h - torch.stack(self.history).mean(0)


def test_tensors_that_a_model_keeps() -> None:
    pair = Pair(States())
    pair.train(batches(12))
    assert not pair.paths.refused and pair.paths.misses < 8
    with pytest.raises(RuntimeError, match="second time"):
        pair.ours.last.sum().backward()  # type: ignore[operator, union-attr]


def test_state_that_is_changed_in_place() -> None:
    pair = Pair(Averages())
    pair.train(batches(10))
    assert not pair.paths.refused and pair.paths.misses <= 3


@pytest.mark.parametrize("model", OTHERS)
def test_as_in_eager_execution(model: Callable[[], Imperative]) -> None:
    pair = Pair(model())
    pair.train(batches(10))
    for paths in pair.step.paths.values():
        assert REFUSED[model] in paths.refused if model in REFUSED else not paths.refused  # type: ignore[index]
        assert paths.refused or paths.misses < paths.calls


@pytest.mark.parametrize("model", (*PROGRAMS, *NOT_FOLLOWED))
def test_programs_as_people_write_them(model: Callable[[], Imperative]) -> None:
    pair = Pair(model())
    pair.train(batches(10))
    if model in NOT_FOLLOWED:
        assert NOT_FOLLOWED[model] in pair.paths.refused
    else:
        assert not pair.paths.refused and pair.paths.misses <= PROGRAMS[model], (pair.paths.misses, pair.paths.refused)


class Spoiling(Imperative):
    """Changes what its derivative needs, so that the backward pass raises, and keeps a view of it."""

    spoils = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.last = h.detach()
        if h.sum().item() > -1e9 and self.spoils:
            self.last.mul_(0)
        return self.r(h)


def test_what_is_kept_has_values_after_a_backward_pass_that_raises() -> None:
    pair = Pair(Spoiling())
    pair.train(batches(5))
    assert pair.paths.misses < 5
    pair.ours.spoils = pair.theirs.spoils = True  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pair.step(batches(1)[0], torch.ones(BATCH, SIZE, dtype=torch.float64))
    assert not pair.ours.last.is_meta and not pair.ours.last.any()  # type: ignore[union-attr, operator]


class Late(nn.Module):
    """Computes its loss, looks at it, and in every third call computes and looks at something else after that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.notes = nn.Linear(SIZE, SIZE).double(), 0, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        loss = y.square().mean()
        self.calls += 1
        self.notes.append(loss.item() < 0.3)
        if self.calls % 3 == 0:
            self.notes.append(y.max().item())
        return loss


def test_a_path_that_is_left_after_the_loss_was_computed() -> None:
    torch.manual_seed(0)
    ours = Late()
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    step = dt.training_step(ours, lambda loss: loss, optimizers[0])
    for x in batches(8):
        optimizers[1].zero_grad()
        expected = theirs(x)
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(x), expected.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(ours.layer.weight, theirs.layer.weight, rtol=1e-12, atol=0)
    assert ours.notes == pytest.approx(theirs.notes, rel=1e-12)
    (paths,) = step.paths.values()
    assert not paths.refused and paths.misses <= 4


class Rows(Imperative):
    """Looks at rows of a result, one after the other, and at what a later layer computes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        order = [int(row.detach().numpy().argmax()) for row in h]
        self.notes.append(order)
        y = self.r(h[:, torch.tensor(order)[0]][:, None] * h)
        return y if y.sum().item() < 1e9 else h


def test_looks_that_cost_nothing_more_are_of_one_program() -> None:
    pair = Pair(Rows())
    pair.train(batches(6))
    (leaf,) = pair.paths.leaves
    assert leaf.program is not None and len(leaf.looked) == BATCH + 1
    assert len(pair.step.records) == 3  # the rows, the sum of the later layer, and the rest


def test_paths_share_the_programs_of_their_looks() -> None:
    pair = Pair(Decided())
    pair.train([settled(bits) for bits in ((0, 0, 0), (0, 0, 1)) for _ in range(3)])
    assert pair.paths.compiled == 2 and len(pair.step.records) == 3 + 2


def test_the_report_shows_the_paths() -> None:
    pair = Pair(Decided())
    pair.train([settled(bits) for bits in ((0, 0, 0), (0, 0, 1)) for _ in range(3)])
    text = str(dt.report(pair.step))
    assert "6 calls along paths: 3 by programs, 3 recorded" in text
    assert "a look at a value (at test_paths.py:" in text and text.count("compiled, taken 3 times") == 2


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_norms_and_kept_gradients(keeps: bool) -> None:
    model = Decided().double()
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, eager)]
    step = dt.training_step(model, loss_of, optimizers[0], keep_gradients=keeps, clip_norm=0.1)
    target = torch.ones(BATCH, SIZE, dtype=torch.float64)
    for number in range(6):
        x = settled((0, number % 2, 1))
        step(x, target)
        optimizers[1].zero_grad()
        loss_of(eager(x), target).backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        optimizers[1].step()
        assert step.gradient_norm is not None
        torch.testing.assert_close(step.gradient_norm, norm)
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert (ours.grad is not None) is keeps
            if keeps:
                torch.testing.assert_close(ours.grad, theirs.grad)


def test_parameters_that_are_frozen_and_options_that_change() -> None:
    pair = Pair(Decided(), lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    x = settled((1, 0, 1))
    pair.train([x] * 4)
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["lr"] = 0.002
    misses = pair.paths.misses
    pair.train([x] * 3)
    assert pair.paths.misses == misses  # a rate is an input
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["amsgrad"] = False
        optimizer.param_groups[0]["weight_decay"] = 0.0
    pair.train([x] * 4)
    for model in (pair.ours, pair.theirs):
        model.r.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    pair.train([x] * 4)
    for model in (pair.ours, pair.theirs):
        model.r.weight.requires_grad_(True)  # type: ignore[union-attr, operator]
    pair.train([x] * 3)


def test_hooks_that_are_added() -> None:
    pair = Pair(Decided())
    x = settled((0, 1, 1))
    pair.train([x] * 4)
    for model in (pair.ours, pair.theirs):
        model.l.register_forward_hook(lambda module, args, output: output * 0.5)  # type: ignore[union-attr, operator]
    pair.train([x] * 4)
    for model in (pair.ours, pair.theirs):
        model.r.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[union-attr, operator]
    pair.train([x] * 4)


class Endless(Imperative):
    """Never takes the same path twice."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.l(x)
        if float(h.detach().sum()) < 1e9:
            for _ in range(self.calls % 64):
                h = h * 1.01
        return self.r(h)


def test_paths_that_never_recur_end_the_search() -> None:
    pair = Pair(Endless())
    pair.train(batches(30))
    assert pair.paths.refused and len(pair.step.records) <= 20


class Ways(Imperative):
    """32 ways, each of which recurs."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self.l(x).tanh() if random.random() < 0.5 else self.r(x) * 0.9
        return x


def test_paths_whose_programs_cost_more_than_they_save_end_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PathCosts, "allow", lambda self: False)
    pair = Pair(Ways())
    pair.train(batches(150))
    assert pair.paths.refused == COSTLY and COSTLY in pair.step.breaks
    assert pair.paths.compiled == EARLY_PATHS


def test_programs_may_cost_as_much_as_the_first_ones_and_what_they_saved() -> None:
    costs = PathCosts()
    costs.paid(2.0, early=True)
    assert costs.allow()
    costs.paid(3.0, early=False)
    assert not costs.allow()
    costs.ran(0.5, float("inf"))
    costs.ran(0.5, 0.25)
    assert not costs.allow()
    costs.ran(0.5, 2.0)
    assert costs.allow()
    assert [costs.leave() for _ in range(LEFT_CALLS)] == [False] * (LEFT_CALLS - 1) + [True]
