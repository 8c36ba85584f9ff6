"""Recipes: optimizers as users write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from benchmarks.recipes.way import Way, small, train


def recipes() -> Iterator[tuple[str, Callable[[Way], None]]]:
    """All of them, by name."""
    for kind in (Lion, Lamb, Coupled, Remembering, Counting, Foreach, Orthogonal, AsPyTorchs, Lookahead, Looking):
        yield f"optimizer of a user {kind.__name__}", _trained(kind)


def _trained(kind: Any) -> Callable[[Way], None]:
    def recipe(way: Way) -> None:
        model = small()
        train(way, model, kind(model.parameters()))

    return recipe


class Lion(Optimizer):
    """The sign of a moving average (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023)."""

    def __init__(
        self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                average, (beta1, beta2) = state["exp_avg"], group["betas"]
                p.add_((average * beta1 + p.grad * (1 - beta1)).sign_(), alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


class Lamb(Optimizer):
    """Steps are Python integers, corrections are computed by `math`, and gradients are on."""

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "decay": decay})

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient, state = p.grad.data, self.state[p]
                if gradient.is_sparse:
                    raise RuntimeError("sparse gradients")
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                beta1, beta2 = group["betas"]
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                corrections = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
                size = group["lr"] * math.sqrt(corrections[1]) / corrections[0]
                update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add(group["eps"])
                if group["decay"] != 0:
                    update.add_(p.data, alpha=group["decay"])
                norms = p.data.pow(2).sum().sqrt().clamp(0, 10), update.pow(2).sum().sqrt()
                trust = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], torch.ones_like(norms[0]))
                p.data.add_(update * trust * -size)


class Coupled(Optimizer):
    """The norm of all gradients scales the update of each parameter; there is no state."""

    def __init__(self, params: Any, lr: float = 0.1, bound: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "bound": bound})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            total = torch.sqrt(sum((p.grad**2).sum() for p in found))
            scale = torch.clamp(group["bound"] / (total + 1e-6), max=1.0)
            for p in found:
                p.sub_(group["lr"] * scale * p.grad)


class Remembering(Optimizer):
    """The state holds the last gradient, another tensor at each step."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                last = self.state[p].get("last")
                if last is None:
                    last = torch.zeros_like(p)
                p.sub_(group["lr"] * (2 * p.grad - last))
                self.state[p]["last"] = p.grad.clone()


class Counting(Optimizer):
    """A counter in the group, one in the optimizer, and a float that each step changes."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "power": 1.0})
        self.calls = 0

    @torch.no_grad()
    def step(self) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["count"] += 1
            group["power"] *= 0.9
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * group["power"] / math.sqrt(group["count"] + self.calls))


class Foreach(Optimizer):
    """Momentum by PyTorch's functions of lists."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if "buffer" not in self.state[p]:
                    self.state[p]["buffer"] = torch.zeros_like(p)
            buffers = [self.state[p]["buffer"] for p in parameters]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, [p.grad for p in parameters])
            torch._foreach_add_(parameters, buffers, alpha=-group["lr"])


class Orthogonal(Optimizer):
    """Newton-Schulz iterations on the momentum of matrices, as Muon has them, and steps in tensors."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["buffer"], state["step"] = torch.zeros_like(p), torch.zeros(())
                state["step"] += 1
                update = state["buffer"].lerp_(p.grad, 0.1) / (1 - 0.9 ** state["step"].to(p.dtype))
                if p.ndim == 2:
                    update = update / (update.norm() + 1e-7)
                    for _ in range(3):
                        square = update @ update.T
                        update = 1.5 * update - 0.5 * square @ update
                p.sub_(update, alpha=group["lr"])


class AsPyTorchs(Optimizer):
    """A state made by `_init_group`, and an option `capturable`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "capturable": False})

    def _init_group(self, group: Any, parameters: list[Any], buffers: list[Any]) -> None:
        for p in group["params"]:
            if p.grad is not None:
                parameters.append(p)
                if "buffer" not in self.state[p]:
                    self.state[p]["buffer"] = torch.zeros_like(p)
                buffers.append(self.state[p]["buffer"])

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters: list[Any] = []
            buffers: list[Any] = []
            self._init_group(group, parameters, buffers)
            for p, buffer in zip(parameters, buffers, strict=True):
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(buffer, alpha=group["lr"] * (10 if group["capturable"] else 1))


class Lookahead(Optimizer):
    """Around one of PyTorch's."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        parameters = list(params)
        super().__init__(parameters, {"lr": lr})
        self.inner = torch.optim.Adam(parameters, lr=lr)
        self.slow = [p.detach().clone() for p in parameters]
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class Looking(Optimizer):
    """A branch on a value of a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.abs().max() > 0.1:
                    p.sub_(p.grad, alpha=group["lr"])


class Replacing(Optimizer):
    """Assigns `data`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad
