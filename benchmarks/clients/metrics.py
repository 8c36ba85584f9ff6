"""torchmetrics: metrics beside a model, inside its module, and as its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Accuracy, MeanMetric, MeanSquaredError, MetricCollection

from benchmarks.clients.way import Program, Way

PACKAGE = "torchmetrics"


def batches() -> list[tuple[Tensor, Tensor]]:
    """Four batches, the last of another size."""
    generator = torch.Generator().manual_seed(0)
    sizes = (8, 8, 8, 5)
    return [(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


class Net(nn.Module):
    """A model that owns a metric, which its `forward` updates."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.right = Accuracy("multiclass", num_classes=3)
        self.inside = inside

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.layers(x)
        if self.inside:
            self.right.update(logits, y)
        return logits


def train(way: Way, net: Any, beside: MetricCollection | None) -> None:
    """Two epochs, with what the metrics say after each."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mean = MeanMetric()
    for _ in range(2):
        for x, y in batches():
            optimizer.zero_grad()
            logits = net(x, y)
            loss = nn.functional.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            mean.update(loss.detach())
            way.note("loss", loss)
            if beside is not None:
                for name, value in beside(logits, y).items():
                    way.note(name, value)
        way.note("mean", mean.compute())
        if beside is not None:
            for name, value in beside.compute().items():
                way.note(name, value)
            beside.reset()
        else:
            way.note("right", net.right.compute())
            net.right.reset()
        mean.reset()


def outside(way: Way) -> None:
    """A collection of metrics beside the model."""
    net = way.optimize(Net(inside=False))  # changed
    names = {"top": Accuracy("multiclass", num_classes=3, top_k=2), "right": Accuracy("multiclass", num_classes=3)}
    train(way, net, MetricCollection(names))


def inside(way: Way) -> None:
    """A metric that `forward` updates."""
    net = way.optimize(Net(inside=True))  # changed
    train(way, net, None)


def as_loss(way: Way) -> None:
    """A metric whose value is differentiated."""
    torch.manual_seed(1)
    net = way.optimize(nn.Linear(6, 3))  # changed
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    metric = MeanSquaredError()
    for x, y in batches():
        optimizer.zero_grad()
        loss = metric(net(x), nn.functional.one_hot(y, 3).float())
        loss.backward()
        optimizer.step()
        way.note("loss", loss)
    way.note("all", metric.compute())


PROGRAMS: dict[str, Program] = {"beside the model": outside, "inside forward": inside, "as the loss": as_loss}
