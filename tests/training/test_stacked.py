"""A stacked graph computes in each row what the graph computes for one trial: every result, in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.verify import verify
from daceml_train.errors import Unsupported
from daceml_train.graph.graph import Graph, Role
from daceml_train.graph.node import SEED
from daceml_train.ops.operator import Origin
from daceml_train.ops.random import Uniform
from daceml_train.tensor import DType, Tensor
from daceml_train.training.stacked import stacked

COUNT = 3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x.view(-1, 2, 4))[0][:, -1])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(7, 6, padding_idx=0), nn.Linear(6, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x * 7).long().clamp(0, 6)
        found = self.table(words) * self.scale
        picked = found.gather(1, words[:, :2, None].clamp(max=3).expand(-1, -1, 6))
        return self.last(torch.cat([found, picked], 1).flip(1).cumsum(1).amax(1))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all, self.norm, self.last = nn.Linear(4, 12), nn.LayerNorm(4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.all(x.view(-1, 2, 4)).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(*(z.view(-1, 2, 2, 2).transpose(1, 2) for z in (q, k, v)))
        return self.last(self.norm(y.transpose(1, 2).reshape(-1, 2, 4)).flatten(1))


def images(*layers: nn.Module, channels: int = 1) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (channels, -1, 2)), *layers, nn.Flatten(), nn.LazyLinear(3))


def pooled(channels: int) -> nn.Module:
    return images(nn.Conv2d(channels, 4, 3, padding=1, groups=channels), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), channels=channels)  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)),
    "normalized": lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3)),
    "convolution": lambda: pooled(1),
    "groups": lambda: pooled(2),
    "two convolutions": lambda: images(nn.Conv2d(1, 2, 3, padding=1), nn.GELU(), nn.Conv2d(2, 4, (2, 1), stride=(2, 1)), nn.AvgPool2d((2, 1))),
    "transposed": lambda: images(nn.Conv2d(1, 2, 1), nn.ConvTranspose2d(2, 2, 2, stride=2), nn.Upsample(scale_factor=2)),
    "recurrent": Recurrent,
    "words": Words,
    "attention": Attending,
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1, centered=True, momentum=0.9),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.1),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.1),
}


def graph_of(model: nn.Module, optimizer: Any, loss: Any = nn.functional.cross_entropy, **options: Any) -> Graph:
    x, y = torch.rand(4, 8), torch.randint(0, 3, (4,))
    model(x)  # sizes of lazy layers
    step = dt.training_step(model, loss, optimizer(model), **options)
    graph = step.graph(x, y)
    if any(t.first for t in step.look(x, y)[1]):
        step(x, y)
        graph = step.graph(x, y)
    return graph


def check(graph: Graph) -> None:
    shared = {
        name for name, entry in graph.inputs.items() if (entry.role is Role.input and entry.tensor.rank) or name == SEED
    }
    chance = np.random.default_rng(1)

    def value(name: str) -> Any:
        tensor = graph.inputs[name].tensor
        numbers = chance.random(tensor.shape) * 0.5 + 0.1
        return numbers if tensor.dtype.is_float else chance.integers(0, 3, tensor.shape)

    common = {name: value(name) for name in shared}
    trials = [{name: common.get(name, value(name)) for name in graph.inputs} for _ in range(COUNT)]
    found = stacked(graph, COUNT, graph.inputs.keys() - shared)
    verify(found)
    together = interpret(
        found, {n: common[n] if n in shared else np.stack([t[n] for t in trials]) for n in graph.inputs}
    )
    assert together.writes.keys() == graph.writes.keys()
    for row, trial in enumerate(trials):
        alone = interpret(graph, trial)
        for one, all_ in zip(alone.outputs, together.outputs, strict=True):
            np.testing.assert_allclose(all_[row], one, rtol=1e-9, atol=1e-12)
        for name, one in alone.writes.items():
            np.testing.assert_allclose(together.writes[name][row], one, rtol=1e-9, atol=1e-12)
            assert np.ptp(together.writes[name], axis=0).any(), "the trials differ"


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    check(graph_of(MODELS[name](), OPTIMIZERS["momentum"]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    check(graph_of(MODELS["dense"](), OPTIMIZERS[name], nn.CrossEntropyLoss(label_smoothing=0.1), clip_norm=1.0))


def test_a_graph_of_several_sizes() -> None:
    x, y = torch.rand(4, 8), torch.randint(0, 3, (4,))
    model = MODELS["normalized"]()
    step = dt.training_step(
        model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), dynamic=True
    )
    graph = step.graph(x, y)
    found = stacked(
        graph, COUNT, [name for name, entry in graph.inputs.items() if entry.role is not Role.input and name != SEED]
    )
    verify(found)
    assert found.symbols == graph.symbols != set()


def test_what_trials_share_is_computed_once() -> None:
    graph = Graph("shared")
    x, w = (graph.input(name, Tensor((4, 4))) for name in "xw")
    graph.output(x.unary("exp") @ w)
    found = stacked(graph, 5, ["w"])
    assert [str(found.tensors[n.outputs[0]]) for n in found.nodes if n.op.label == "exp"] == ["f32[4, 4]"]
    assert [n.op.label for n in found.nodes].count("matmul") == 1
    assert found.tensors[found.outputs[0]].shape == (5, 4, 4)


def test_an_operator_without_a_rule_is_named() -> None:
    graph = Graph("random")
    seed = graph.input("seed", Tensor((), DType.int64))
    with graph.at(Origin("drop", "model.py:7")):
        graph.output(seed.apply(Uniform((4,))))
    with pytest.raises(
        Unsupported, match=r"uniform has no rule for several trials in one program \(at drop model.py:7\)"
    ):
        stacked(graph, 2, ["seed"])
