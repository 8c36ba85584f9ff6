"""Network: how to create a model, its batch, its loss and its optimizer, equal each time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
Inputs = Tensor | tuple[Tensor, ...]
Make = Callable[[], nn.Module]
Batch = Callable[[], tuple[Inputs, Tensor]]


@dataclass(frozen=True)
class Problem:
    """All that a training step needs; a model of several inputs has a tuple of them."""

    model: nn.Module
    inputs: Inputs
    targets: Tensor
    loss: Loss
    optimizer: torch.optim.Optimizer

    def objective(self) -> Tensor:
        """The loss of the batch, for a backward pass."""
        inputs = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)
        return self.loss(self.model(*inputs), self.targets)

    def autocast(self) -> Problem:
        """The same with the model in mixed precision as PyTorch's users write it, and the loss in float32."""
        return replace(self, model=_Autocast(self.model), loss=functools.partial(_in_float32, self.loss))

    def step(self) -> Tensor:
        """One training step as users write it; the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.objective()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@dataclass(frozen=True)
class Network:
    """A row of the table; the functions draw from PyTorch's generator, which `build` seeds.

    `images` says that inputs and weights have a channels-last layout that PyTorch may prefer. `small` makes the same
    architecture and a batch of it in a size for tests.
    """

    title: str
    model: Make
    batch: Batch
    loss: Loss
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    images: bool = False
    small: tuple[Make, Batch] | None = None

    def build(
        self,
        *,
        small: bool = False,
        channels_last: bool = False,
        fused: bool = False,
        double: bool = False,
        dropout: bool = True,
    ) -> Problem:
        """The problem, with equal numbers at each call.

        `channels_last` lays images and weights out that way, `fused` takes PyTorch's fused update where it takes the
        model's gradients, `double` computes in float64, `dropout=False` lets all numbers through, so that streams of
        random numbers do not matter.
        """
        torch.manual_seed(0)
        make, draw = (self.model, self.batch) if not small or self.small is None else self.small
        model = make().train()
        given, targets = draw()
        inputs = given if isinstance(given, tuple) else (given,)
        if not dropout:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        if double:
            model = model.double()
            inputs, targets = tuple(_double(x) for x in inputs), _double(targets)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            inputs = tuple(x.contiguous(memory_format=torch.channels_last) for x in inputs)
        sparse = any(getattr(module, "sparse", False) for module in model.modules())  # which no fused update takes
        options = self.options | ({"fused": True} if fused and not sparse else {})
        parameters: Iterable[nn.Parameter] = model.parameters()
        result = self.optimizer(parameters, **options)
        return Problem(model, inputs if isinstance(given, tuple) else inputs[0], targets, self.loss, result)


class _Autocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result: Tensor = self.model(*inputs)
        return result


def _in_float32(loss: Loss, output: Tensor, targets: Tensor) -> Tensor:
    return loss(output.float(), targets)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
