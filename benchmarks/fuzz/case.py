"""A random model as text, with all that decides how it is trained."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fuzz.drawing import Layer

LOSSES = ("cross_entropy", "cross_entropy", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss")
OPTIMIZERS = (
    "SGD(p, lr=0.05)",
    "SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01)",
    "SGD(p, lr=0.02, momentum=0.9, nesterov=True)",
    "SGD(p, lr=0.02, momentum=0.9, dampening=0.3)",
    "Adam(p, lr=1e-3, eps=1e-3, weight_decay=0.01)",
    "Adam(p, lr=1e-3, eps=1e-3)",
    "AdamW(p, lr=1e-3, eps=1e-3, amsgrad=True)",
    "AdamW(p, lr=1e-3, eps=1e-3, weight_decay=0.1)",
    "Adadelta(p, lr=0.1, eps=1e-3)",
    "Adamax(p, lr=1e-3, eps=1e-2)",
    "NAdam(p, lr=1e-3, eps=1e-3, weight_decay=0.01)",
    "RAdam(p, lr=1e-3, eps=1e-3, betas=(0.9, 0.6))",
    "ASGD(p, lr=0.02, t0=1, lambd=0.01)",
)


class Straight(torch.autograd.Function):
    """Signs, with the derivative of the identity near zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """See the class."""
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """See the class."""
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1)


class Twice(torch.autograd.Function):
    """Twice `x`, with a derivative of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """See the class."""
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """See the class."""
        return g * ctx.factor, None


@dataclass(frozen=True)
class Case:
    """A model with all that decides how it is trained; `sizes` are the batch sizes of the first and the last step.

    `results` are values on the way that the model returns beside its output: (number of the layer before which it
    stands, whether the loss uses it). `dynamic` is the option of that name; `backend`: calls go through
    `torch.compile`; `unlimited`: passes that leave small arrays alone leave none alone.
    """

    seed: int
    layers: tuple[Layer, ...]
    shape: tuple[int, ...]
    tokens: bool = False
    channels_last: bool = False
    loss: str = "mse_loss"
    optimizer: str = OPTIMIZERS[0]
    sizes: tuple[int, int] = (3, 4)
    threads: int = 1
    without: tuple[str, ...] = ()
    results: tuple[tuple[int, bool], ...] = ()
    dynamic: bool | None = None
    backend: bool = False
    unlimited: bool = False

    def model(self) -> str:
        """The source of the model."""
        lines = [line.replace("{n}", str(i)) for i, layer in enumerate(self.layers) for line in layer.init]
        text = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        text += [f"        {line}" for line in lines] + ["", "    def forward(self, h):"]
        body = [layer.forward.replace("{n}", str(i)) for i, layer in enumerate(self.layers)]
        returned = [f"a{i}" for i, _ in self.results]
        used = {*re.findall(r"\ba\d+\b", "\n".join(body)), *returned}
        for i, line in enumerate(body):
            text += [f"        a{i} = h"] if f"a{i}" in used else []
            text += [f"        {line}"]
        return "\n".join([*text, f"        return {', '.join(['h', *returned])}", ""])

    def objective(self, result: Any, target: Tensor) -> Tensor:
        """The loss of the output, and of those other results that it uses."""
        output, *others = result if self.results else (result,)
        loss: Tensor = getattr(F, self.loss)(output, target)
        for (_, used), other in zip(self.results, others, strict=True):
            if used and other.is_floating_point():
                loss = loss + 0.1 * other.square().mean().to(loss.dtype)
        return loss

    def built(self) -> nn.Module:
        """The model, in float32."""
        scope: dict[str, Any] = {
            "torch": torch,
            "nn": nn,
            "F": F,
            "functools": functools,
            "Straight": Straight,
            "Twice": Twice,
        }
        exec(self.model(), scope)
        torch.manual_seed(self.seed)
        model = scope["Model"]()
        assert isinstance(model, nn.Module)
        return model

    def inputs(self, number: int) -> Tensor:
        """The batch of a step; the last step's has the other size."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        shape = (self.sizes[number == 3], *self.shape)
        if self.tokens:
            return torch.randint(0, 7, shape, generator=generator)
        x = torch.randn(shape, generator=generator)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def target(self, output: Tensor, number: int) -> Tensor:
        """A target that fits the loss."""
        generator = torch.Generator().manual_seed(77 * self.seed + number)
        if self.loss == "cross_entropy":
            rank = output.dim() > 1
            shape = (output.shape[0], *output.shape[2:]) if rank else ()
            return torch.randint(0, output.shape[1 if rank else 0], shape, generator=generator)
        target = torch.randn(output.shape, generator=generator)
        return (target > 0).float() if "binary" in self.loss else target

    def script(self) -> str:
        """A program that shows the failure."""
        return "\n".join(
            [
                "# PYTHONPATH=. python THIS_FILE",
                "from benchmarks.fuzz import Case, Layer, check",
                *(f"# {line}" for line in self.model().splitlines()),
                f"print(check({self!r}))",
            ]
        )
