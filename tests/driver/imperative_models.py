"""Models whose forward pass is any Python: state that is changed in place, arrays of NumPy, indices, random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.driver.imperative import BATCH, SIZE, Imperative


class Averages(Imperative):
    """State that is changed in place, of buffers and of plain tensors, and looked at between the changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mean = nn.BatchNorm1d(SIZE), torch.zeros(SIZE, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.l(x))
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.notes.append(float(x.sum()))
        if h.detach().max().item() > 0:
            h = h - self.mean
        return self.r(h)


class Running(Averages):
    """Looks at running statistics after a normalization has changed them."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.l(x))
        assert self.norm.running_mean is not None
        self.notes.append(float(self.norm.running_mean.abs().sum()))
        return self.r(h) if float(h.detach().sum()) < 1e9 else h


class Twice(Imperative):
    """Looks at a value again after it was changed."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x) * 1
        self.notes.append(float(h.sum()))
        h += 1
        self.notes.append(float(h.sum()))
        h[0] = 0
        self.notes.append(h[0, 0].item() + float(h.detach().numpy()[1, 1]))
        return self.r(h)


class Structures(Imperative):
    """Named tuples, generators, masks, chunks, and an index that a mask determines."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        largest = h.max(1)
        self.notes.append(int(largest.indices[0]))
        parts = [part.tanh() for part in h.chunk(2, 1)]
        first, *others = h
        h = torch.cat([*parts, first[None].expand(1, -1).repeat(BATCH, 1)], 1)[:, :SIZE] + largest.values[:, None]
        rows = (x[:, 0] > -9).nonzero()[:, 0]
        chosen = h[x[:, 1] > -9]
        h = h.index_add(0, rows, chosen) + sum(o.mean() for o in others)
        h[x > 1] = 0.0
        return self.r(h)


class Positions(Imperative):
    """Indices that are tensors without dimensions, of data and of results."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        order = x[:, 0].argsort()
        picked = [h[i] for i in order]
        first, column = order[0], h.detach().sum(0).argmax()
        y = torch.stack(picked) * h[..., column, None] + h[None, first, 1:3].sum() + h[first, column]
        return self.r(y)


