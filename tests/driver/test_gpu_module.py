"""Modules through the GPU's launch path, on an emulated one; what is refused; what memory runs out for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of
from daceml_train.errors import DeviceMismatch, Invalid, OutOfMemory, Unsupported
from daceml_train.runtime.gpu.arena import DeviceArena
from daceml_train.runtime.gpu.cuda_graph import HostScalars
from daceml_train.runtime.placement import common_device, device_of
from tests.driver.conformity import distance
from tests.driver.networks import mlp
from tests.runtime.emulation import Emulated, emulated

pytestmark = pytest.mark.compiled


def test_forward_and_backward() -> None:
    theirs = mlp()
    with emulated() as device:
        ours = dt.optimize(copy.deepcopy(theirs))
        for size in (6, 6, 3):
            x, y = torch.randn(size, 8, requires_grad=True), torch.randn(size, 4)
            found, expected = ours(x), theirs(x)
            assert distance(found, expected) < 1e-5
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                p.grad = q.grad = None
            F.mse_loss(expected, y).backward()
            wanted, x.grad = x.grad, None
            loss = F.mse_loss(found, y)
            loss.backward(retain_graph=True)
            loss.backward()
            assert x.grad is not None and wanted is not None and distance(x.grad / 2, wanted) < 1e-5
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None and distance(p.grad / 2, q.grad) < 1e-5
    assert device.launches > 0


def test_buffers_and_no_gradients() -> None:
    theirs = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    with emulated():
        ours = dt.optimize(copy.deepcopy(theirs))
        for mode in (True, True, False):
            ours.train(mode), theirs.train(mode)
            x = torch.randn(3, 2, 6, 6)
            with torch.no_grad():
                assert distance(ours(x), theirs(x)) < 1e-5
        for found, expected in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert distance(found.float(), expected.float()) < 1e-5


class Dropped(nn.Module):
    """Attention with masks and dropout, whose kernel for the CPU is written by hand."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(mask, float("-inf"))
        return F.dropout(scores.softmax(-1), 0.5, self.training) @ v


@pytest.mark.parametrize("training", [False, True])
def test_attention_is_written_out(training: bool) -> None:
    theirs = Dropped().train(training)
    q, k, v = (torch.randn(2, 3, 5, 16, requires_grad=True) for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with emulated():
        ours = dt.optimize(Dropped().train(training))
        torch.manual_seed(0)
        found = ours(q, k, v, mask)
        found.sum().backward()
        state = state_of(ours)
        assert state is not None and state.backend.breaks == []
    torch.manual_seed(0)
    on_cpu = dt.optimize(Dropped().train(training))(q, k, v, mask)  # the same seed draws the same numbers
    assert distance(found, on_cpu) < 1e-5
    if not training:
        assert distance(found, theirs(q, k, v, mask)) < 1e-5


def test_other_devices_are_refused_by_name() -> None:
    here, there = torch.zeros(3), torch.zeros(3, device="meta")
    with pytest.raises(DeviceMismatch, match=r"model.weight is on cpu and x on meta: a program runs on one device"):
        common_device({"model.weight": here, "x": there})
    with pytest.raises(Unsupported, match="CPUs and CUDA devices, not on meta"):
        device_of(torch.device("meta"))
    assert common_device({"x": torch.zeros(()), "y": here}).target == "cpu"
    model = mlp()
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(Invalid, match="argument 0 is on device meta"):
        step(torch.zeros(6, 8, device="meta"), torch.zeros(6, 4))


def test_out_of_memory_names_the_biggest_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(arena: DeviceArena, nbytes: int) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")

    monkeypatch.setattr(DeviceArena, "grow", full)
    model = mlp()
    with emulated():
        step = dt.training_step(model, F.mse_loss, torch.optim.Adam(model.parameters()))
        with pytest.raises(OutOfMemory) as caught:
            step(torch.randn(6, 8), torch.randn(6, 4))
    text = str(caught.value)
    assert "the arena of planned arrays takes" in text and "Rematerialize(budget=" in text
    assert "f32[16, 16]" in text and "the input" in text


def test_numbers_of_the_cpu_are_copied_when_they_change() -> None:
    sources = [torch.tensor(1, dtype=torch.int32), torch.tensor(0.5, dtype=torch.float64), torch.tensor(True)]
    mirror = HostScalars(DeviceArena(Emulated()), sources)
    sources[1].fill_(0.25)
    assert [c.dtype for c in mirror.copies] == [s.dtype for s in sources]
    assert mirror.copies[1] == 0.5
    mirror.refresh()
    assert [c.item() for c in mirror.copies] == [1, 0.25, True]


def test_functions_of_attention() -> None:
    """The functions that a GPU calls, on operands for which no kernel of PyTorch's is there."""
    from daceml_train.runtime.gpu.functions import attention, attention_grad

    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    mask = torch.randn(5, 7, dtype=torch.float64)
    options: list[dict[str, Any]] = [{}, {"is_causal": True}, {"attn_mask": mask}]
    for option in options:
        expected = F.scaled_dot_product_attention(q, k, v, scale=0.3, **option)
        grad = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, (q, k, v), grad)
        causal, given = option.get("is_causal", False), option.get("attn_mask")
        with torch.no_grad():
            y, level = attention(q, k, v, causal, given, 0.3)
            found = attention_grad(grad, q, k, v, y, level, causal, given, 0.3)
        assert distance(y, expected) < 1e-12
        assert all(distance(a, b) < 1e-12 for a, b in zip(found, wanted, strict=True))
