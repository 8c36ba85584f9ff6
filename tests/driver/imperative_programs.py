"""Models as people write them: searches, buffers of experience, teachers, gradient penalties, libraries, logging."""

from __future__ import annotations

import contextlib
import copy
import heapq
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import numpy as np
import scipy.ndimage
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from tests.driver.imperative import BATCH, SIZE, Imperative


class Searching(Imperative):
    """A beam search with a heap, rows in the order of their sums, and a suppression by NumPy's integers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        scores, beams = h.log_softmax(-1), [(0.0, tuple[int, ...]())]
        for row in range(3):
            heap: list[Any] = []
            for score, tokens in beams:
                for token, value in enumerate(scores.detach()[row].tolist()):
                    heapq.heappush(heap, (score - value, (*tokens, token)))
            beams = heapq.nsmallest(2, heap)
        chosen = sum(scores[row, token] for row, token in enumerate(beams[0][1]))
        order = sorted(range(BATCH), key=lambda row: float(h[row].detach().sum()))
        largest = np.argsort(-h.detach().numpy().sum(1))[0]
        self.notes.append((beams[0][1], order, int(largest)))
        y = torch.stack([h[row] * (place + 1) for place, row in enumerate(order)]) + h[order]
        return self.r(y + h[largest] + h[-1, order[0]] * np.float32(0.5)) + chosen


class Filling(Imperative):
    """Tensors that are allocated in the forward pass and filled by results, a row at a time or by an order."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        filled, weights = torch.zeros(BATCH, SIZE, dtype=x.dtype), torch.tensor([0.5] * BATCH, dtype=x.dtype)
        for row in range(BATCH):
            filled[row] = h[row] * (row + 1)
        first = filled[0]
        first += 1
        worst = (h.detach() - 1).square().mean(1).argsort()[:2]
        weights[worst] = 1.0
        self.filled, self.weights = filled.detach(), weights
        self.notes.append((filled.sum().item(), sorted(worst.tolist())))
        return self.r(filled) * weights[:, None] * h.new(h.size()).fill_(1.0)


class Elements(Imperative):
    """Elements at positions that values determine, changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).clone()
        k = int(h.detach().abs().sum(1).argmax())
        h[k] += 1.0
        h[k].mul_(2)
        counts = torch.zeros(SIZE, dtype=x.dtype)
        counts[k] += h[0].sum()
        return self.r(h) + counts


class Penalized(Imperative):
    """A gradient penalty at points of the model's own, and the angle between the gradients of two losses."""

    def forward(self, x: Tensor) -> Tensor:
        share = torch.rand(BATCH, 1, dtype=x.dtype)
        z = (share * x + (1 - share) * x.flip(0)).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.l(z).tanh().sum(), z, create_graph=True)
        h = self.l(x).tanh()
        losses = self.r(h).square().mean(), self.r(h).abs().mean()
        a, b = (torch.autograd.grad(loss, self.l.weight, retain_graph=True)[0].flatten() for loss in losses)
        angle = float(F.cosine_similarity(a, b, dim=0))
        self.notes.append(angle)
        return self.r(h) * (1.1 if angle > 0 else 0.9) + (slope.norm(dim=1, keepdim=True) - 1).square()


class KeepingALeaf(Imperative):
    """A point of the model's own whose gradient the user may read."""

    def forward(self, x: Tensor) -> Tensor:
        self.point = x.clone().requires_grad_(True)
        y = self.r(self.l(self.point).tanh())
        self.notes.append(y.sum().item())
        return y


class Teaching(Imperative):
    """A teacher that follows the student, averages in a dict, and a queue with a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.averages = nn.Linear(SIZE, SIZE).requires_grad_(False), dict[str, Tensor]()
        self.register_buffer("queue", F.normalize(torch.arange(12.0 * SIZE).reshape(SIZE, 12).sin(), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.l.parameters(), strict=True):
                theirs.mul_(0.9).add_(ours, alpha=0.1)
            target = self.teacher(x)
        for name, parameter in self.named_parameters():
            if name not in self.averages:
                self.averages[name] = parameter.detach().clone()
            self.averages[name].lerp_(parameter.detach(), 0.1)
        h = F.normalize(self.l(x), dim=1)
        logits = h @ self.queue.clone().detach()
        with torch.no_grad():
            at = int(self.pointer)
            self.queue[:, at : at + BATCH] = h.detach().T
            self.pointer[0] = (at + BATCH) % 12
        distance = (h - target).square().mean()
        if distance.item() > 0.01:
            self.notes.append(distance.item())
        return self.r(h) + distance + logits.logsumexp(1, keepdim=True) + F.linear(x, self.averages["l.weight"])


@dataclass
class Output:
    """What a part of a model returns."""

    value: Tensor
    name: str = "first"
    extra: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def scaled(model: Replaying, factor: float) -> Iterator[None]:
    """The model with another factor."""
    before, model.factor = model.factor, factor
    try:
        yield
    finally:
        model.factor = before


class Replaying(Imperative):
    """Experience in a deque, objects, context managers, suppressed exceptions, and values that are no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer, self.factor, self.last = deque[Tensor](maxlen=4), 1.0, None  # type: ignore[assignment]

    def part(self, x: Tensor) -> Output:
        h = self.l(x) * self.factor
        return Output(h.tanh(), extra={"largest": h.detach().max()})

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with scaled(self, 0.5):
            found = self.part(x)
        with contextlib.suppress(ZeroDivisionError):
            if found.value.sum().item() > 0:
                self.notes.append(1 / 0)
            self.notes.append(float(found.extra["largest"]))
        h = found.value
        if len(self.buffer) >= 2:
            a, b = random.sample(list(self.buffer), 2)
            h = h + 0.1 * (a + b)
        self.buffer.append(h.detach().clone())
        self.last = copy.copy(found)  # type: ignore[assignment]
        try:
            bad = h.detach() * 0 / (self.calls % 3) if self.calls % 3 else h.detach() / 0
            if not torch.isfinite(bad).all():
                raise FloatingPointError(f"call {self.calls}")
        except FloatingPointError as error:
            self.notes.append(str(error))
            h = h * 0.1
        return self.r(h)


