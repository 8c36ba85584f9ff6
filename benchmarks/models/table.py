"""MODELS: every row of the tables, by name, and which of them are the promise."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.models.further import FURTHER
from benchmarks.models.library import NAMED
from benchmarks.models.model import Batch, Model
from benchmarks.models.unusual import UNUSUAL
from benchmarks.models.written import WRITTEN
from benchmarks.networks import NETWORKS, Network


class _WithLoss(nn.Module):
    """A network of the benchmarks as a model whose result is its loss."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        output = self.model(*inputs) if isinstance(inputs, tuple | list) else self.model(inputs)
        loss: Tensor = self.loss(output, targets)
        return loss


def _network(network: Network) -> nn.Module:
    return _WithLoss(network.model(), network.loss)


def _batch(network: Network) -> Batch:
    inputs, targets = network.batch()
    return {"inputs": inputs, "targets": targets}


def _itself(result: Tensor) -> Tensor:
    return result


NETWORK_MODELS: tuple[Model, ...] = tuple(
    Model(f"network-{name}", partial(_network, network), partial(_batch, network), _itself)
    for name, network in NETWORKS.items()
)
"""The networks that the benchmarks time, at the sizes at which they are timed."""

PROMISED: tuple[Model, ...] = (*NAMED, *NETWORK_MODELS)
MODELS: dict[str, Model] = {row.name: row for row in (*PROMISED, *FURTHER, *WRITTEN, *UNUSUAL)}
