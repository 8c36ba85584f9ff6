"""Collectives that a model calls itself, as library calls of a program: each is over when its call returns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in PyTorch 2.13
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_named(name: str) -> dist.ProcessGroup:
    """The process group with this name, as PyTorch's own collectives in graphs find it."""
    found: dist.ProcessGroup = getattr(dist.distributed_c10d, "_resolve_process_group")(name)  # noqa: B009 - private
    return found


def _group_collective(x: Tensor, kind: str, group: str, reduction: str, root: int) -> Tensor:
    """`kind` over a group, in memory of the result's own."""
    own, ranks = group_named(group), group_named(group).size()
    x = x.contiguous()
    operation: Any = getattr(dist.ReduceOp, reduction.upper())
    if kind in ("all_reduce", "broadcast"):
        found = x.clone()
        if kind == "broadcast":
            dist.broadcast(found, group=own, group_src=root)
        elif reduction == "avg" and dist.get_backend(own) == dist.Backend.GLOO:  # which has no means
            dist.all_reduce(found, group=own)
            found /= ranks
        else:
            dist.all_reduce(found, operation, group=own)
    elif kind == "all_gather":
        found = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
        _all_gather(found, x, group=own)
    elif kind == "reduce_scatter":
        found = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
        mean = reduction == "avg" and dist.get_backend(own) == dist.Backend.GLOO
        _scatter(found, x, dist.ReduceOp.SUM if mean else operation, group=own)
        if mean:
            found /= ranks
    else:
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x, group=own)
    return found


LIBRARY = torch.library.Library("daceml", "FRAGMENT")
LIBRARY.define("group_collective(Tensor x, str kind, str group, str reduction, int root) -> Tensor")
LIBRARY.impl("group_collective", _group_collective, "CPU")

__all__ = ["LIBRARY", "group_named"]
