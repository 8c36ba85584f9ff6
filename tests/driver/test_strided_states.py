"""States that are kept as views with gaps or repeated elements: one program reads them, as in eager execution."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt

pytestmark = pytest.mark.compiled


class Remembering(nn.Module):
    """Attention to the last positions of earlier calls, kept in one of several ways."""

    def __init__(self, kept: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.query, self.key, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.kept, self.memory = kept, torch.zeros(3, 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.query(x))
        seen = torch.cat([self.memory, h], 1)
        result: Tensor = self.last(torch.softmax(h @ self.key(seen).transpose(1, 2), -1) @ seen)
        self.memory = self.kept(seen).detach()
        return result


class Sharing(nn.Module):
    """A state that is a view with gaps of a buffer which each call changes before it reads the view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("counts", torch.zeros(16))
        self.every_other = self.counts[::2]

    def forward(self, x: Tensor) -> Tensor:
        self.counts.add_(1)
        return self.layer(x + self.every_other)


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda m: m[:, -4:],
    "gaps": lambda m: m[:, ::2][:, :4],
    "repeated": lambda m: m[:, -1:].expand(3, 4, 8),
}


def _trained(model: nn.Module, way: str) -> tuple[Callable[[Tensor, Tensor], Tensor], Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if way == "step":
        step = dt.training_step(model, nn.functional.mse_loss, optimizer)
        return step, step
    called = model if way == "eager" else dt.optimize(model)

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(called(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return train, called


@pytest.mark.parametrize("way", ["step", "optimize"])
@pytest.mark.parametrize("kept", KEPT)
def test_a_state_that_is_a_view(kept: str, way: str) -> None:
    torch.manual_seed(0)
    ours = Remembering(KEPT[kept])
    theirs = copy.deepcopy(ours)
    (train, step), (eager, _) = _trained(ours, way), _trained(theirs, "eager")
    for _ in range(6):
        x, y = torch.randn(3, 6, 8), torch.randn(3, 6, 4)
        torch.testing.assert_close(train(x, y).detach(), eager(x, y))
        torch.testing.assert_close(ours.memory, theirs.memory)
        ours.memory[0, 0].mul_(0.5), theirs.memory[0, 0].mul_(0.5)  # the user's, in place
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    if way == "step":
        assert not step.breaks


def test_a_view_of_a_buffer_that_changes() -> None:
    torch.manual_seed(0)
    ours = Sharing()
    theirs = copy.deepcopy(ours)
    (train, _), (eager, _) = _trained(ours, "step"), _trained(theirs, "eager")
    for _ in range(4):
        x, y = torch.randn(3, 8), torch.randn(3, 4)
        torch.testing.assert_close(train(x, y), eager(x, y))
    torch.testing.assert_close(ours.every_other, theirs.every_other)
