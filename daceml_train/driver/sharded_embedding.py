"""An embedding whose table is divided among the ranks of a mesh: none of them has the whole of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from daceml_train.errors import Invalid
from daceml_train.ops.divided_tables import rows_on_rank
from daceml_train.runtime.divided_tables import Request, Send, sending
from daceml_train.runtime.group_collectives import group_named


class ShardedEmbedding(nn.Module):
    """`nn.Embedding(rows, columns)` of which each of N ranks has S = ceil(rows / N) rows: row i is on rank i // S.

    All ranks call it together, each with indices of its own. A row is sent where it is read, and its gradient back to
    the rank that has the row, equal indices once. In `training_step(..., mesh=)` with the same ranks, that is part of
    the program, and gradients are means as those of all parameters are. Elsewhere PyTorch runs it; gradients are then
    the sums over the ranks. `weight` is this rank's part, float [ceil(rows / N), columns].
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        mesh: Any,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = mesh.get_group() if isinstance(mesh, dist.device_mesh.DeviceMesh) else mesh
        if not isinstance(group, dist.ProcessGroup):
            raise Invalid(f"a ShardedEmbedding has a device mesh or a process group, given {type(mesh).__name__}")
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in (rows, columns)):
            raise Invalid(f"a table has a positive number of rows and columns, given {rows!r} and {columns!r}")
        self.rows, self.columns, self.group_name, self.ranks = rows, columns, group.group_name, group.size()
        length = rows_on_rank(rows, self.ranks)
        self.weight = nn.Parameter(torch.empty(length, columns, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the table."""
        return group_named(self.group_name)

    def reset_parameters(self) -> None:
        """Normal deviates, other ones on each rank: the seed is drawn from PyTorch's generator, and the rank added."""
        seed = int(torch.randint(2**62, ())) + self.group.rank()
        with torch.no_grad():
            self.weight.normal_(generator=torch.Generator(self.weight.device).manual_seed(seed))

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, mesh: Any) -> ShardedEmbedding:
        """This rank's part of a table that all ranks have."""
        given = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
        if other := [name for name, value in given.items() if getattr(embedding, name) != value]:
            raise Invalid(f"a ShardedEmbedding has no {other[0]}")
        rows, columns = embedding.weight.shape
        found = cls(rows, columns, mesh, device=embedding.weight.device, dtype=embedding.weight.dtype)
        start = found.group.rank() * found.weight.shape[0]
        own = embedding.weight.detach()[start : start + found.weight.shape[0]]
        with torch.no_grad():
            found.weight.zero_()[: len(own)] = own
        found.weight.requires_grad_(embedding.weight.requires_grad)
        return found

    def forward(self, indices: Tensor) -> Tensor:
        """The rows with these indices: int64 or int32 [...] in 0..rows-1, result [..., columns]."""
        if indices.dtype not in (torch.int64, torch.int32):
            raise Invalid(f"a ShardedEmbedding is read at int64 or int32 indices, given {indices.dtype}")
        indices = indices.long()
        found: Tensor = torch.ops.daceml_train.lookup_rows(self.weight, indices, self.rows, self.ranks, self.group_name)
        return found

    def whole(self, part: Tensor | None = None) -> DTensor:
        """The table, or what is divided as it is, as one tensor of all ranks; for `torch.distributed.checkpoint`."""
        part = self.weight.detach() if part is None else part
        mesh = dist.device_mesh.DeviceMesh.from_group(self.group, part.device.type)
        start = self.group.rank() * part.shape[0]
        own = part[: max(0, min(part.shape[0], self.rows - start))]
        shape, stride = torch.Size((self.rows, self.columns)), (self.columns, 1)
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def extra_repr(self) -> str:
        """Its sizes, for `print`."""
        return f"{self.rows}, {self.columns}, {self.weight.shape[0]} rows on each of {self.ranks} ranks"


def sharded_embeddings(*modules: Any) -> dict[int, ShardedEmbedding]:
    """The embeddings among the parts of modules, by the identity of their parameter."""
    parts = (part for module in modules if isinstance(module, nn.Module) for part in module.modules())
    return {id(part.weight): part for part in parts if isinstance(part, ShardedEmbedding)}


def _send(group: str) -> tuple[dist.ProcessGroup, Send]:
    found = group_named(group)
    return found, sending(found, lambda work: work.wait())


@torch.library.custom_op("daceml_train::lookup_rows", mutates_args=())
def _lookup(table: Tensor, indices: Tensor, rows: int, ranks: int, group: str) -> Tensor:
    own, send = _send(group)
    return Request.of(indices, rows, ranks, own.rank(), send).rows(table, indices.shape, send)


@torch.library.custom_op("daceml_train::return_rows", mutates_args=())
def _return(grad: Tensor, indices: Tensor, rows: int, ranks: int, group: str) -> Tensor:
    own, send = _send(group)
    return Request.of(indices, rows, ranks, own.rank(), send).sums(grad.contiguous(), send)


@_lookup.register_fake
def _(table: Tensor, indices: Tensor, rows: int, ranks: int, group: str) -> Tensor:
    return table.new_empty((*indices.shape, table.shape[1]))


@_return.register_fake
def _(grad: Tensor, indices: Tensor, rows: int, ranks: int, group: str) -> Tensor:
    return grad.new_empty((rows_on_rank(rows, ranks), grad.shape[-1]))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    (indices,) = ctx.saved_tensors
    return torch.ops.daceml_train.return_rows(grad, indices, *ctx.table), None, None, None, None


def _saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.table = inputs[2:]


_lookup.register_autograd(_backward, setup_context=_saved)

__all__ = ["ShardedEmbedding", "sharded_embeddings"]
