"""A training step where several processes train: what `mesh=` stands for, and how the ranks begin as equals."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from daceml_train import logs
from daceml_train.driver.fully_sharded import FullySharded, fully_sharded
from daceml_train.driver.store import environment
from daceml_train.errors import Invalid, Unsupported
from daceml_train.lowering.program import BufferView, CallLaunch, Program
from daceml_train.ops.collective import shard_size
from daceml_train.runtime.collectives import TARGETS
from daceml_train.runtime.ranks import RankError, Ranks
from daceml_train.training.gradients import Clipping

PARALLEL = {
    "DistributedDataParallel": "reduces gradients",
    "FSDPModule": "gathers parameters and scatters gradients",
    "FullyShardedDataParallel": "gathers parameters and scatters gradients",
}
"""PyTorch's wrappers of modules for several processes, and what they do in hooks of autograd."""

Mesh = dist.device_mesh.DeviceMesh | dist.ProcessGroup | Literal[False] | None
"""The processes that train together; see `training_step`."""

MESSAGE = 25 << 20
"""Bytes that are sent at once where parameters and buffers are made equal."""


def processes() -> int:
    """How many processes train together, as far as `torch.distributed` knows."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def parallel_wrapper(model: nn.Module) -> Unsupported | None:
    """Why a step of a model that PyTorch's own parallel wrappers contain is not one program."""
    for path, module in model.named_modules():
        for name in (c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.")):
            if name in PARALLEL:
                where = f"its module {path!r}" if path else "the model"
                return Unsupported(
                    f"{where} is a {name}, which {PARALLEL[name]} in hooks of PyTorch's autograd",
                    advice="give training_step the module itself, and mesh=",
                )
    return None


def unwrapped(
    model: nn.Module, mesh: Any, shards: bool = True
) -> tuple[nn.Module, Any, DistributedDataParallel | FullySharded | None]:
    """The model in a `DistributedDataParallel` or in `fully_shard`, the processes that it trains on, and the wrapper.

    A step takes over what the wrapper does; one with hooks of the user's, and any other model, stay as they are, and
    one in `fully_shard` unless `shards`. Raises `Invalid` if the wrapper and `mesh` are different processes.
    """
    if shards and mesh is not False and (found := fully_sharded(model)) is not None:
        _check_group(mesh, found.group, "fully_shard")
        return (found.twin, found.group, found) if found.group.size() > 1 else (model, mesh, None)
    if type(model) is not DistributedDataParallel or mesh is False:
        return model, mesh, None
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    if model._comm_hooks or model.parameters_to_ignore or any(hooks) or parallel_wrapper(model.module):
        return model, mesh, None
    group: dist.ProcessGroup = model.process_group
    _check_group(mesh, group, "DistributedDataParallel")
    return model.module, group, model


def _check_group(mesh: Any, group: dist.ProcessGroup, wrapper: str) -> None:
    given = mesh.get_group() if isinstance(mesh, dist.device_mesh.DeviceMesh) and mesh.ndim == 1 else mesh
    if given is not None and given is not group:
        raise Invalid(f"mesh= has other processes than the {wrapper} around the model")


def begin_step(wrapper: DistributedDataParallel | FullySharded | None) -> None:
    """Do what a wrapper does before a forward pass: `DistributedDataParallel` gives all ranks the buffers of rank 0.

    Raises `Invalid` in a context of the wrapper's that a step as one program does not follow.
    """
    if isinstance(wrapper, FullySharded):
        if not wrapper.owned():
            raise Invalid("a module in fully_shard has other parameters", advice="make another training_step")
        if wrapper.hooked():
            raise Invalid("a module in fully_shard has a new hook", advice="make another training_step, which calls it")
        return
    if wrapper is not None and not wrapper.require_backward_grad_sync:
        raise Invalid("no_sync() around a training step, which updates at every call", advice="use micro_batches=")
    if wrapper is not None and wrapper._join_config.enable:
        raise Invalid("join() around a training step", advice="give ranks without data an empty batch, and no join()")
    if wrapper is not None and wrapper._check_sync_bufs_pre_fwd():
        wrapper._sync_buffers()


def warn_of_others(model: nn.Module) -> None:
    """Warn where several processes train and nothing reduces their gradients."""
    if processes() > 1 and parallel_wrapper(model) is None:
        logs.warn(
            f"a daceml_train training step reduces no gradients over the {processes()} processes of "
            "torch.distributed: each trains on its own; pass mesh= (a device mesh or a process group) to train "
            "together, or mesh=False if this is meant"
        )


def ranks_of(mesh: Any, model: nn.Module) -> Ranks | None:
    """The processes of a device mesh or a process group; None for no mesh, and where this process is the only one."""
    if mesh is None or mesh is False:
        return None
    group = mesh
    if isinstance(mesh, dist.device_mesh.DeviceMesh):
        if mesh.ndim != 1:
            raise Invalid(
                f"a training step reduces gradients over a mesh of one dimension, given {mesh.ndim}",
                advice=f"name one: mesh[{(mesh.mesh_dim_names or ('dp',))[0]!r}]",
            )
        group = mesh.get_group()
    if not isinstance(group, dist.ProcessGroup):
        given = type(mesh).__name__ if mesh != dist.GroupMember.NON_GROUP_MEMBER else "one that this process is not in"
        raise Invalid(f"mesh is a device mesh or a process group, given {given}")
    if (wrapped := parallel_wrapper(model)) is not None:
        raise Invalid(wrapped.message, advice="with mesh=, give training_step the module itself")
    return Ranks(group) if group.size() > 1 else None


def begin_as_equals(
    ranks: Ranks,
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    shards: bool = False,
    divided: Iterable[int] = (),
) -> None:
    """Give all ranks the parameters, buffers and optimizer state of rank 0, but for state that is in `shards` already,
    and for parameters, given by identity, that are `divided` among them.

    Raises `RankError`, on all ranks, if their models or optimizers have other parameters or options, or if the step has
    other `options`.
    """
    with ranks.step():
        named = dict(_named(modules, optimizer))
        for name, tensor in named.items():
            if is_lazy(tensor):
                raise Invalid(f"{name} has no size yet", advice="call the model once before training_step")
        lines = [f"{name} {list(t.shape)} {t.dtype} trains={t.requires_grad}" for name, t in named.items()]
        for group in optimizer.param_groups:
            chosen = ", ".join(f"{k}={v}" for k, v in group.items() if k != "params")
            lines.append(f"{type(optimizer).__name__} of {len(group['params'])} parameters, {chosen}")
        lines += [f"{name}={value}" for name, value in options.items()]
        *versions, processor = environment().rsplit("\n", 1)  # other kernels would let equal parameters drift apart
        lines += [*versions, f"processor {hashlib.sha256(processor.encode()).hexdigest()[:12]}: {processor[-120:]}"]
        ranks.begin("\n".join(lines), 0)
        ranks.agreed()
        own = set(_shards(optimizer, ranks.size) if shards else ())
        own |= {key for parameter in divided for key in _of(optimizer, parameter)}
        equal = [t for t in named.values() if id(t) not in own]
        _send(ranks, equal)
        sums = ranks.gather(torch.tensor([_checksum(equal)], device=ranks.device)).tolist()
        if others := [rank for rank, found in enumerate(sums) if found != sums[0]]:
            named_ranks = ", ".join(map(str, others))
            raise RankError(f"parameters, buffers or state of rank {named_ranks} are not those that rank 0 sent")


def send_buffers(ranks: Ranks, module: nn.Module) -> None:
    """Give all ranks the buffers of a module on rank 0."""
    _send(ranks, module.buffers())


def _send(ranks: Ranks, tensors: Iterable[torch.Tensor]) -> None:
    """Give all ranks the values of tensors on rank 0."""
    for part in _messages(tensors):
        pieces = [t.detach().contiguous().view(-1).view(torch.uint8) for t in part]
        message = torch.cat(pieces).to(ranks.device)
        ranks.broadcast(message)
        if ranks.rank:
            for tensor, piece in zip(part, message.split([p.numel() for p in pieces]), strict=True):
                received = piece.to(tensor.device).clone().view(tensor.dtype).view(tensor.shape)
                _once(tensor.detach()).copy_(_once(received, tensor.stride()))


def _once(tensor: torch.Tensor, stride: Sequence[int] | None = None) -> torch.Tensor:
    """The first entries along the dimensions that a tensor, or one of this `stride`, is expanded along."""
    for dim, step in enumerate(tensor.stride() if stride is None else stride):
        tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim])) if step == 0 else tensor
    return tensor


