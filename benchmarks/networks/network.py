"""Network: how to make a model, its batch, its loss and its optimizer, equally each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """All that a training step needs."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    loss: Loss
    optimizer: torch.optim.Optimizer

    def step(self) -> Tensor:
        """One training step as users write it; the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@dataclass(frozen=True)
class Network:
    """A row of the table; the functions draw from PyTorch's generator, which `build` seeds.

    `images` says that inputs and weights have a channels-last layout that PyTorch may prefer.
    """

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Loss
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    images: bool = False

    def build(self, *, channels_last: bool = False, fused: bool = False, double: bool = False) -> Problem:
        """The problem, with equal numbers at each call.

        `channels_last` lays images and weights out that way, `fused` takes PyTorch's fused update, `double` computes
        in float64.
        """
        torch.manual_seed(0)
        model = self.model().train()
        inputs, targets = self.batch()
        if double:
            model = model.double()
            inputs = inputs.double() if inputs.is_floating_point() else inputs
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        options = self.options | ({"fused": True} if fused else {})
        parameters: Iterable[nn.Parameter] = model.parameters()
        return Problem(model, inputs, targets, self.loss, self.optimizer(parameters, **options))
