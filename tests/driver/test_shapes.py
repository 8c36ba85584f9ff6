"""Sizes that vary: how often a model is compiled, and that each size gives eager's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.conformity import distance
from tests.driver.networks import Block, ResNet, TiedLM, mlp

pytestmark = pytest.mark.compiled


class SelfLoops(nn.Module):
    """A graph convolution: only `edges + nodes` is a size of what its backward pass reads, not `edges`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 8))

    def forward(self, edges: Tensor) -> Tensor:
        full = torch.cat([edges, torch.arange(4).expand(2, -1)], 1)
        weights = (self.table[full[0]] * self.table[full[1]]).exp()
        return torch.zeros(4, 8).index_add(0, full[1], weights)


class Patches(nn.Module):
    """Sizes enter a product of sizes: only the batch can vary."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.mix = nn.Conv2d(3, 8, 4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.cut(x).flatten(2)).mean(1)


def check(model: nn.Module, make: Callable[..., Tensor], sizes: Sequence[tuple[int, ...]], **options: Any) -> int:
    """Values and gradients at each of the sizes; how often the module was compiled."""
    ours, theirs = dt.optimize(model, **options), copy.deepcopy(model)
    for size in sizes:
        x = make(*size)
        found, expected = ours(x), theirs(x)
        assert found.shape == expected.shape
        for module, result in ((model, found), (theirs, expected)):
            module.zero_grad()
            result.square().sum().backward()
        assert distance(found, expected) < 1e-4
        for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            assert float((a.grad - b.grad).abs().max()) <= 1e-4 * float(b.grad.abs().max()) + 1e-5, size
    state = state_of(ours)
    assert state is not None and state.backend.breaks == []
    return state.backend.graphs


BATCHES = [(3,), (5,), (7,), (9,), (3,)]
BOTH = [(3, 8), (5, 4), (8, 6), (9, 5), (3, 8)]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Sequence[tuple[int, ...]]]] = {
    "batch": (mlp, lambda b: torch.randn(b, 8), BATCHES),
    "batch of images": (lambda: ResNet().eval(), lambda b: torch.randn(b, 3, 32, 32), BATCHES),
    "batch of patches": (Patches, lambda b: torch.randn(b, 3, 8, 8), BATCHES),
    "edges and self-loops": (SelfLoops, lambda n: torch.randint(0, 4, (2, n)), [(3,), (9,), (5,), (7,), (3,)]),
    "batch and length": (
        lambda: Block(8, 2, before=True, fused=True, gelu="tanh"),
        lambda b, t: torch.randn(b, t, 8),
        BOTH,
    ),
    "batch and length of a mask": (
        lambda: Block(8, 2, before=False, fused=False, gelu="none"),
        lambda b, t: torch.randn(b, t, 8),
        BOTH,
    ),
    "length of tokens": (
        lambda: TiedLM(11, 8),
        lambda b, t: torch.randint(0, 11, (b, t)),
        [(3, 6), (5, 4), (7, 3), (2, 5), (3, 6)],
    ),
}


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [(name, None) for name in MODELS if name != "batch of patches"] + [("batch and length", True)],
)
def test_how_often_sizes_are_compiled(name: str, dynamic: bool | None) -> None:
    model, make, sizes = MODELS[name]
    assert check(model(), make, sizes, dynamic=dynamic) <= (1 if dynamic else 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch", "batch of images", "batch of patches", "length of tokens"])
def test_more_sizes_from_the_first_call_on(name: str) -> None:
    test_how_often_sizes_are_compiled(name, True)


def test_every_size_is_compiled_on_its_own_where_that_is_asked_for() -> None:
    assert check(mlp(), lambda b: torch.randn(b, 8), BATCHES, dynamic=False) == 4


def test_a_step_whose_sizes_vary_from_the_start() -> None:
    model = mlp()
    theirs = copy.deepcopy(model)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1)
    step = dt.training_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), dynamic=True)
    for (size,) in BATCHES:
        x, y = torch.randn(size, 8), torch.randint(0, 4, (size,))
        other.zero_grad()
        loss = F.cross_entropy(theirs(x), y)
        loss.backward()
        other.step()
        assert distance(step(x, y), loss) < 1e-5
    assert step.breaks == [] and len(step.records) == 1
    for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
        assert distance(a, b) < 1e-5


class LossAndResults(nn.Module):
    """A loss, and results on the way to it that a caller may leave unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.first(x)
        logits = self.second(hidden.relu())
        return F.cross_entropy(logits, y), logits, hidden


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("used", [(0,), (0, 2), (1,), (1, 2)])
@pytest.mark.parametrize("way", ["optimize", "backend"])
def test_results_that_the_loss_does_not_use(way: str, used: tuple[int, ...], dynamic: bool | None) -> None:
    """Their cotangents are zeros of the batch size at hand."""
    model = LossAndResults()
    theirs = copy.deepcopy(model)
    if way == "optimize":
        ours: Callable[..., Any] = dt.optimize(model, dynamic=dynamic)
    else:
        ours = torch.compile(model, backend="daceml_train", dynamic=dynamic)
    for batch in (3, 4, 6, 2):
        x, y = torch.randn(batch, 6), torch.randint(0, 5, (batch,))
        gradients = []
        for module, called in ((model, ours), (theirs, theirs)):
            module.zero_grad()
            results = called(x, y)
            sum(results[i].square().sum() for i in used).backward()
            gradients.append([None if p.grad is None else p.grad for p in module.parameters()])
        for a, b in zip(*gradients, strict=True):
            if b is None:
                assert a is None or not a.any()
            else:
                assert a is not None and distance(a, b) < 1e-5, batch


