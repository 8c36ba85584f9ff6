"""Collectives of torch.distributed inside a model: the graph that has one runs as PyTorch runs it, and says so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of

pytestmark = pytest.mark.compiled


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduced(x: Tensor) -> Tensor:
    y = x.detach().clone()
    dist.all_reduce(y)
    return x + y


def gathered(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_gather_into_tensor(out, x.detach())
    return x * out


def differentiable(x: Tensor) -> Tensor:
    return collectives.all_gather_tensor_autograd(x, 0, dist.group.WORLD).square()


def unused(x: Tensor) -> Tensor:
    collectives.all_reduce(x.detach(), "sum", dist.group.WORLD)
    return x


class Communicating(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.how = nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.fc(x))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (reduced, "all_reduce"),
        (gathered, "all_gather_into_tensor"),
        (differentiable, "all_gather_into_tensor"),
        (unused, "all_reduce"),
    ],
)
def test_a_collective_is_refused_by_name(how: Callable[[Tensor], Tensor], message: str) -> None:
    theirs = Communicating(how)
    ours, stepped = copy.deepcopy(theirs), copy.deepcopy(theirs)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    compiled = dt.optimize(ours)
    with pytest.warns(
        UserWarning, match=rf"the collective _c10d_functional\.{message}.*test_collectives.py:\d+\); call it"
    ):
        found = compiled(x)
    expected = theirs(x)
    torch.testing.assert_close(found, expected)
    for result in (found, expected):
        F.mse_loss(result, y).backward()
    torch.testing.assert_close(ours.fc.weight.grad, theirs.fc.weight.grad)
    optimizer, eager = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (stepped, theirs))
    step = dt.training_step(stepped, F.mse_loss, optimizer)
    with pytest.warns(UserWarning, match=f"the collective .*{message}"):
        step(x, y), step(x, y)  # the first finds that no path can be followed, the second runs in pieces
    eager.step()
    eager.zero_grad()
    F.mse_loss(theirs(x), y).backward()
    eager.step()
    torch.testing.assert_close(stepped.fc.weight, theirs.fc.weight)
    state = state_of(compiled)
    assert state is not None
    assert not any("internal error" in reason for reason in (*state.backend.breaks, *step.breaks))