class Composing(Imperative):
    """Modules by name in an order of Python's, layers that NumPy drops, a pipeline of generators, and a memo."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Linear(SIZE, SIZE), "b": nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU())})
        self.plans = ("ab", "ba", "a")

    def stage(self) -> Generator[Any, Tensor, None]:
        found = None
        while True:
            x = yield found
            found = self.l(x).tanh() * (2 if x.mean().item() > 0 else 1)

    def sequence(self, n: int, x: Tensor, memo: dict[int, Tensor]) -> Tensor:
        if n not in memo:
            before = (self.sequence(n - k, x, memo) for k in (1, 2))
            memo[n] = x if n == 0 else self.l(x) if n == 1 else sum(before, self.r(x)).tanh()
        return memo[n]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h, stage = x, self.stage()
        for name in self.plans[self.calls % 3]:
            h = self.parts[name](h) if np.random.rand() > 0.2 else h
        next(stage)
        h = h + sum(stage.send(x * k) for k in (1, -1))
        memo: dict[int, Tensor] = {}
        y = self.sequence(4 if h.detach().sum().item() > -1e9 else 3, h, memo)
        self.notes.append(len(memo))
        return y


class Assigning(Imperative):
    """A buffer that is assigned, weights that are tied now and then, and a layer that shares another's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(SIZE))
        self.rate = 0.1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4:
            self.rate = 0.05
        weight = self.l.weight if self.calls // 3 % 2 else self.r.weight
        h = F.linear(self.l(x).tanh(), weight.t())
        self.mean = (1 - self.rate) * self.mean + self.rate * h.detach().mean(0)
        if self.mean.abs().max().item() > 100:
            raise OverflowError
        return self.r(h - self.mean)


class Layered(Imperative):
    """Recurrent layers with dropout between them, whose state is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(SIZE, SIZE, 2, batch_first=True, dropout=0.2)
        self.lstm = nn.LSTM(SIZE, SIZE, 2, dropout=0.3, bidirectional=True)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y, self.state = self.gru(x[:, None], None if self.state is None else self.state.detach())
        z, (h, c) = self.lstm(x[None].expand(3, -1, -1))
        self.notes.append(h.sum().item())
        return self.r(y[:, 0] + z[-1, :, :SIZE] + h[0] + c[3])


class Helped(Imperative):
    """Filters of SciPy, a graph of NetworkX, images of PIL, and lines of text."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        image = Image.fromarray((x.numpy() * 40 + 128).clip(0, 255).astype(np.uint8)).rotate(random.choice([0, 180]))
        h = self.l(x + torch.from_numpy(np.asarray(image).copy()) / 255)
        smooth = torch.as_tensor(scipy.ndimage.gaussian_filter1d(h.detach().numpy(), 1.0, axis=1))
        graph = nx.from_numpy_array(torch.cdist(x, x).numpy())
        edges = torch.tensor(sorted(nx.minimum_spanning_tree(graph).edges)).t()
        h = h.index_add(0, edges[0], h[edges[1]].tanh()) * smooth
        if self.calls % 3 == 0:
            print(
                "call",
                self.calls,
                f"{h.mean():.4f} {h.std().item():>10.3e}",
                h.shape,
                [round(v, 3) for v in h.detach()[0, :2].tolist()],
            )
        return self.r(h)


class Quantizing(Imperative):
    """A code book and how often each code is used, in buffers whose names are those of attributes of FX's modules."""

    code: Tensor
    graph: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.linspace(-1, 1, 4 * SIZE).view(4, SIZE).sin())
        self.register_buffer("graph", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        nearest = torch.cdist(h, self.code).argmin(1)
        self.notes.append(nearest.unique().numel())
        quantized = self.code[nearest]
        with torch.no_grad():
            self.graph.mul_(0.9).add_(torch.eye(4, dtype=h.dtype)[nearest].sum(0), alpha=0.1)
        return self.r(h + (quantized - h).detach()) * self.graph.sum()


class Compressing(Imperative):
    """Keeps what its derivative needs in other values, in every other call, after a look."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.notes.append(round(h.sum().item(), 3))
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t)
        with hooks if len(self.notes) % 2 else contextlib.nullcontext():
            h = h * h
        return self.r(h)


class Cloning(Imperative):
    """A parameter made of a result, and a copy of a layer, in each call."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        self.notes.append(round(h.sum().item(), 3))
        code = nn.Parameter(h.detach())
        (slope,) = torch.autograd.grad((code**2).sum(), code)
        return self.r(h + slope) + copy.deepcopy(self.r)(x)


PROGRAMS: dict[Callable[[], Imperative], int] = {
    Searching: 8,
    Filling: 4,
    Elements: 9,
    Penalized: 2,
    Teaching: 5,
    Replaying: 8,
    Composing: 9,
    Assigning: 7,
    Layered: 3,
    Helped: 4,
    Quantizing: 2,
}
"""The programs, and at most how many of ten calls are recorded."""

NOT_FOLLOWED: dict[Callable[[], Imperative], str] = {
    KeepingALeaf: "a leaf of the model's own",
    Compressing: "saved_tensors_hooks",
    Cloning: "made of a result",
}
"""Why calls of others end their paths."""
