"""Collectives of torch.distributed inside a model: operators of the program, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.ranks import Ranks

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    result = Ranks(tmp_path_factory.mktemp("ranks"), 2)
    yield result
    result.close()


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def detached(x: Tensor) -> Tensor:
    y = x.detach().clone()
    dist.all_reduce(y)
    return x + y


def largest(x: Tensor) -> Tensor:
    return x * collectives.all_reduce(x.detach(), "max", world())


def mean(x: Tensor) -> Tensor:
    return x * collectives.all_reduce(x.detach(), "avg", world())


def gathered_detached(x: Tensor) -> Tensor:
    out = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.detach())
    return x * out.mean(0)


def summed(x: Tensor) -> Tensor:
    return collectives.all_reduce(x.sin(), "sum", world()).square()


def gathered(x: Tensor) -> Tensor:
    return collectives.all_gather_tensor_autograd(x, 1, world()).square().sum(1, keepdim=True) + x


def scattered(x: Tensor) -> Tensor:
    return collectives.reduce_scatter_tensor_autograd(torch.cat([x, x * 2]), "sum", 0, world()).exp()


def exchanged(x: Tensor) -> Tensor:
    return collectives.all_to_all_single_autograd(torch.cat([x, x * 2]), [2, 2], [2, 2], world())[:2] * x


def sent(x: Tensor) -> Tensor:
    return x * collectives.broadcast(x.detach(), 1, world())


def several(x: Tensor) -> Tensor:
    """Three messages of one size, which would be mistaken for one another out of order."""
    first, second = collectives.all_reduce(x.cos(), "sum", world()), collectives.all_reduce(x.exp(), "sum", world())
    return collectives.all_reduce(first * x, "sum", world()) - second


DIFFERENTIABLE = (summed, gathered, scattered, exchanged, several)


class Communicating(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.how = nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.fc(x))


def beside_eager(rank: int, how: Callable[[Tensor], Tensor]) -> list[Any]:
    """Breaks, results and gradients of a compiled module and of eager execution; parameters after a step of each."""
    torch.manual_seed(0)
    theirs = Communicating(how)
    torch.manual_seed(rank)
    ours, stepped = copy.deepcopy(theirs), copy.deepcopy(theirs)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    compiled = dt.optimize(ours)
    found, expected = [], []
    for model, told, own in ((compiled, found, ours), (theirs, expected, theirs)):
        for _ in range(2):
            result = model(x)
            loss = F.mse_loss(result, y)
            own.zero_grad()
            loss.backward()
            told += [result.detach().clone(), own.fc.weight.grad.clone()]
    optimizer, eager = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (stepped, theirs))
    step = dt.training_step(stepped, F.mse_loss, optimizer, mesh=False)
    for _ in range(2):
        step(x, y)
        eager.zero_grad()
        F.mse_loss(theirs(x), y).backward()
        eager.step()
    state = state_of(compiled)
    assert state is not None
    return [[*state.backend.breaks, *step.breaks], found, expected, stepped.fc.weight, theirs.fc.weight]


@pytest.mark.slow
@pytest.mark.parametrize("how", [detached, largest, mean, gathered_detached, sent, *DIFFERENTIABLE])
def test_a_collective_is_an_operator_of_the_program(ranks: Ranks, how: Callable[[Tensor], Tensor]) -> None:
    for breaks, found, expected, ours, theirs in ranks(beside_eager, how):
        assert breaks == []
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours, theirs)


def in_a_mesh(rank: int) -> Tensor:
    """A step of two ranks whose model has a collective of its own."""
    torch.manual_seed(0)
    model = Communicating(summed)
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), mesh=world())
    torch.manual_seed(rank)
    step(torch.randn(2, 3), torch.randn(2, 3))
    assert step.breaks == [] and step.network["group_collective"] > 0
    return model.fc.weight.detach()


def in_ddp(rank: int) -> Tensor:
    torch.manual_seed(0)
    model = Communicating(summed)
    parallel = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    F.mse_loss(parallel(x), y).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return model.fc.weight.detach()


@pytest.mark.slow
def test_it_goes_with_those_of_a_step(ranks: Ranks) -> None:
    for found, expected in zip(ranks(in_a_mesh), ranks(in_ddp), strict=True):
        torch.testing.assert_close(found, expected)


def over_a_part(rank: int) -> tuple[Tensor, list[str]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    group = mesh["b"].get_group()
    model = Communicating(lambda x: collectives.all_reduce(x, "sum", group))
    compiled = dt.optimize(model)
    x = torch.randn(2, 3)
    state = state_of(compiled)
    assert state is not None
    return (compiled(x) - model.fc(x)).detach(), state.backend.breaks


@pytest.mark.slow
def test_a_group_is_named(ranks: Ranks) -> None:
    for difference, breaks in ranks(over_a_part):
        assert breaks == [] and not difference.any()


# ---- what is refused


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def unused(x: Tensor) -> Tensor:
    collectives.all_reduce(x.detach(), "sum", world())
    return x


def whole_numbers(x: Tensor) -> Tensor:
    return x + collectives.all_reduce((x.detach() * 10).long(), "sum", world())


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y


def largest_with_gradient(x: Tensor) -> Tensor:
    return collectives.all_reduce(x, "max", world())


def uneven(x: Tensor) -> Tensor:
    return collectives.all_gather_into_tensor_coalesced([x.detach()], world())[0] + x


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (unused, "the collective _c10d_functional.all_reduce.*whose result nothing reads"),
        (whole_numbers, "the collective all_reduce of whole numbers"),
        (in_place, "a collective that overwrites a tensor with what has a gradient"),
        (largest_with_gradient, r"the derivative of the collective all_reduce \(max\)"),
        (uneven, "the collective _c10d_functional.all_gather_into_tensor_coalesced"),
    ],
)
def test_others_are_refused_by_name(how: Callable[[Tensor], Tensor], message: str) -> None:
    theirs = Communicating(how)
    ours, stepped = copy.deepcopy(theirs), copy.deepcopy(theirs)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    compiled = dt.optimize(ours)
    with pytest.warns(UserWarning, match=message):
        found = compiled(x)
    torch.testing.assert_close(found, theirs(x))
    optimizer, eager = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (stepped, theirs))
    step = dt.training_step(stepped, F.mse_loss, optimizer)
    if how is largest_with_gradient:  # which PyTorch cannot do either
        return
    with pytest.warns(UserWarning, match=message):
        step(x, y), step(x, y)  # the first finds that no path can be followed, the second runs in pieces
    for _ in range(2):
        eager.zero_grad()
        F.mse_loss(theirs(x), y).backward()
        eager.step()
    torch.testing.assert_close(stepped.fc.weight, theirs.fc.weight)
    state = state_of(compiled)
    assert state is not None
    assert not any("internal error" in reason for reason in (*state.backend.breaks, *step.breaks))
