"""Collectives as library calls of a program, on the ranks whose step runs in this thread."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from daceml_train.errors import ExecutionError
from daceml_train.runtime.ranks import RankError, Ranks

_running = threading.local()


@contextlib.contextmanager
def communicating(ranks: Ranks) -> Iterator[None]:
    """The collectives of programs that run inside are those of `ranks`. Its errors are raised as they are."""
    _running.ranks = ranks
    try:
        yield
    except ExecutionError as error:
        if ranks.error is None:
            raise
        raise ranks.error from error
    finally:
        _running.ranks = None


def _all_reduce(ranks: Ranks, x: Tensor, position: int) -> Tensor:
    """The sum of `x` over all ranks, in memory of its own: a collective that fails may write to it afterward."""
    total = x.clone(memory_format=torch.contiguous_format)
    ranks.sum(total)
    return total


def _reduce_scatter(ranks: Ranks, x: Tensor, position: int) -> Tensor:
    """The sum of this rank's blocks.

    Gloo implements a reduce-scatter as an all-reduce, which sends twice the bytes; blocks that are exchanged and added
    here are what a reduce-scatter has to send.
    """
    x = x.contiguous()
    if dist.get_backend(ranks.group) != dist.Backend.GLOO:
        block = x.new_empty((x.shape[0] // ranks.size, *x.shape[1:]))
        ranks.finish(dist.reduce_scatter_tensor(block, x, group=ranks.group, async_op=True))
        return block
    return _all_to_all(ranks, x, position).view(ranks.size, -1, *x.shape[1:]).sum(0)


def _all_gather(ranks: Ranks, x: Tensor, position: int) -> Tensor:
    return ranks.gather(x)


def _all_to_all(ranks: Ranks, x: Tensor, position: int) -> Tensor:
    x = x.contiguous()
    found = torch.empty_like(x)
    ranks.agreed()
    ranks.finish(dist.all_to_all_single(found, x, group=ranks.group, async_op=True))
    return found


def _broadcast(ranks: Ranks, x: Tensor, root: int, position: int) -> Tensor:
    found = x.clone(memory_format=torch.contiguous_format)
    ranks.agreed()
    ranks.broadcast(found, root)
    return found


def _reduce_to(ranks: Ranks, x: Tensor, root: int, position: int) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    ranks.agreed()
    ranks.finish(dist.reduce(total, group=ranks.group, group_dst=root, async_op=True))
    return total if ranks.rank == root else total.zero_()


def _start(ranks: Ranks, x: Tensor, kind: str, position: int) -> Tensor:
    """Begin a collective. Its memory is kept until it is over, also if the program ends with an error before that."""
    ranks.agreed()
    match kind:
        case "all_reduce":
            result = x.clone(memory_format=torch.contiguous_format)
            work, received = dist.all_reduce(result, group=ranks.group, async_op=True), result
        case "all_gather":
            result = x.new_empty((ranks.size * x.shape[0], *x.shape[1:]))
            work, received = ranks.gathering(result, x.clone(memory_format=torch.contiguous_format)), result
        case _:
            result, own = x.new_empty((x.shape[0] // ranks.size, *x.shape[1:])), x.clone()
            received = torch.empty_like(own, memory_format=torch.contiguous_format)
            work = dist.all_to_all_single(received, own.contiguous(), group=ranks.group, async_op=True)
    ranks.started[position] = (work, received)
    return result


def _await(ranks: Ranks, x: Tensor, position: int) -> Tensor:
    """Complete a collective; `x` is the memory of its result."""
    work, received = ranks.started[position]
    ranks.finish(work)
    del ranks.started[position]
    if received.shape != x.shape:
        torch.sum(received.view(ranks.size, *x.shape), 0, out=x)
    return x


def _own_shards(ranks: Ranks, arrays: list[Tensor]) -> Tensor:
    sizes = [-(-x.numel() // ranks.size) for x in arrays]
    found = arrays[0].new_zeros(sum(sizes))
    for x, shard in zip(arrays, found.split(sizes), strict=True):
        own = x.reshape(-1)[ranks.rank * len(shard) : (ranks.rank + 1) * len(shard)]
        shard[: len(own)] = own
    return found


def _sum_rows(ranks: Ranks, grad: Tensor, indices: Tensor, rows: int, padding_idx: int, position: int) -> Tensor:
    """The gradient of an embedding, of which each rank sends the rows that it has, equal indices added up."""
    index, own = indices.reshape(-1).long(), grad.reshape(-1, grad.shape[-1])
    if padding_idx >= 0:
        kept = index != padding_idx
        index, own = index[kept], own[kept]
    distinct, inverse = torch.unique(index, return_inverse=True)
    own = own.new_zeros(len(distinct), own.shape[1]).index_add_(0, inverse, own)
    counts = ranks.gather(torch.tensor([len(distinct)])).tolist()
    padded = torch.zeros(max(counts), dtype=torch.int64)
    padded[: len(distinct)] = distinct
    places = ranks.gather(padded).view(ranks.size, -1)
    message = own.new_zeros(max(counts), own.shape[1])
    message[: len(own)] = own
    values = ranks.gather(message).view(ranks.size, -1, own.shape[1])
    ranks.sent["sum_rows", position] = (ranks.size - 1) * (padded.nbytes + message.nbytes + 8)
    table = own.new_zeros(rows, own.shape[1])
    for count, place, value in zip(counts, places, values, strict=True):  # in one order, so that ranks get equal bits
        table.index_add_(0, place[:count], value[:count])
    return table


def _registered(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A library function that finds the ranks of the running step; an error of theirs is kept for its caller."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Tensor:
        ranks: Ranks | None = getattr(_running, "ranks", None)
        if ranks is None:
            raise ExecutionError("a program with collectives runs outside a training step with mesh=", -1)
        try:
            return function(ranks, *arguments)
        except RankError as error:
            ranks.error = error
            raise

    return call


LIBRARY: dict[str, Callable[..., Tensor]] = {
    "all_reduce(Tensor x, int position) -> Tensor": _all_reduce,
    "reduce_scatter(Tensor x, int position) -> Tensor": _reduce_scatter,
    "all_gather(Tensor x, int position) -> Tensor": _all_gather,
    "all_to_all(Tensor x, int position) -> Tensor": _all_to_all,
    "broadcast(Tensor x, int root, int position) -> Tensor": _broadcast,
    "reduce_to(Tensor x, int root, int position) -> Tensor": _reduce_to,
    "start(Tensor x, str kind, int position) -> Tensor": _start,
    "await(Tensor(a!) x, int position) -> Tensor(a!)": _await,
    "own_shards(Tensor[] arrays) -> Tensor": _own_shards,
    "sum_rows(Tensor grad, Tensor indices, int rows, int padding_idx, int position) -> Tensor": _sum_rows,
}
"""The signature of each library function, and what it runs."""

_library = torch.library.Library("daceml", "FRAGMENT")
for _signature, _function in LIBRARY.items():
    _library.define(_signature)
    _library.impl(_signature.partition("(")[0], _registered(_function), "CPU")

TARGETS = frozenset(f"daceml::{signature.partition('(')[0]}" for signature in LIBRARY)
"""The library functions that take part in the exchange of a step."""
