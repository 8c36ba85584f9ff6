"""Collectives as library calls of a program, on the ranks whose step runs in this thread."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from daceml_train.errors import ExecutionError
from daceml_train.runtime.divided_tables import Request, sending
from daceml_train.runtime.ranks import RankError, Ranks

_running = threading.local()


@contextlib.contextmanager
def communicating(ranks: Ranks) -> Iterator[None]:
    """The collectives of programs that run inside are those of `ranks`. Its errors are raised as they are."""
    _running.ranks, _running.spent = ranks, 0.0
    try:
        yield
        ranks.spent.append(_running.spent)
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
    ranks.started[position, result.data_ptr()] = (work, received)  # one and its derivative have one position
    return result


def _await(ranks: Ranks, x: Tensor, position: int) -> Tensor:
    """Complete a collective; `x` is the memory of its result."""
    work, received = ranks.started[position, x.data_ptr()]
    ranks.finish(work)
    del ranks.started[position, x.data_ptr()]
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


def _sum_rows(ranks: Ranks, parts: list[Tensor], rows: list[int], padding: list[int], position: int) -> Tensor:
    """Gradients of tables, of which each rank sends the rows that it has, equal indices added up, in one message."""
    own = [_distinct(*pair) for pair in zip(parts[::2], parts[1::2], padding, strict=True)]
    counts = ranks.gather(torch.tensor([len(index) for index, _ in own])).view(ranks.size, -1).tolist()
    widths, dtype = [values.shape[1] for _, values in own], parts[0].dtype
    sizes = [[c * (8 + w * dtype.itemsize) for c, w in zip(of_rank, widths, strict=True)] for of_rank in counts]
    message = torch.zeros(-(-max(map(sum, sizes)) // 8) * 8, dtype=torch.uint8)
    pieces = [*(index.view(torch.uint8) for index, _ in own), *(v.reshape(-1).view(torch.uint8) for _, v in own)]
    joined = torch.cat(pieces)
    message[: len(joined)] = joined
    received = ranks.gather(message).view(ranks.size, -1)
    ranks.send("sum_rows", position, (ranks.size - 1) * (message.nbytes + 8 * len(own)))
    lengths = [r * w for r, w in zip(rows, widths, strict=True)]
    result = parts[0].new_zeros(sum(lengths))
    tables = [table.view(-1, width) for table, width in zip(_split(result, lengths), widths, strict=True)]
    for of_rank, bytes_of_rank in zip(counts, received, strict=True):  # in one order: ranks get equal bits
        places = _split(bytes_of_rank, [8 * count for count in of_rank])
        rest = bytes_of_rank[8 * sum(of_rank) :]
        values = _split(rest, [c * w * dtype.itemsize for c, w in zip(of_rank, widths, strict=True)])
        for table, place, value in zip(tables, places, values, strict=True):
            table.index_add_(0, place.view(torch.int64), value.view(dtype).view(-1, table.shape[1]))
    return result


def _lookup_rows(ranks: Ranks, table: Tensor, indices: Tensor, rows: int, position: int) -> Tensor:
    ranks.agreed()
    send = sending(ranks.group, ranks.finish)
    request = ranks.requests[position] = Request.of(indices, rows, ranks.size, ranks.rank, send)
    ranks.send("lookup_rows", position, request.sent(ranks.rank, table.shape[1] * table.element_size())[0])
    return request.rows(table, indices.shape, send)


def _return_rows(ranks: Ranks, grad: Tensor, indices: Tensor, rows: int, position: int) -> Tensor:
    """The gradient of the lookup at the same position, whose request is still known."""
    request: Request = ranks.requests.pop(position)
    ranks.send("return_rows", position, request.sent(ranks.rank, grad.shape[-1] * grad.element_size())[1])
    return request.sums(grad, sending(ranks.group, ranks.finish))


def _distinct(grad: Tensor, indices: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """The distinct indices of the rows of a gradient, and the sums of the rows with each."""
    index, rows = indices.reshape(-1).long(), grad.reshape(-1, grad.shape[-1])
    if padding >= 0:
        kept = index != padding
        index, rows = index[kept], rows[kept]
    distinct, inverse = torch.unique(index, return_inverse=True)
    return distinct, rows.new_zeros(len(distinct), rows.shape[1]).index_add_(0, inverse, rows)


def _split(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """The first elements of `x` in pieces of these sizes."""
    return tuple(x[: sum(sizes)].split(sizes))


def _registered(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A library function that finds the ranks of the running step; an error of theirs is kept for its caller."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Tensor:
        ranks: Ranks | None = getattr(_running, "ranks", None)
        if ranks is None:
            raise ExecutionError("a program with collectives runs outside a training step with mesh=", -1)
        start = time.thread_time()
        try:
            return function(ranks, *arguments)
        except RankError as error:
            ranks.error = error
            raise
        finally:
            _running.spent += time.thread_time() - start

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
    "lookup_rows(Tensor table, Tensor indices, int rows, int position) -> Tensor": _lookup_rows,
    "return_rows(Tensor grad, Tensor indices, int rows, int position) -> Tensor": _return_rows,
    "sum_rows(Tensor[] parts, int[] rows, int[] padding, int position) -> Tensor": _sum_rows,
}
"""The signature of each library function, and what it runs."""

_library = torch.library.Library("daceml", "FRAGMENT")
for _signature, _function in LIBRARY.items():
    _library.define(_signature)
    _library.impl(_signature.partition("(")[0], _registered(_function), "CPU")

TARGETS = frozenset(f"daceml::{signature.partition('(')[0]}" for signature in LIBRARY)
"""The library functions that take part in the exchange of a step."""
