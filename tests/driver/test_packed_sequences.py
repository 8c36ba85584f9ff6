"""Packed sequences in a training step: one program for all lengths; losses and parameters as in eager execution."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import daceml_train as dt

pytestmark = pytest.mark.compiled
BATCH, STEPS, VOCABULARY = 4, 7, 30


class Model(nn.Module):
    kept: Any = None

    def __init__(self, layer: Callable[..., nn.Module], forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(VOCABULARY, 5), layer()
        self.head = nn.LazyLinear(3)
        self.function = forward

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        result: Tensor = self.function(self, x, lengths)
        return result


def padded(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(m.embedding(x), lengths, batch_first=True, enforce_sorted=False)
    assert isinstance(packed, PackedSequence)
    y, lasts = pad_packed_sequence(m.layer(packed)[0], batch_first=True)
    assert y.shape[:2] == x.shape
    mean = y.sum(1) / lasts.unsqueeze(1)
    return m.head(mean)


def last_state(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Only the last states are read: no sequence has to fill the batch."""
    h = m.layer(pack_padded_sequence(m.embedding(x).transpose(0, 1), lengths, enforce_sorted=False))[1]
    states = h if isinstance(h, tuple) else (h,)
    return m.head(torch.cat([state.transpose(0, 1).flatten(1) for state in states], 1))


def total_length(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Two layers with initial states between the packings, other padding, and a length of the caller's."""
    packed = pack_padded_sequence(m.embedding(x), lengths.flip(0).sort(descending=True).values, batch_first=True)
    first = m.layer(packed)[1]
    packed = m.layer(packed, first)[0]
    y, _ = pad_packed_sequence(packed, True, -2.0, total_length=x.shape[1] + 2)
    return m.head(y.amax(1))


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "lstm": lambda: nn.LSTM(5, 6, batch_first=True),
    "deep": lambda: nn.LSTM(5, 6, 2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(5, 6, proj_size=4, bias=False),
    "gru": lambda: nn.GRU(5, 6, bidirectional=True),
    "relu": lambda: nn.RNN(5, 6, 2, nonlinearity="relu"),
}


def batches(full: bool, vary: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, lengths and targets; `full`: the longest sequence fills the batch, `vary`: batches have other lengths."""
    result = []
    for number in range(6):
        steps = STEPS + (number * 2 if vary else 0)
        lengths = torch.randint(1, steps, (BATCH,))
        lengths[number % BATCH] = steps if full else steps - 1
        tokens = torch.randint(0, VOCABULARY, (BATCH, steps))
        result.append((tokens, lengths, torch.randint(0, 3, (BATCH,))))
    return result


def compared(model: Model, data: list[tuple[Tensor, Tensor, Tensor]], **options: Any) -> Any:
    """Train in both ways; the compiled step."""
    with torch.no_grad():
        model(*data[0][:2])  # the head's sizes
    theirs = copy.deepcopy(model).double()
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    step = dt.training_step(ours, F.cross_entropy, optimizers[0], **options)
    for x, lengths, targets in data:
        optimizers[1].zero_grad()
        expected = F.cross_entropy(theirs(x, lengths), targets)
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(step((x, lengths), targets), expected.detach())
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    return step


@pytest.mark.parametrize(
    ("layer", "forward"),
    [("projected", padded), ("relu", padded), ("lstm", last_state), ("gru", last_state), ("deep", total_length)],
)
def test_one_program(layer: str, forward: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    step = compared(Model(LAYERS[layer], forward), batches(forward is padded, vary=False))
    assert not step.breaks and len(step.records) == 1, step.breaks


def test_batches_of_other_lengths() -> None:
    torch.manual_seed(1)
    step = compared(Model(LAYERS["deep"], padded), batches(True, vary=True))
    assert not step.breaks and len(step.records) <= 2, (step.breaks, len(step.records))


def test_the_longest_does_not_fill_the_batch() -> None:
    """PyTorch's result is then shorter than the batch."""

    def shorter(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(m.embedding(x), lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(m.layer(packed)[0], batch_first=True)
        return m.head(y.mean(1))

    torch.manual_seed(2)
    full, other = batches(True, vary=False), batches(False, vary=False)
    step = compared(Model(LAYERS["gru"], shorter), [full[0], other[0], full[1], other[1]])
    assert step.breaks == ["the longest sequence that is packed does not fill the padded batch"]


def test_lengths_that_are_not_sorted_are_an_error() -> None:
    def in_order(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        y, _ = pad_packed_sequence(m.layer(pack_padded_sequence(m.embedding(x), lengths, batch_first=True))[0], True)
        return m.head(y.sum(1))

    torch.manual_seed(3)
    model = Model(LAYERS["lstm"], in_order)
    x, targets = torch.randint(0, VOCABULARY, (BATCH, STEPS)), torch.randint(0, 3, (BATCH,))
    lengths = torch.tensor([7, 5, 5, 2])
    step = compared(model, [(x, lengths, targets)] * 2)
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(RuntimeError, match="sorted in decreasing order"):
        step((x, lengths.flip(0)), targets)
    with pytest.raises(RuntimeError, match="greater than 0"):
        step((x, torch.tensor([7, 5, 5, 0])), targets)
    torch.testing.assert_close(step.model.state_dict(), before)


def test_elements_of_packed_sequences_run_in_python() -> None:
    def dropped(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(m.embedding(x), lengths, batch_first=True, enforce_sorted=False)
        changed = PackedSequence(packed.data * 2, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        return m.head(m.layer(changed)[1][0].flatten(1))

    def kept(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        m.kept = m.layer(pack_padded_sequence(m.embedding(x), lengths, batch_first=True, enforce_sorted=False))[0]
        return m.head(pad_packed_sequence(m.kept, batch_first=True)[0].sum(1))

    for forward in (dropped, kept):
        torch.manual_seed(4)
        step = compared(Model(lambda: nn.GRU(5, 6, batch_first=True), forward), batches(True, vary=False)[:3])
        assert step.breaks
    assert isinstance(step.model.kept, PackedSequence)


@pytest.mark.parametrize("random", ["seeded", "eager"])
def test_dropout_between_layers(random: Any) -> None:
    """As eager execution draws numbers, there is one per element of a packed sequence."""
    torch.manual_seed(5)
    layer = nn.LSTM(5, 6, 2, dropout=0.5, batch_first=True)
    model, data = Model(lambda: layer, padded), batches(True, vary=False)
    model(*data[0][:2])
    theirs = copy.deepcopy(model)
    step = dt.training_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.0), random=random)
    draws = []
    for _ in range(3):
        x, lengths, targets = data[0]
        torch.manual_seed(6)
        draws.append(float(step((x, lengths), targets)))
        if random == "eager":
            torch.manual_seed(6)
            torch.testing.assert_close(draws[-1], float(F.cross_entropy(theirs(x, lengths), targets)))
    assert bool(step.breaks) == (random == "eager")
