"""The collector of cyclic garbage is paused during capture, and as it was before afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.collector import paused


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_it_is_as_before_afterwards() -> None:
    with paused():
        assert not gc.isenabled()
        with paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), paused():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with paused():
        pass
    assert not gc.isenabled()


def test_it_is_paused_until_the_last_thread_ends() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with paused():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with paused():
        thread.start()
        assert entered.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


@pytest.mark.compiled
@pytest.mark.parametrize("way", ["step", "optimize"])
def test_no_collection_runs_during_a_capture(way: str) -> None:
    torch._dynamo.reset()
    during: list[bool] = []

    class Model(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling():
                note()
            return super().forward(input)

    @torch._dynamo.assume_constant_result
    def note() -> int:
        during.append(gc.isenabled())
        return 0

    model = Model(3, 2)
    if way == "step":
        dt.training_step(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1))(torch.ones(4, 3))
    else:
        dt.optimize(model)(torch.ones(4, 3))
    assert during and not any(during) and gc.isenabled()
