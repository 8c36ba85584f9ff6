"""A model that `torch.distributed.fsdp.fully_shard` divided among the ranks, as a step that is one program sees it.

Each rank has rows [r S, (r + 1) S), S = ceil(n / N), of every parameter of n rows. The step's program gathers the whole
of a parameter before it is read, scatters the sums of its gradient, and updates this rank's rows with this rank's
state. What is captured is the model without PyTorch's hooks: a twin of each module over the same buffers, with whole
parameters that have memory only while they are captured.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
from torch.distributed.tensor import DTensor, Shard

from daceml_train.training.optimizers import SCALARS, initial_state, initial_value

OWN = frozenset({"_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
                 "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"})  # fmt: skip
"""Attributes of a module that its twin has for itself."""


@dataclass(eq=False)
class FullySharded:
    """A model in `fully_shard`, its twin, and the divided parameter of each whole one, by identity."""

    model: nn.Module
    group: dist.ProcessGroup
    twin: nn.Module = field(init=False)
    parameters: dict[int, DTensor] = field(default_factory=dict)
    _pairs: dict[int, tuple[nn.Module, nn.Module]] = field(default_factory=dict)
    _whole: dict[int, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.twin = self._twin_of(self.model)

    def _twin_of(self, module: nn.Module) -> nn.Module:
        if id(module) in self._pairs:
            return self._pairs[id(module)][1]
        kind = next(c for c in type(module).__mro__ if not issubclass(c, FSDPModule))
        twin: Any = object.__new__(kind)
        twin.__dict__.update(module.__dict__)
        self._pairs[id(module)] = module, twin
        for name in OWN - {"_parameters", "_modules"}:
            twin.__dict__[name] = type(module.__dict__[name])()
        twin.__dict__["_parameters"] = {name: self._whole_of(p) for name, p in module._parameters.items()}
        children = {name: None if c is None else self._twin_of(c) for name, c in module._modules.items()}
        twin.__dict__["_modules"] = children
        found: nn.Module = twin
        return found

    def _whole_of(self, parameter: Any) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in self._whole:
            whole = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
            whole.untyped_storage().resize_(0)
            self._whole[id(parameter)] = whole
            self.parameters[id(whole)] = parameter
        return self._whole[id(parameter)]

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Whole parameters have memory, which nothing reads."""
        try:
            for whole in self._whole.values():
                whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            yield
        finally:
            for whole in self._whole.values():
                whole.untyped_storage().resize_(0)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """The attributes of each module are those of its twin, before a step and after it, and so is what trains."""
        for whole in self._whole.values():
            whole.requires_grad_(self.parameters[id(whole)].requires_grad)
        for module, twin in self._pairs.values():
            _follow(twin.__dict__, module.__dict__)
        yield
        for module, twin in self._pairs.values():
            _follow(module.__dict__, twin.__dict__)

    @property
    def ids(self) -> frozenset[int]:
        """The identities of all parameters, divided and whole."""
        return frozenset((*self.parameters, *(id(p) for p in self.parameters.values())))

    def owned(self) -> bool:
        """Whether the modules have the parameters that they had, also after a call that left them whole."""
        if not self._divided():
            for module, _ in self._pairs.values():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return self._divided()

    def hooked(self) -> bool:
        """Whether a module has a hook of the user's, which its twin does not call."""
        return any(_users_hooks(module) for module, _ in self._pairs.values())

    def _divided(self) -> bool:
        every = {id(p) for module, _ in self._pairs.values() for p in module._parameters.values() if p is not None}
        return every == self._whole.keys()


def _follow(own: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in other.items():
        if name not in OWN and own.get(name, own) is not value:
            own[name] = value
    for name in [name for name in own if name not in other]:
        del own[name]


def fully_sharded(model: nn.Module) -> FullySharded | None:
    """What `fully_shard` made of a model, if a program can do the same: all parameters are divided along their first
    dimension over one mesh, on the CPU, without other types or places for them, and no hook is the user's.
    """
    if not isinstance(model, FSDPModule):
        return None
    parameters = list(model.parameters())
    meshes = {p.device_mesh for p in parameters if isinstance(p, DTensor)}
    divided = all(isinstance(p, DTensor) and p.placements == (Shard(0),) and p.ndim for p in parameters)
    if not divided or len(meshes) != 1 or (mesh := meshes.pop()).ndim != 1 or mesh.device_type != "cpu":
        return None
    for module in model.modules():
        state = _get_module_fsdp_state(module)
        if _users_hooks(module):
            return None
        for group in state._fsdp_param_groups if state is not None else ():
            policy = group.mp_policy
            types = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)
            if any(types) or isinstance(group.offload_policy, CPUOffloadPolicy):
                return None
    return FullySharded(model, mesh.get_group())


def _users_hooks(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not isinstance(getattr(hook, "__self__", None), FSDPState) for hook in hooks)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank's rows of a divided tensor, with those that pad it to equally many on all ranks; any
    other tensor itself.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local: torch.Tensor = tensor.to_local().detach()
    shape = (_rows(tensor), *tensor.shape[1:])
    if local.shape == shape:
        return local
    room = local.untyped_storage().nbytes() // local.element_size() - local.storage_offset()
    if room < math.prod(shape):
        raise RuntimeError("the rows of a parameter on this rank have no room for padding")
    return local.as_strided(shape, torch.empty(shape, device="meta").stride())


def make_state(parameter: DTensor, name: str, optimizer: torch.optim.Optimizer) -> None:
    """Make an entry of the optimizer's state as a tensor that is divided as its parameter is, with room for padding."""
    state = optimizer.state[parameter]
    if name in SCALARS:
        state.setdefault(name, initial_state(name, parameter, optimizer))
        return
    given, like = state.get(name), memory_of(parameter)
    if given is not None and isinstance(given, DTensor) and _padded(given):
        return
    rows = parameter.to_local().shape[0]
    padded = torch.full_like(like, initial_value(name, parameter, optimizer))
    if given is not None:
        padded[:rows].copy_(given.to_local() if isinstance(given, DTensor) else given)
    state[name] = DTensor.from_local(
        padded[:rows],
        parameter.device_mesh,
        [Shard(0)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _padded(tensor: DTensor) -> bool:
    try:
        memory_of(tensor)
    except RuntimeError:
        return False
    return True


def _rows(tensor: DTensor) -> int:
    return -(-tensor.shape[0] // tensor.device_mesh.size())


__all__ = ["FullySharded", "fully_sharded", "make_state", "memory_of"]
