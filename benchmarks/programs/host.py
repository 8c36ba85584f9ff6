"""Programs that print, log, or call other libraries in the middle of the forward pass."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from benchmarks.programs.program import WIDTH, Program, drawn, named


@named("print of a value")
class Printing(Program):
    """Prints a formatted value in each step."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        print("std", f"{h.std().item():.4f}")
        return self.last(h)


@named("log of values")
class Logging(Program):
    """Notes values of every fourth step."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.first(x).tanh()
        if self.calls % 4 == 0:
            self.notes.append({"call": self.calls, "mean": h.mean().item(), "norm": float(h.detach().norm())})
        return self.last(h)


@named("NumPy quantile")
class Quantile(Program):
    """Clamps to quantiles that NumPy computes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        low, high = np.quantile(h.detach().numpy(), [0.05, 0.95])
        self.notes.append(float(high))
        return self.last(h.clamp(float(low), float(high)))


@named("NumPy noise")
class NumpyNoise(Program):
    """An augmentation that draws from NumPy's stream."""

    def forward(self, x: Tensor) -> Tensor:
        shift = int(np.random.randint(0, 8))
        scale = float(np.random.uniform(0.5, 1.5))
        return self.last(self.first(torch.roll(x, shift, 1) * scale).tanh())


@named("NumPy mixup")
class Mixup(Program):
    """Mixes rows of the batch by a permutation and a share that NumPy draws, and adds an array of its noise."""

    def forward(self, x: Tensor) -> Tensor:
        share = np.random.beta(0.4, 0.4)
        others = torch.from_numpy(np.random.permutation(len(x)))
        noise = torch.from_numpy(np.random.normal(0, 0.1, size=x.shape[1]))
        return self.last(self.first(share * x + (1 - share) * x[others] + noise.float()).tanh())


@named("SciPy matching")
class Matching(Program):
    """Queries are matched to targets by the Hungarian algorithm, as in DETR."""

    def batch(self, number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = drawn(number, 16, 10, WIDTH)
        target = drawn(number + 1000, 16, 10, WIDTH)
        return (x, target), target

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.last(self.first(x).tanh()) + x
        costs = torch.cdist(h, target).detach().numpy()
        order = torch.as_tensor(np.stack([linear_sum_assignment(cost.T)[1] for cost in costs]))
        self.notes.append(int(order[0, 0]))
        return h.gather(1, order[:, :, None].expand_as(h))


@named("NetworkX tree")
class SpanningTree(Program):
    """Messages along the minimum spanning tree of a batch."""

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        x = drawn(number, 24, WIDTH)
        return x, torch.roll(x, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        graph = nx.from_numpy_array(torch.cdist(x, x).numpy())
        edges = sorted(nx.minimum_spanning_tree(graph).edges)
        self.notes.append(len(edges))
        index = torch.tensor(edges).t()
        h = h.index_add(0, index[0], h[index[1]].tanh())
        return self.last(h)


@named("metrics in a dict")
class Metrics(Program):
    """The model returns a loss and keeps detached metrics for the user to read."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        y = self.last(h)
        self.metrics["active"] = (h > 0).float().mean().detach()
        self.metrics["largest"] = y.detach().abs().max()
        return y