class LossOfViews(nn.Module):
    """A loss of the transposed and reshaped results of a linear layer, each of which is a result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        hidden = self.layer(x)
        turned = hidden.transpose(1, 2)
        rows = turned.transpose(1, 2).reshape(-1, 5)
        return F.cross_entropy(rows, y.reshape(-1)) + F.cross_entropy(turned, y), hidden, turned, rows, rows.t()


@pytest.mark.parametrize("used", [(0,), (0, 2), (0, 1, 2, 3, 4)])
def test_results_that_are_views_of_each_other(used: tuple[int, ...]) -> None:
    model = LossOfViews()
    theirs = copy.deepcopy(model)
    ours = dt.optimize(model)
    for batch in (2, 2, 3):
        x, y = torch.randn(batch, 3, 6), torch.randint(0, 5, (batch, 3))
        for module, called in ((model, ours), (theirs, theirs)):
            module.zero_grad()
            sum(called(x, y)[i].square().sum() for i in used).backward()
        for result, expected in zip(ours(x, y), theirs(x, y), strict=True):
            assert distance(result, expected) < 1e-5
        assert distance(model.layer.weight.grad, theirs.layer.weight.grad) < 1e-5
    state = state_of(ours)
    assert state is not None and state.backend.breaks == []


def test_no_and_single_elements() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 8))
    check(model, lambda b, t: torch.randn(b, t, 8), [(0, 3), (1, 3), (2, 1), (5, 0), (1, 1), (2, 3)])


@pytest.mark.parametrize("select", ["nonzero", "mask", "unique"])
def test_sizes_that_data_decide(select: str) -> None:
    """A graph break around the operator; what stands before and after it is compiled."""

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.before(x).relu()
            if select == "nonzero":
                h = h[(h.sum(1) > 1).nonzero().squeeze(1)]
            elif select == "mask":
                h = h[h.sum(1) > 1]
            else:
                h = h[torch.unique(h.argmax(1))]
            return self.after(h).tanh()

    torch.manual_seed(0)
    model = Choosing()
    assert check(model, lambda b: torch.randn(b, 8), [(9,), (12,), (9,)]) >= 2


def test_shapes_without_data_are_left_to_pytorch() -> None:
    """A call on `meta` computes nothing: it is neither compiled nor a break."""
    module = dt.optimize(nn.Linear(4, 3).to("meta"))
    assert module(torch.empty(2, 4, device="meta")).shape == (2, 3)
    state = state_of(module)
    assert state is not None and not state.backend.breaks and not state.backend.records


def test_an_integer_of_a_call_that_no_size_tells() -> None:
    """The number of heads is an attribute of the module, which `dynamic=True` makes a symbol."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return result

    torch.manual_seed(0)
    model = Attending()
    check(model, lambda rows: torch.linspace(-1, 1, rows * 6).view(rows, 1, 6).sin(), [(1,), (2,), (3,)], dynamic=True)