def _checksum(tensors: Iterable[torch.Tensor]) -> int:
    """The CRC-32 of the bytes of tensors, one after the other."""
    found = 0
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        found = zlib.crc32(data.numpy().tobytes(), found)
    return found


def _named(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a step reads and changes, each once."""
    seen: set[int] = set()
    found: list[tuple[str, Any]] = []
    for module in modules:
        found += [*module.named_parameters(), *module.named_buffers()]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found += [(f"parameter {number} of the optimizer", p) for number, p in enumerate(parameters)]
    for number, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        found += [(f"{name} of parameter {number}", value) for name, value in state.items()]
    for name, value in found:
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _shards(optimizer: torch.optim.Optimizer, ranks: int) -> frozenset[int]:
    """The identities of those tensors of an optimizer's state that are shards."""
    found = set()
    for parameter, state in optimizer.state.items():
        size = shard_size(parameter.shape, ranks)
        found |= {
            id(v) for v in state.values() if isinstance(v, torch.Tensor) and v.shape == (size,) != parameter.shape
        }
    return frozenset(found)


def _of(optimizer: torch.optim.Optimizer, key: int) -> set[int]:
    """The identities of a parameter and of its state, but for numbers of steps."""
    states = (state for parameter, state in optimizer.state.items() if id(parameter) == key)
    return {key, *(id(v) for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.ndim)}


def _messages(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    part: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if part and size + tensor.nbytes > MESSAGE:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.nbytes
    if part:
        yield part


def described(program: Program, trained: Sequence[str], options: Iterable[str]) -> str:
    """What all ranks must have in common: options, the parameters that a program updates, its collectives in order."""
    inputs = {entry.name: entry for entry in program.inputs}
    lines = [*options]
    lines += [f"{inputs[name].path or name} {list(inputs[name].shape)}" for name in trained]
    for launch in program.launches:
        if isinstance(launch, CallLaunch) and launch.target in TARGETS:
            name, (first, *others) = launch.target.partition("::")[2], launch.arguments
            if name == "await":  # when a rank waits is its own affair
                continue
            views = first if isinstance(first, tuple) else (first,)
            numbers = " ".join(str(other) for other in others if not isinstance(other, BufferView))
            # how many rows a rank adds to a table is its own affair
            views = views[::2] if name == "sum_rows" else views
            if name == "return_rows":
                lines.append(f"{name} {numbers}")
                continue
            shapes = ", ".join(str(list(x.shape)[-1:] if name == "sum_rows" else list(x.shape)) for x in views)
            lines.append(f"{name} {numbers} of {shapes} {views[0].dtype.name}")
    return "\n".join(lines)


def reduce_in_pieces(
    ranks: Ranks,
    parameters: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    clipping: Clipping,
    rows: int,
    changed: Sequence[int] = (),
) -> None:
    """Replace the gradients of parameters by their means over all ranks, which must update them in one way.

    Raises `RankError`, on all ranks, if the model has `changed` parameters, by number, in different ways.
    """
    numbered = [(number, p.grad) for number, p in enumerate(parameters) if p.grad is not None]
    if any(grad.layout is not torch.strided for _, grad in numbered):
        raise Invalid("mesh= reduces dense gradients, and one is sparse", advice="make the embedding with sparse=False")
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    numbers = f"{clipping} {groups}"
    lines = [f"gradient {number} {list(grad.shape)}" for number, grad in numbered]
    lines += [f"the model changes parameter {number} {list(parameters[number].shape)}" for number in changed]
    if not rows:
        raise Unsupported("a rank without data takes part in a step that is one program, and this one runs in pieces")
    ranks.begin("\n".join(["a step in pieces, see its `breaks`", *lines]), rows, numbers.encode())
    if changed:
        ranks.agreed()
        sums = ranks.gather(torch.tensor([_checksum([parameters[n]]) for n in changed], device=ranks.device))
        for number, own in zip(changed, sums.view(ranks.size, -1).t().tolist(), strict=True):
            if len(set(own)) > 1:
                what = f"the model changes parameter {number} {list(parameters[number].shape)} by its batch"
                raise RankError(f"{what}, and ranks drift apart; change it between steps, on all ranks")
    for _, grad in numbered:
        grad.copy_(ranks.mean(grad))


def check_loaded(state: Mapping[str, Any], groups: int, entries: Iterable[tuple[str, str]]) -> None:
    """Raise `Invalid` for a checkpoint without something that a step loads: options of so many groups of parameters,
    and the `entries` of the optimizer's state, each by the names of its parameter and its own.
    """
    for part in ("model", "state", "options"):
        if part not in state:
            raise Invalid(f"a training step loads what its state_dict() returned, and {part!r} is missing")
    if (given := len(state["options"])) != groups:
        raise Invalid(f"the optimizer has {groups} groups of parameters, and what is loaded has {given}")
    for parameter, name in entries:
        if name not in state["state"].get(parameter, {}):
            advice = "load what a step with this optimizer has saved"
            raise Invalid(f"what is loaded has no {name} of {parameter}", advice=advice)


def rows_of(flat: Sequence[Any]) -> int:
    """The rows of a batch: the size of its first tensor along the first dimension; 1 if it has none."""
    return next((leaf.shape[0] for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.ndim), 1)
