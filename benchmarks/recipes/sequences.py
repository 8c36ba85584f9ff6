"""Recipes: training on sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.recipes.way import STEPS, Way


def packed(way: Way) -> None:
    """A recurrent network of packed sequences."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            lengths = x.ne(0).any(2).sum(1)
            given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            y, _ = pad_packed_sequence(self.layer(given)[0], batch_first=True)
            return self.head(y.sum(1))

    torch.manual_seed(2)
    model = Recurrent().to(torch.float64)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = way.trainer(model, optimizer, lambda result: result.square().mean())
    for number in range(STEPS):
        lengths = torch.tensor([2 + number, 6, 1, 3])
        x = torch.randn(4, 6, 5, dtype=torch.float64)
        way.note("loss", step(x.where(torch.arange(6).unsqueeze(1) < lengths.view(4, 1, 1), 0)))
    way.finish(model, optimizer)
