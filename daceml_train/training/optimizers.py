"""PyTorch's optimizers as operators: the update, its state, and how the state is bound.

The state remains in the optimizer object, under PyTorch's own names, so `state_dict()`, `load_state_dict()` and
learning-rate schedulers continue to work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daceml_train.errors import Unsupported
from daceml_train.ops.operator import Operator, Value
from daceml_train.ops.optimizer import AdagradUpdate, AdamUpdate, RMSpropUpdate, SGDUpdate


@dataclass(frozen=True)
class Update:
    """The update of one parameter group: the operator, and the names of its state in operand order."""

    op: Operator
    state: tuple[str, ...]

    def emit(self, p: Value, gradient: Value, rate: Value, state: Sequence[Value]) -> list[Value]:
        """The next parameter and the next state, in the order of `state`."""
        return list(p.builder.emit(self.op, p, gradient, rate, *state))


def update_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Update:
    """The update of a parameter group. Raises `Unsupported` for an optimizer or option without one."""
    kind = type(optimizer)
    if group.get("differentiable") or group.get("capturable"):
        raise Unsupported(f"{kind.__name__} with differentiable=True or capturable=True", advice="leave it False")
    if kind is torch.optim.SGD:
        names: tuple[str, ...] = ("momentum", "dampening", "nesterov", "weight_decay", "maximize")
        op: Operator = SGDUpdate(**{n: group[n] for n in names})
        return Update(op, ("momentum_buffer",) if group["momentum"] else ())
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        beta1, beta2 = (float(b) for b in group["betas"])
        decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
        op = AdamUpdate(
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=decoupled,
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
        )
        return Update(op, ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())))
    if kind is torch.optim.RMSprop:
        names = ("alpha", "eps", "weight_decay", "momentum", "centered", "maximize")
        state = ["step", "square_avg"]
        state += ["momentum_buffer"] if group["momentum"] > 0 else []
        state += ["grad_avg"] if group["centered"] else []
        return Update(RMSpropUpdate(**{n: group[n] for n in names}), tuple(state))
    if kind is torch.optim.Adagrad:
        names = ("lr_decay", "eps", "weight_decay", "maximize")
        return Update(AdagradUpdate(**{n: group[n] for n in names}), ("step", "sum"))
    raise Unsupported(
        f"optimizer {kind.__module__}.{kind.__name__} has no update inside the graph",
        advice="SGD, Adam, AdamW, RMSprop and Adagrad have; the step runs with PyTorch's own update",
    )


def ready(update: Update, state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state exists."""
    return all(isinstance(state.get(name), torch.Tensor) for name in update.state)


def makes_its_state(update: Update) -> bool:
    """Whether the first step creates the state, because its update differs from later ones.

    This is the case for SGD with dampening, which scales the gradient from the second step on; without it, a zero
    momentum buffer reproduces the first step exactly.
    """
    return isinstance(update.op, SGDUpdate) and bool(update.op.dampening)


def initial_state(name: str, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """An entry of a parameter's state before the first step."""
    if name == "step":
        return torch.tensor(0.0, dtype=torch.float32)
    if name == "sum":
        start = optimizer.defaults["initial_accumulator_value"]
        return torch.full_like(parameter, start, memory_format=torch.preserve_format)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)
