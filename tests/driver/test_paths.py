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
from tests.driver.imperative import BATCH, SIZE, Imperative, Pair, assert_alike, batches, kept, loss_of

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


class Averages(Imperative):
    """State that is changed in place, of buffers and of plain tensors, and looked at between the changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mean = nn.BatchNorm1d(SIZE), torch.zeros(SIZE, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.l(x))
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.notes.append(float(x.sum()))
        if h.detach().max().item() > 0:
            h = h - self.mean
        return self.r(h)


def test_state_that_is_changed_in_place() -> None:
    pair = Pair(Averages())
    pair.train(batches(10))
    assert not pair.paths.refused and pair.paths.misses <= 3


class Running(Averages):
    """Looks at running statistics after a normalization has changed them."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.l(x))
        assert self.norm.running_mean is not None
        self.notes.append(float(self.norm.running_mean.abs().sum()))
        return self.r(h) if float(h.detach().sum()) < 1e9 else h


class Twice(Imperative):
    """Looks at a value again after it was changed."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x) * 1
        self.notes.append(float(h.sum()))
        h += 1
        self.notes.append(float(h.sum()))
        h[0] = 0
        self.notes.append(h[0, 0].item() + float(h.detach().numpy()[1, 1]))
        return self.r(h)


class Structures(Imperative):
    """Named tuples, generators, masks, chunks, and an index that a mask determines."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        largest = h.max(1)
        self.notes.append(int(largest.indices[0]))
        parts = [part.tanh() for part in h.chunk(2, 1)]
        first, *others = h
        h = torch.cat([*parts, first[None].expand(1, -1).repeat(BATCH, 1)], 1)[:, :SIZE] + largest.values[:, None]
        rows = (x[:, 0] > -9).nonzero()[:, 0]
        chosen = h[x[:, 1] > -9]
        h = h.index_add(0, rows, chosen) + sum(o.mean() for o in others)
        h[x > 1] = 0.0
        return self.r(h)


class Positions(Imperative):
    """Indices that are tensors without dimensions, of data and of results."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        order = x[:, 0].argsort()
        picked = [h[i] for i in order]
        first, column = order[0], h.detach().sum(0).argmax()
        y = torch.stack(picked) * h[..., column, None] + h[None, first, 1:3].sum() + h[first, column]
        return self.r(y)


class Buffered(Imperative):
    """Reuses an array of NumPy's, which PyTorch does not see change."""

    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros((BATCH, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        for number in range(3):
            self.array[...] = number + np.tanh(float(h.detach()[0, 0]))
            h = h + torch.from_numpy(self.array)
        return self.r(h)


class Overwriting(Imperative):
    """Changes an array that shares memory with a result."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        if float(h.detach().sum()) < 1e9:
            h.detach().numpy()[0] = 0
        return self.r(h)


class Rounded(torch.autograd.Function):
    """Rounds, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 3


class Straight(Imperative):
    """A function with a gradient of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        h = Rounded.apply(self.l(x))
        return self.r(h) if float(h.detach().sum()) < 1e9 else h


class PartOfATable(Imperative):
    """Changes a part of a tensor that it has read, and reads the whole again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(2, SIZE, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x) + self.table[0]
        self.table[0].add_(float(h.detach().mean()))
        return self.r(h + self.table[0])


class Dropping(Imperative):
    """Dropout in place, of channels, and of channels without a batch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        F.dropout(h, 0.5, inplace=True)
        h = h + F.dropout1d(h[:, None], 0.5)[:, 0] + F.dropout(h, 0.4, self.training and bool(h.detach()[0, 0] > 0))
        return self.r(h + F.dropout1d(h, 0.5) if self.calls else h)


class Attending(Imperative):
    """Attention with dropout, by a module and by hand, and a sample of categories."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)[None]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(BATCH, dtype=x.dtype)
        a, weights = self.attention(h, h, h, attn_mask=mask)
        self.notes.append(weights.detach().sum().item())
        b, _ = self.attention(h, h, h, need_weights=False)
        c = F.scaled_dot_product_attention(a, b, h, dropout_p=0.2, is_causal=True)
        return self.r((a + b + c)[0]) * F.gumbel_softmax(h[0], tau=2.0)


class DroppingWithoutBatch(Dropping):
    """What a path does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 1


class Without(Imperative):
    """A region without gradients, whose results others use."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        with torch.no_grad():
            target = self.r(h)
            if target.sum().item() > 0:
                target = target * 2
        return (h - target) * self.r(h)


class Scripted(Imperative):
    """Exceptions that are raised on values, and caught."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        try:
            if h.max().item() > 0.9:
                raise OverflowError("large")
            h = h * 3
        except OverflowError as error:
            self.notes.append(str(error))
            h = h / 2
        finally:
            self.calls += 1
        return self.r(h)


OTHERS: tuple[Callable[[], Imperative], ...] = (
    Running,
    Twice,
    Structures,
    Positions,
    Buffered,
    Overwriting,
    Straight,
    PartOfATable,
    Attending,
    Dropping,
    DroppingWithoutBatch,
    Without,
    Scripted,
)


REFUSED = {
    Overwriting: "NumPy array that shares memory",
    Straight: "autograd.Function",
    DroppingWithoutBatch: "without a batch",
}
"""What keeps calls of some of them from following paths."""


@pytest.mark.parametrize("model", OTHERS)
def test_as_in_eager_execution(model: Callable[[], Imperative]) -> None:
    pair = Pair(model())
    pair.train(batches(10))
    for paths in pair.step.paths.values():
        assert REFUSED[model] in paths.refused if model in REFUSED else not paths.refused  # type: ignore[index]
        assert paths.refused or paths.misses < paths.calls


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
