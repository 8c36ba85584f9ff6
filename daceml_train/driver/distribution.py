"""A training step where several processes train: what wraps a model for them, and what a step alone does not do."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch import nn

from daceml_train.errors import Unsupported

PARALLEL = {
    "DistributedDataParallel": "reduces gradients",
    "FSDPModule": "gathers parameters and scatters gradients",
    "FullyShardedDataParallel": "gathers parameters and scatters gradients",
}
"""PyTorch's wrappers of modules for several processes, and what they do in hooks of autograd."""


def processes() -> int:
    """How many processes train together, as far as `torch.distributed` knows."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def parallel_wrapper(model: nn.Module) -> Unsupported | None:
    """Why a step of a model that PyTorch's own parallel wrappers contain is not one program."""
    for path, module in model.named_modules():
        for name in (c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.")):
            if name in PARALLEL:
                where = f"its module {path!r}" if path else "the model"
                return Unsupported(f"{where} is a {name}, which {PARALLEL[name]} in hooks of PyTorch's autograd")
    return None


def warn_of_others(model: nn.Module, stacklevel: int) -> None:
    """Warn where several processes train and nothing reduces their gradients."""
    if processes() > 1 and parallel_wrapper(model) is None:
        warnings.warn(
            f"a daceml_train training step reduces no gradients over the {processes()} processes of "
            "torch.distributed: each trains on its own; put DistributedDataParallel around daceml_train.optimize(...)",
            stacklevel=stacklevel + 1,
        )
