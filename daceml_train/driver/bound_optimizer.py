"""What of an optimizer a program is bound to, compared before each run."""

from __future__ import annotations

import ctypes
import operator
import re
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from daceml_train.driver.binding import copied
from daceml_train.errors import Unsupported
from daceml_train.lowering.program import ProgramInput
from daceml_train.runtime.native_guards import IdentityGuard
from daceml_train.runtime.torch_types import torch_dtype
from daceml_train.training.distribution import WEIGHT
from daceml_train.training.joint import OF_STEP
from daceml_train.training.optimizers import option_source


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


GLOBAL_TABLES: tuple[dict[int, Any], ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
GLOBAL_HOOKS = (_UsersHooks(_global_optimizer_pre_hooks), _UsersHooks(_global_optimizer_post_hooks))


def global_hooks() -> bool:
    """Whether the user has a hook of all optimizers."""
    return any(GLOBAL_TABLES) and any(GLOBAL_HOOKS)


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Mapping[int, Any]]:
    """The dictionaries of the user's hooks of an optimizer's step."""
    return [*own_step_hooks(optimizer), *GLOBAL_HOOKS]


def changed_step(optimizer: torch.optim.Optimizer) -> str:
    """Why a call of an optimizer's `step` is more than its update; nothing if it is not."""
    if any(step_hooks(optimizer)):
        return "the optimizer has a hook around its step"
    own = vars(optimizer).get("step")
    if own is None or (hasattr(own, "_wrapped_by_lr_sched") and own.__wrapped__ is type(optimizer).step):
        return ""  # as it was, or with the counter of a scheduler
    return "the optimizer's step is another function than that of its class"


