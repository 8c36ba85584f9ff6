"""Modules whose forward and backward pass are captured on an emulated GPU: whatever order they run in, eager's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of
from daceml_train.errors import Invalid
from daceml_train.runtime.gpu.cuda_graph_pair import CudaGraphPairs
from tests.driver.conformity import distance
from tests.driver.networks import mlp
from tests.runtime.emulation import Emulated, emulated

pytestmark = pytest.mark.compiled


class Normed(nn.Module):
    """Buffers that are written, two results, one of which the backward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sigmoid(self.norm(self.a(x)))
        return self.b(h), h


def captured(module: nn.Module) -> tuple[nn.Module, Callable[[], CudaGraphPairs]]:
    result = dt.optimize(module, schedule="ahead_of_time")
    state = state_of(result)
    assert state is not None
    return result, lambda: state.backend.cuda_graphs[0]


def equal(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert distance(a, b) < tolerance


def grads(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def test_a_users_loop() -> None:
    """Results and gradients are new tensors; buffers advance; sizes are captured apart."""
    theirs = Normed()
    mine = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (mine, theirs)]
    held: list[tuple[Tensor, Tensor]] = []
    with emulated() as device:
        ours, _ = captured(mine)
        for turn, size in enumerate((6, 6, 6, 6, 6, 3, 3, 3, 6)):
            x, y = torch.randn(size, 8), torch.randn(size, 4)
            for module, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad(set_to_none=turn % 2 == 0)
                out, h = module(x)
                (F.mse_loss(out, y) + h.square().mean()).backward()
                if module is ours:
                    held.append((out.detach(), out.detach().clone()))
            equal(grads(mine), grads(theirs))
            equal(mine.buffers(), theirs.buffers())
            for optimizer in optimizers:
                optimizer.step()
        state = state_of(ours)
        assert state is not None and not any(r.reasons for r in state.backend.cuda_graphs)
        assert device.replays == sum(r.replayed for r in state.backend.cuda_graphs) >= 8
    for now, then in held:
        assert torch.equal(now, then)


def test_passes_that_overlap() -> None:
    """Two forward passes before their backward passes, in both orders; gradients that add up; a graph kept."""
    theirs = mlp()
    mine = copy.deepcopy(theirs)
    with emulated() as device:
        ours, graphs = captured(mine)
        for turn in range(6):
            inputs = [torch.randn(6, 8, requires_grad=True) for _ in range(3)]
            found: list[list[Tensor | None]] = []
            for module, owner in ((ours, mine), (theirs, theirs)):
                owner.zero_grad()
                results = [module(x).sin().sum() for x in inputs]
                order = results if turn % 2 else results[::-1]
                order[0].backward(retain_graph=True)
                order[1].backward()
                order[0].backward()
                order[2].backward()
                found.append([*grads(owner), *(x.grad for x in inputs)])
                for x in inputs:
                    x.grad = None
            equal(*found)
        assert device.replays >= 5 and graphs().reasons == []


def test_a_result_that_is_kept_keeps_its_backward_pass() -> None:
    theirs = mlp()
    mine = copy.deepcopy(theirs)
    with emulated() as device:
        ours, _ = captured(mine)
        xs = [torch.randn(6, 8) for _ in range(5)]
        results = [(ours(x), theirs(x)) for x in xs]  # the second one is captured, and pending
        for _ in range(3):
            with torch.no_grad():
                for x in xs:
                    equal([ours(x)], [theirs(x)])
        for a, b in results:
            a.square().sum().backward()
            b.square().sum().backward()
        equal(grads(mine), grads(theirs))
        del results, a
        replays = device.replays
        ours(xs[0]).sum().backward()
        assert device.replays > replays  # nobody waits any more


def test_without_gradients() -> None:
    theirs = mlp().eval()
    with emulated() as device, torch.no_grad():
        ours, _ = captured(copy.deepcopy(theirs))
        results = []
        for _ in range(5):
            x = torch.randn(6, 8)
            results.append((ours(x), theirs(x)))
        for found, expected in results:
            equal([found], [expected])
        assert device.replays == 4


def test_dropout_advances_and_its_mask_is_that_of_its_forward_pass() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    x = torch.ones(5, 8)
    with emulated() as device:
        ours, _ = captured(model)
        seen = []
        for _ in range(5):
            model.zero_grad()
            y = ours(x)
            y.sum().backward()
            assert model[0].bias.grad is not None
            equal([model[0].bias.grad], [2 * (y != 0).sum(0).float()])
            seen.append(y.detach())
        assert device.replays >= 6 and not torch.equal(seen[-1], seen[-2])


def test_parameters_that_moved_are_captured_anew() -> None:
    theirs = mlp()
    mine = copy.deepcopy(theirs)
    with emulated():
        ours, _ = captured(mine)
        for turn in range(6):
            if turn == 3:
                for p in mine.parameters():
                    p.data = p.data.clone()
            x = torch.randn(6, 8)
            for module, owner in ((ours, mine), (theirs, theirs)):
                owner.zero_grad()
                module(x).square().sum().backward()
            equal(grads(mine), grads(theirs))
            with torch.no_grad():
                for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                    p -= 0.01 * p.sign()
                    q -= 0.01 * q.sign()


class Writes(nn.Module):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.detach())
        return x * total


@pytest.mark.parametrize("fault", ["argument", "capture"])
def test_what_cannot_be_captured_says_why(fault: str) -> None:
    device = Emulated()
    if fault == "capture":
        device.refuses = "operation not permitted when stream is capturing"
    with emulated(device):
        ours, graphs = captured(Writes() if fault == "argument" else mlp())
        totals = torch.zeros(6, 8), torch.zeros(6, 8)
        for _ in range(4):
            x = torch.randn(6, 8)
            if fault == "argument":
                equal([ours(x, totals[0])], [Writes()(x, totals[1])])
                equal([totals[0]], [totals[1]])
            else:
                ours(x).sum().backward()
        assert device.replays == 0
        expected = "it writes an argument" if fault == "argument" else device.refuses
        assert graphs().reasons == [f"a pass runs launch by launch, since it cannot be captured: {expected}"]


def test_a_schedule_of_another_name() -> None:
    with pytest.raises(Invalid, match="schedule is one of"):
        dt.optimize(mlp(), schedule="eager")
