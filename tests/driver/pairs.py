"""A model trained by PyTorch and by a training step, side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from tests.driver.conformity import assert_tensors_conform, distance

Change = Callable[[nn.Module, torch.optim.Optimizer], None]


class Pair:
    """A step on one copy of a model, and PyTorch's loop on another; `step` holds them to each other."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        loss: Any = F.mse_loss,
        keep_gradients: bool = False,
        **options: Any,
    ) -> None:
        options.setdefault("lr", 0.05)
        self.loss, self.own_loss = (loss, copy.deepcopy(loss)) if isinstance(loss, nn.Module) else (loss, loss)
        self.theirs, self.ours = model, copy.deepcopy(model)
        further = [list(x.parameters()) if isinstance(x, nn.Module) else [] for x in (self.loss, self.own_loss)]
        self.their_optimizer = optimizer([*self.theirs.parameters(), *further[0]], **options)
        self.our_optimizer = optimizer([*self.ours.parameters(), *further[1]], **options)
        self.call = dt.training_step(self.ours, self.own_loss, self.our_optimizer, keep_gradients=keep_gradients)

    def both(self, change: Change) -> None:
        change(self.theirs, self.their_optimizer)
        change(self.ours, self.our_optimizer)

    def step(self, inputs: Any, *targets: Any) -> Tensor:
        self.their_optimizer.zero_grad()
        if isinstance(inputs, dict):
            output = self.theirs(**inputs)
        else:
            output = self.theirs(*inputs) if isinstance(inputs, tuple | list) else self.theirs(inputs)
        loss = self.loss(output, *targets) if self.loss is not None else output.loss
        loss.backward()
        self.their_optimizer.step()
        found = self.call(inputs, *targets)
        assert found.shape == () and not found.requires_grad
        assert distance(found, loss) < 1e-4
        self.compare()
        return found

    def compare(self) -> None:
        theirs = dict(self.theirs.state_dict())
        assert_tensors_conform(self.ours.state_dict(), theirs, theirs, 2e-4)
        ours, expected = self.our_optimizer.state_dict(), self.their_optimizer.state_dict()
        assert ours["param_groups"] == expected["param_groups"]
        assert ours["state"].keys() == expected["state"].keys()
        for key, entry in expected["state"].items():
            tensors = {n: t for n, t in entry.items() if isinstance(t, Tensor)}
            assert_tensors_conform({n: ours["state"][key][n] for n in tensors}, tensors, tensors, 1e-3)

    def whole(self) -> None:
        """Everything ran as one program."""
        assert self.call.breaks == [] and self.call.pieces is None


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randn(size, 4)