def own_step_hooks(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """The dictionaries of the hooks of this optimizer's step alone."""
    return [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]


class OptimizerGuard:
    """The groups, options, parameters and state of an optimizer, and its hyper-parameters as a program reads them.

    `hyperparameters` are those that a program reads at each call, as `StepInterface` names them; `bounds` has
    those that belong to the step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        hyperparameters: Sequence[tuple[int, str]],
        bounds: Mapping[str, float] = types.MappingProxyType({}),
    ) -> None:
        self.state_object = optimizer.state
        parameters = [group["params"] for group in optimizer.param_groups]
        self.same = IdentityGuard([optimizer.state, *optimizer.state.values(), *parameters])
        sources = [(group, *option_source(name)) for group, name in hyperparameters]
        self.groups = []
        """Per group the keys of what is read at each call, the other options, and the parameters."""
        for position, group in enumerate(optimizer.param_groups):
            read = frozenset({"params", "initial_lr", "lr", *(key for index, key, _ in sources if index == position)})
            self.groups.append((group, read, options(group, read), [*group["params"]]))
        self.kept: Sequence[Any] = self.same.values
        """The objects that `holds` compares."""
        self.right: IdentityGuard | None = None
        """The parameters and options that `holds` last found right: the same objects need no second look."""
        self._right_groups: Any = None
        owners: dict[int, Mapping[str, Any]] = {**dict(enumerate(optimizer.param_groups)), OF_STEP: bounds}
        self.read = [(_NO_WEIGHT if key == WEIGHT else owners[index], key, place) for index, key, place in sources]
        self.values = (ctypes.c_double * max(len(self.read), 1))()
        self.tensors = torch.frombuffer(self.values, dtype=torch.float64)[: len(self.read)].unbind()
        """The hyper-parameters as 0-d tensors, which `refresh` sets."""

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all is as it was bound but the hyper-parameters that are read at each call."""
        if optimizer.state is not self.state_object:
            return False
        groups = optimizer.param_groups
        if self.right is None or groups is not self._right_groups or not self.right.holds():
            if not self._same_groups(groups) or not self.same_options():
                return False
            lists = any(isinstance(v, list) for g in groups for k, v in g.items() if k != "params")
            every = [groups, *groups, *(group["params"] for group in groups)]
            self.right = None if lists else IdentityGuard(every, free=_FREE - {"params"})  # a list may change in place
            self._right_groups = groups
        return bool(self.same.holds())

    def _same_groups(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the groups are those that were bound, with the same parameters."""
        if len(groups) != len(self.groups):
            return False
        for group, (bound, _, _, parameters) in zip(groups, self.groups, strict=True):
            if group is not bound or len(group["params"]) != len(parameters):
                return False
            if not all(map(operator.is_, group["params"], parameters)):
                return False
        return True

    def refresh(self) -> list[tuple[int, torch.Tensor]]:
        """Read the hyper-parameters; those on a device, with their positions, remain to be copied there."""
        on_device = []
        for position, (group, key, place) in enumerate(self.read):
            value = group[key] if place is None else group[key][place]
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                on_device.append((position, value))  # reading it would wait for the device
            else:
                self.values[position] = value
        return on_device

    def in_state(self, source: str) -> tuple[str, Sequence[Any]]:
        """An expression of the captured code as one that reads a list `S` of the states, and that list."""
        return source, ()

    def same_options(self) -> bool:
        """Whether the options that a program was compiled for are as they were."""
        return all(options(group, read) == expected for group, read, expected, _ in self.groups)


class UserOptimizerGuard(OptimizerGuard):
    """What is compared of an optimizer whose step TorchDynamo traced, so that its guards hold the options.

    Entries of the state under the names `unstable` are other objects at each step, which guards of their own follow.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        hyperparameters: Sequence[tuple[int, str]],
        bounds: Mapping[str, float],
        unstable: Collection[str],
    ) -> None:
        super().__init__(optimizer, hyperparameters, bounds)
        self.states = list(optimizer.state.values())
        self.groups_object = groups = optimizer.param_groups
        plain = [state for state in self.states if isinstance(state, dict)]
        containers: list[Any] = [optimizer.state, *plain, groups, *(group["params"] for group in groups)]
        self.same = IdentityGuard(containers, free=unstable)
        moving = {id(state[name]) for state in plain for name in unstable if name in state}
        self.kept = [value for value in self.same.values if id(value) not in moving]

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer.state is not self.state_object or optimizer.param_groups is not self.groups_object:
            return False
        return bool(self.same.holds())

    def in_state(self, source: str) -> tuple[str, Sequence[Any]]:
        return _IN_STATE.sub(r"S[\1]", source), self.states


_IN_STATE = re.compile(r"L\['self'\]\.optimizer\.state\[list\(dict\.keys\(L\['self'\]\.optimizer\.state\)\)\[(\d+)\]\]")


def unstable_state(optimizer: torch.optim.Optimizer, before: Mapping[int, Mapping[Any, Any]]) -> set[str]:
    """The names of state whose objects differ from those `before` a step, by the identity of a parameter's state."""
    held = [(state, before.get(id(state), {})) for state in optimizer.state.values() if isinstance(state, dict)]
    return {name for state, old in held for name, value in state.items() if name in old and value is not old[name]}


def options(group: Mapping[str, Any], read: Collection[str]) -> list[Any]:
    """A parameter group's options; of those that are read at each call only whether they are positive."""
    fixed = [v for k, v in group.items() if k not in read]
    return fixed + [_positive(group[k]) for k in read if k in group and k not in _FREE]


_NO_WEIGHT: Mapping[str, Any] = {WEIGHT: 0.0}
"""A rank's weight is set after its other hyper-parameters are compared with those of the other ranks."""

_FREE = frozenset({"params", "lr", "initial_lr"})


def _positive(value: Any) -> Any:
    """True for a positive number, of which a program knows no more; any other value is part of the program."""
    if isinstance(value, tuple | list):
        return [_positive(entry) for entry in value]
    return value if isinstance(value, torch.Tensor) else value > 0 or value


def same_strides(tensor: torch.Tensor, strides: Iterable[int]) -> bool:
    """Whether a tensor has these strides, where they matter."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() < 2 or all(size == 1 or a == b for size, a, b in pairs)


def is_unresolved(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are not those in its memory: conjugated, negated, or zeros without memory."""
    return tensor.is_neg() or tensor.is_conj() or torch._is_zerotensor(tensor)


def in_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor, or a copy of it, in these strides; elements along a stride of zero have to be equal."""
    if same_strides(tensor, strides) and not is_unresolved(tensor):
        return tensor
    return copied(tensor, strides)


def check_state(entry: ProgramInput, tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
    """Raise `Unsupported` if a tensor of the optimizer's state is not the one that a program was compiled for."""
    expected = torch_dtype(entry.dtype)
    if tensor.dtype is not expected or not same_strides(tensor, strides):
        raise Unsupported(
            f"the optimizer's {entry.name} is {tensor.dtype} of strides {tensor.stride()}, expected {expected} of "
            f"strides {strides}"
        )