class Buffered(Imperative):
    """Reuses an array of NumPy's, which PyTorch does not see change."""

    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros((BATCH, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        for number in range(3):
            self.array[...] = number + np.tanh(float(h.detach()[0, 0]))
            h = h + torch.from_numpy(self.array)
        return self.r(h)


class Overwriting(Imperative):
    """Changes an array that shares memory with a result."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        if float(h.detach().sum()) < 1e9:
            h.detach().numpy()[0] = 0
        return self.r(h)


class Rounded(torch.autograd.Function):
    """Rounds, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 3


class Straight(Imperative):
    """A function with a gradient of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        h = Rounded.apply(self.l(x))
        return self.r(h) if float(h.detach().sum()) < 1e9 else h


class Reversed(torch.autograd.Function):
    """Returns its argument itself, with a gradient of its own, and counts."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Reversed.calls += 1
        return x if Reversed.calls % 2 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -gradients[0]


reverse = Reversed.apply


class Reversing(Imperative):
    """A function of the user's that computes nothing, in calls after some that follow a path."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        self.calls += 1
        if self.calls % 3 == 0 or float(h.detach().sum()) > 1e9:
            Reversed.calls = self.calls // 3
            h = reverse(h)
            self.notes.append(Reversed.calls)
        return self.r(h)


class PartOfATable(Imperative):
    """Changes a part of a tensor that it has read, and reads the whole again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(2, SIZE, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x) + self.table[0]
        self.table[0].add_(float(h.detach().mean()))
        return self.r(h + self.table[0])


class Dropping(Imperative):
    """Dropout in place, of channels, and of channels without a batch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        F.dropout(h, 0.5, inplace=True)
        h = h + F.dropout1d(h[:, None], 0.5)[:, 0] + F.dropout(h, 0.4, self.training and bool(h.detach()[0, 0] > 0))
        return self.r(h + F.dropout1d(h, 0.5) if self.calls else h)


class Attending(Imperative):
    """Attention with dropout, by a module and by hand, and a sample of categories."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)[None]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(BATCH, dtype=x.dtype)
        a, weights = self.attention(h, h, h, attn_mask=mask)
        self.notes.append(weights.detach().sum().item())
        b, _ = self.attention(h, h, h, need_weights=False)
        c = F.scaled_dot_product_attention(a, b, h, dropout_p=0.2, is_causal=True)
        padding = torch.arange(BATCH)[:, None] > torch.zeros(BATCH)  # the first row attends to nothing
        d = F.scaled_dot_product_attention(a, b, c, padding, dropout_p=0.2)
        chosen = F.gumbel_softmax(h[0], tau=0.5, hard=True)
        return self.r((a + b + c + d)[0]) * F.gumbel_softmax(h[0], tau=2.0) + chosen + F.dropout(h[0], 1.0)


class DroppingWithoutBatch(Dropping):
    """What a path does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 1


class Without(Imperative):
    """A region without gradients, whose results others use."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        with torch.no_grad():
            target = self.r(h)
            if target.sum().item() > 0:
                target = target * 2
        return (h - target) * self.r(h)


class Scripted(Imperative):
    """Exceptions that are raised on values, and caught."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        try:
            if h.max().item() > 0.9:
                raise OverflowError("large")
            h = h * 3
        except OverflowError as error:
            self.notes.append(str(error))
            h = h / 2
        finally:
            self.calls += 1
        return self.r(h)


class Copying(Imperative):
    """A buffer that is a copy of a parameter, and only that, after a look at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("copied", torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.notes.append(h.mean().item())
        with torch.no_grad():
            self.copied.copy_(self.l.bias)
        return self.r(h)


class Saving(Imperative):
    """A result goes through a file."""

    def forward(self, x: Tensor) -> Tensor:
        h, file = self.l(x), BytesIO()
        torch.save(h.detach(), file)
        file.seek(0)
        self.notes.append(float(torch.load(file).sum()))
        return self.r(h)


class ReadingData(Imperative):
    """What autograd does not see is read."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.notes.append(h.data.max().item())
        return self.r(h + h.data)


class WritingData(Imperative):
    """What autograd does not see is changed: the derivative of tanh then has the changed values, as in PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        if self.r(h).sum().item() > -1e9:
            h.data.mul_(0.5)
        return self.r(h.exp())


class AssigningData(Imperative):
    """The data of a result are others."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x) * 1
        if h.sum().item() > -1e9:
            h.data = h.data * 2
        return self.r(h)


class Threaded(Imperative):
    """Another thread computes with a result."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        if len(self.notes) >= 3:  # calls before follow a path
            thread = threading.Thread(target=lambda: self.notes.append(h.detach().sum().item()))
            thread.start()
            thread.join()
        else:
            self.notes.append(h.detach().sum().item())
        return self.r(h)


OTHERS: tuple[Callable[[], Imperative], ...] = (
    Running,
    Twice,
    Structures,
    Positions,
    Buffered,
    Overwriting,
    Straight,
    Reversing,
    PartOfATable,
    Attending,
    Dropping,
    DroppingWithoutBatch,
    Without,
    Scripted,
    Copying,
    Saving,
    ReadingData,
    WritingData,
    AssigningData,
    Threaded,
)


REFUSED = {
    Overwriting: "NumPy array that shares memory",
    Straight: "autograd.Function",
    Reversing: "autograd.Function",
    DroppingWithoutBatch: "without a batch",
    Saving: "_backward_hooks of a result",
    WritingData: "changes after its data was read",
    AssigningData: "__set__",
    Threaded: "a thread that the model starts",
}
"""What keeps calls of some of them from following paths."""
