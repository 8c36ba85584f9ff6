"""Slices and elements at positions that a model counts: as in eager execution, by one program where no view remains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.driver.imperative import BATCH, SIZE, Imperative, Pair, batches

ROWS = 3 * BATCH


class Ring(Imperative):
    """A queue that is overwritten part by part, and of which rows are read, one from the end."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.linspace(-1, 1, ROWS * SIZE).view(ROWS, SIZE))
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        before = self.queue[self.at : self.at + BATCH].clone()
        self.queue[self.at : self.at + BATCH] = h.detach()
        self.at = (self.at + BATCH) % ROWS
        return self.r(h + before + self.queue[self.at].clone() * self.queue[self.at - ROWS + 1].clone())


class Windows(Imperative):
    """Columns of a result, through which gradients flow, at a position that moves; one of them is written."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 1

    def forward(self, x: Tensor) -> Tensor:
        self.at = self.at % 3 + 2
        h = self.l(x).tanh()
        part = h[:, self.at : self.at + 2]
        whole = torch.zeros_like(h)
        whole[:, self.at : self.at + 2] = part * part
        whole[:, self.at + 1] = h[:, self.at]
        return self.r(whole + h)


@pytest.mark.parametrize("model", [Ring, Windows])
def test_positions_that_move(model: Callable[[], Imperative]) -> None:
    pair = Pair(model())
    pair.train(batches(9))
    assert model is Windows or (not pair.step.breaks and len(pair.step.records) == 3)  # 0, a constant, any position
