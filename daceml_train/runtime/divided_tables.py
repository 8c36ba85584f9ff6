"""Rows of divided tables on their way between ranks: who asks whom for which rows, and the rows themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from daceml_train.ops.divided_tables import rows_on_rank

Send = Callable[[Tensor, Tensor, list[int] | None, list[int] | None], Any]
"""Send parts of the second tensor to all ranks, and receive parts of the first one from them, of these lengths."""


def sending(group: dist.ProcessGroup | None, finish: Callable[[Any], Any]) -> Send:
    """The exchange over a process group, which `finish` waits for."""

    def send(into: Tensor, parts: Tensor, received: list[int] | None, sent: list[int] | None) -> None:
        finish(dist.all_to_all_single(into, parts, received, sent, group=group, async_op=True))

    return send


@dataclass(frozen=True)
class Request:
    """The rows that the indices of this rank name, and those that other ranks ask this one for.

    `inverse` is the place of each index among the distinct ones, of which rank r has `asked[r]`; rank r asks for
    `answered[r]` rows, which are `own` here.
    """

    inverse: Tensor
    asked: list[int]
    answered: list[int]
    own: Tensor
    length: int

    @classmethod
    def of(cls, indices: Tensor, rows: int, ranks: int, rank: int, send: Send) -> Request:
        """Ask all ranks. Raises `IndexError` for an index that is out of range."""
        length = rows_on_rank(rows, ranks)
        distinct, inverse = torch.unique(indices.reshape(-1), return_inverse=True)
        if len(distinct) and not 0 <= int(distinct[0]) <= int(distinct[-1]) < rows:
            wrong = int(distinct[0]) if distinct[0] < 0 else int(distinct[-1])
            raise IndexError(f"index {wrong} is out of range for a table of {rows} rows")
        owners = distinct // length
        counts = torch.bincount(owners, minlength=ranks)
        answers = torch.empty_like(counts)
        send(answers, counts, None, None)
        asked, answered = counts.tolist(), answers.tolist()
        own = distinct.new_empty(sum(answered))
        send(own, distinct - owners * length, answered, asked)
        return cls(inverse, asked, answered, own, length)

    def rows(self, table: Tensor, shape: torch.Size, send: Send) -> Tensor:
        """The rows of the table that the indices of this `shape` name."""
        received = table.new_empty((sum(self.asked), table.shape[1]))
        send(received, table.index_select(0, self.own), self.asked, self.answered)
        return received.index_select(0, self.inverse).view(*shape, table.shape[1])

    def sums(self, grad: Tensor, send: Send) -> Tensor:
        """The sums of all ranks' gradients for the rows that this rank has, added in the order of the ranks."""
        width = grad.shape[-1]
        own = grad.new_zeros((sum(self.asked), width)).index_add_(0, self.inverse, grad.reshape(-1, width))
        received = grad.new_empty((sum(self.answered), width))
        send(received, own, self.answered, self.asked)
        return grad.new_zeros((self.length, width)).index_add_(0, self.own, received)

    def sent(self, rank: int, row: int) -> tuple[int, int]:
        """Bytes that this rank sends to others: counts, indices, and rows of `row` bytes for them; and sums of rows."""
        others = sum(self.asked) - self.asked[rank]
        replies = sum(self.answered) - self.answered[rank]
        return 8 * (len(self.asked) - 1) + 8 * others + row * replies, row * others


__all__ = ["Request", "Send", "sending"]
