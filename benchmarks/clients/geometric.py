"""PyTorch Geometric: graph convolutions, whose messages are reduced by scatter operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch_geometric import nn as geometric
from torch_geometric.data import Batch, Data

from benchmarks.clients.way import Program, Way

PACKAGE = "torch_geometric"
FEATURES, CLASSES = 8, 3


def graph(number: int, nodes: int = 12, edges: int = 40) -> Data:
    """A random graph, in which some nodes have no neighbors."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(nodes, FEATURES, generator=generator)
    edge_index = torch.randint(0, nodes - 2, (2, edges), generator=generator)
    return Data(x=x, edge_index=edge_index, y=torch.randint(0, CLASSES, (nodes,), generator=generator))


class Net(nn.Module):
    """Two convolutions of a kind."""

    def __init__(self, convolution: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = convolution(FEATURES, 16), convolution(16, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The logits of each node."""
        logits: Tensor = self.second(torch.relu(self.first(x, edge_index)), edge_index)
        return logits


def train(way: Way, net: nn.Module, steps: int = 4) -> None:
    """A loop over graphs, of which the last has another size."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-4)
    for number in range(steps):
        data = graph(number) if number < steps - 1 else graph(number, 9, 31)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(data.x, data.edge_index), data.y)
        loss.backward()
        optimizer.step()
        way.note("loss", loss)
    way.parameters(net)


def convolution(kind: Callable[[int, int], nn.Module], way: Way) -> None:
    """A network of one kind of convolutions."""
    net = way.optimize(Net(kind))  # changed
    train(way, net)


class Pooled(nn.Module):
    """Classifies whole graphs: means and maxima over the nodes of each graph of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = geometric.GraphConv(FEATURES, 16), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        """The logits of each graph."""
        hidden = torch.relu(self.first(x, edge_index))
        pooled = geometric.global_mean_pool(hidden, batch, 3), geometric.global_max_pool(hidden, batch, 3)
        logits: Tensor = self.last(torch.cat(pooled, 1))
        return logits


def pooling(way: Way) -> None:
    """Graphs in batches of three."""
    net = way.optimize(Pooled())  # changed
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(3):
        data = Batch.from_data_list([graph(3 * number + k, 10, 30) for k in range(3)])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(data.x, data.edge_index, data.batch), torch.tensor([0, 1, 2]))
        loss.backward()
        optimizer.step()
        way.note("loss", loss)
    way.parameters(net)


SUM_MAX_MEAN = ["sum", "max", "mean"]
KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "GCN": geometric.GCNConv,
    "SAGE, mean": geometric.SAGEConv,
    "SAGE, max": partial(geometric.SAGEConv, aggr="max"),
    "SAGE, min": partial(geometric.SAGEConv, aggr="min"),
    "GAT": partial(geometric.GATConv, heads=1),
    "GATv2": partial(geometric.GATv2Conv, heads=1),
    "GIN": lambda a, b: geometric.GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))),
    "Transformer": geometric.TransformerConv,
    "PNA": lambda a, b: geometric.PNAConv(a, b, SUM_MAX_MEAN, ["identity"], torch.tensor([0, 4, 8])),
    "product": partial(geometric.GraphConv, aggr="mul"),
}

PROGRAMS: dict[str, Program] = {name: partial(convolution, kind) for name, kind in KINDS.items()}
PROGRAMS["pooling over graphs"] = pooling
