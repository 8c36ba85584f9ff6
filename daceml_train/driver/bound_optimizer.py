"""What of an optimizer a program is bound to, compared before each run."""

from __future__ import annotations

import ctypes
import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from daceml_train.errors import Unsupported
from daceml_train.lowering.program import ProgramInput
from daceml_train.runtime.bound_plan import torch_dtype

_END = object()


class IdentityGuard:
    """Identity guard: the values of some dictionaries, compared by identity."""

    def __init__(self, dictionaries: Iterable[Mapping[Any, Any]]) -> None:
        self.dictionaries = [d for d in dictionaries if d]
        self.values = [*self._now(), _END]

    def _now(self) -> Iterable[Any]:
        return itertools.chain.from_iterable(map(dict.values, self.dictionaries))  # type: ignore[arg-type]

    def holds(self) -> bool:
        """Whether each dictionary still contains the same objects in the same order."""
        return all(map(operator.is_, itertools.chain(self._now(), (_END,)), self.values))


class _UsersHooks(Mapping[int, Any]):
    """The hooks of a table but for ours, which leave a step as it is."""

    def __init__(self, table: Mapping[int, Any]) -> None:
        self.table = table

    def __getitem__(self, key: int) -> Any:
        return self.table[key]

    def __iter__(self) -> Any:
        return (key for key, hook in self.table.items() if not getattr(hook, "of_daceml_train", False))

    def __len__(self) -> int:
        return sum(1 for _ in self)


GLOBAL_HOOKS = (_UsersHooks(_global_optimizer_pre_hooks), _UsersHooks(_global_optimizer_post_hooks))


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Mapping[int, Any]]:
    """The dictionaries of the user's hooks of an optimizer's step."""
    return [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *GLOBAL_HOOKS]


class OptimizerGuard:
    """The groups, options, parameters and state of an optimizer, and its learning rates as a program reads them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.state_object = optimizer.state
        self.same = IdentityGuard([optimizer.state, *optimizer.state.values()])
        self.groups = [(group, options(group), [*group["params"]]) for group in optimizer.param_groups]
        self.rates = (ctypes.c_double * max(len(self.groups), 1))()

    def rate_tensors(self, count: int) -> tuple[torch.Tensor, ...]:
        """The first learning rates as 0-d tensors, which `refresh` sets."""
        return torch.frombuffer(self.rates, dtype=torch.float64)[:count].unbind()

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all but the learning rates is as it was bound."""
        if optimizer.state is not self.state_object or len(optimizer.param_groups) != len(self.groups):
            return False
        for group, (bound, expected, parameters) in zip(optimizer.param_groups, self.groups, strict=True):
            if group is not bound or options(group) != expected or len(group["params"]) != len(parameters):
                return False
            if not all(map(operator.is_, group["params"], parameters)):
                return False
        return self.same.holds()

    def refresh(self) -> list[tuple[int, torch.Tensor]]:
        """Read the learning rates; those that are on a device, by group, remain to be copied there."""
        on_device = []
        for position, (group, _, _) in enumerate(self.groups):
            if isinstance(group["lr"], torch.Tensor) and group["lr"].device.type != "cpu":
                on_device.append((position, group["lr"]))  # reading it would wait for the device
            else:
                self.rates[position] = group["lr"]
        return on_device


def options(group: Mapping[str, Any]) -> list[Any]:
    """A parameter group's options, except learning rate and parameters."""
    return [v for k, v in group.items() if k != "params" and k != "lr" and k != "initial_lr"]


def same_strides(tensor: torch.Tensor, strides: Iterable[int]) -> bool:
    """Whether a tensor has these strides, where they matter."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() < 2 or all(size == 1 or a == b for size, a, b in pairs)


def check_state(entry: ProgramInput, tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
    """Raise `Unsupported` if a tensor of the optimizer's state is not the one that a program was compiled for."""
    expected = torch_dtype(entry.dtype)
    if tensor.dtype is not expected or not same_strides(tensor, strides):
        raise Unsupported(
            f"the optimizer's {entry.name} is {tensor.dtype} of strides {tensor.stride()}, expected {expected} of "
            f"strides {strides}"
        )
