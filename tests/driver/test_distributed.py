"""Training steps in several processes: what is not reduced is said, and what PyTorch wraps trains as in PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.ranks import Ranks

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    result = Ranks(tmp_path_factory.mktemp("ranks"))
    yield result
    result.close()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 3, generator=generator), torch.randn(6, 2, generator=generator)


def trained_by_pytorch(steps: int) -> list[Tensor]:
    """The parameters after steps of one process on whole batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


def wrapped(rank: int, how: str) -> tuple[list[str], list[str], list[Tensor]]:
    """Warnings, breaks, and parameters of a step of a model that PyTorch makes parallel."""
    model: Any = network()
    inside: Any = nn.Sequential(DistributedDataParallel(model)) if how == "inside" else DistributedDataParallel(model)
    if how == "hook":
        inside.register_comm_hook(None, default_hooks.allreduce_hook)
    stepped: Any = fully_shard(model) if how == "fully_shard" else inside
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = dt.training_step(stepped, F.mse_loss, optimizer)
        for number in range(2):
            x, y = (t[3 * rank : 3 * rank + 3] for t in batch(number))
            step(x, y)
    return [str(w.message) for w in caught], step.breaks, [whole(p) for p in model.parameters()]


def alone(rank: int) -> list[str]:
    """The warnings of a step that reduces nothing."""
    model = network()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    return [str(w.message) for w in caught]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "message"), [
    ("hook", "the model is a DistributedDataParallel, which reduces gradients in hooks"),
    ("inside", "its module '0' is a DistributedDataParallel"),
])  # fmt: skip
def test_what_pytorch_makes_parallel_trains_in_pieces_and_says_so(ranks: Ranks, how: str, message: str) -> None:
    expected = trained_by_pytorch(2)
    for warned, breaks, found in ranks(wrapped, how):
        assert len(breaks) == 1 and message in breaks[0]
        assert not any("reduces no gradients" in text for text in warned)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_a_step_that_reduces_nothing_warns_on_every_rank(ranks: Ranks) -> None:
    for warned in ranks(alone):
        (text,) = warned
        assert "reduces no gradients over the 2 processes" in text


def around(rank: int, how: str) -> tuple[list[str], list[Tensor], int]:
    """Breaks, parameters and graphs after PyTorch's own steps of a compiled model that PyTorch makes parallel."""
    plain = network()
    if how == "layers":  # the hooks of which TorchDynamo does not trace
        for layer in (plain[0], plain[2]):
            fully_shard(layer)
        fully_shard(plain)
    if how == "tensors":
        mesh = init_device_mesh("cpu", (2,))
        plain = parallelize_module(plain, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inside = how in ("layers", "tensors", "around")
    model: Any = dt.optimize(DistributedDataParallel(plain) if how == "around" else plain)
    state = state_of(model)
    parallel: Any = fully_shard(model) if how == "fully_shard" else model if inside else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    for number in range(2):
        x, y = (t if how == "tensors" else t[3 * rank : 3 * rank + 3] for t in batch(number))
        optimizer.zero_grad()
        F.mse_loss(parallel(x), y).backward()
        optimizer.step()
    assert state is not None
    return (
        state.backend.breaks,
        [whole(p) for p in parallel.parameters()],
        sum(r.kernels for r in state.backend.records),
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "fully_shard", "around", "layers", "tensors"])
def test_compiled_models_inside_and_around_what_pytorch_makes_parallel(ranks: Ranks, how: str) -> None:
    expected = trained_by_pytorch(2)
    for breaks, found, kernels in ranks(around, how):
        assert breaks == [] and kernels
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


class Expanded(nn.Module):
    """A model with buffers whose elements share memory."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.out = nn.Linear(6, 4)
        self.register_buffer("scale", torch.tensor(scale).expand(4))
        self.register_buffer("mask", torch.arange(4.0).expand(3, 4).mT)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * self.scale + self.mask[:, 1]


class Centered(nn.Module):
    """Reads a buffer that each batch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.mean.mul_(0.5).add_(h.detach().mean(0), alpha=0.5)
        return self.outer(torch.tanh(h - self.mean))


def centered(rank: int, compiled: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    parallel = DistributedDataParallel(Centered())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.3)
    step = dt.training_step(parallel, F.mse_loss, optimizer)
    for number in range(3):
        x, y = (t[3 * rank : 3 * rank + 3] for t in batch(number))
        if compiled:
            step(x, y)
        else:
            optimizer.zero_grad()
            F.mse_loss(parallel(x), y).backward()
            optimizer.step()
    assert not compiled or step.breaks == []
    return {name: t.detach().clone() for name, t in parallel.module.state_dict().items()}


def test_a_wrapper_gives_all_ranks_the_buffers_of_rank_0_before_each_step(ranks: Ranks) -> None:
    for found, expected in zip(ranks(centered, True), ranks(centered, False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def begun(rank: int) -> list[list[float]]:
    """The buffers of a model whose ranks begin with other ones."""
    model = Expanded(2.0 + rank)
    model.mask[:, :1].add_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dt.training_step(model, F.cross_entropy, optimizer, mesh=torch.distributed.group.WORLD)
    return [model.scale.tolist(), model.mask[:, 2].tolist()]


def test_buffers_whose_elements_share_memory(ranks: Ranks) -> None:
    assert ranks(begun) == 2 * [[[2.0] * 4, [0.0, 1.0, 2.0, 3.0]]]


def test_checkpoints_of_other_optimizers_are_refused_before_anything_is_loaded() -> None:
    def step(optimizer: Any, parts: bool = False) -> Any:
        model = network()
        groups = [{"params": [p]} for p in model.parameters()] if parts else model.parameters()
        return dt.training_step(model, F.mse_loss, optimizer(groups, lr=0.1))

    adam, sgd = step(torch.optim.Adam), step(torch.optim.SGD)
    with torch.no_grad():
        sgd.model[0].weight.zero_()
    for target, given, message in (
        (adam, sgd.state_dict(), r"what is loaded has no step of 0.weight; .*this optimizer"),
        (step(torch.optim.SGD, parts=True), sgd.state_dict(), "the optimizer has 4 groups of parameters, .* has 1"),
        (adam, {"model": {}}, "loads what its state_dict.* returned, and 'state' is missing"),
    ):
        with pytest.raises(dt.Invalid, match=message):
            target.load_state_dict(given)
        assert target.model[0].weight.any()
