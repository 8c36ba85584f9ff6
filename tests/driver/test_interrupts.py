"""Signals, forks and errors in the middle of a step: exceptions of handlers reach the user, and nothing stays half-made."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.interrupts import Turns
from daceml_train.driver.on_ranks import OnRanks
from daceml_train.errors import Invalid
from daceml_train.passes.pipeline import Pipeline

pytestmark = pytest.mark.compiled


class Late(Exception):
    """A user's time limit."""


@pytest.fixture
def alarm() -> Iterator[None]:
    """A handler of SIGALRM that raises."""

    def late(*arguments: Any) -> None:
        raise Late("too late")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.signal(signal.SIGALRM, before)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(6, 8), torch.randn(6, 4)


def interrupted_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let the signal arrive at the first call of a method."""
    method, calls = getattr(owner, name), []

    def call(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGALRM)
        return method(*arguments, **keywords)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("at", ["trace", "passes"])
def test_what_a_handler_raises_reaches_the_caller_of_a_step(
    at: str, alarm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, x, y = parts()
    step = dt.training_step(model, F.mse_loss, optimizer, cache=tmp_path)
    if at == "trace":
        interrupted_once(monkeypatch, type(step), "_collect")
    else:
        interrupted_once(monkeypatch, Pipeline, "run")
    with pytest.raises(Late):
        step(x, y)
    step(x, y)
    assert step.breaks == [] and len(step.records) == 1


def test_what_a_handler_raises_reaches_the_caller_of_a_module(
    alarm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, x, _ = parts()
    ours = dt.optimize(model, cache=tmp_path)
    interrupted_once(monkeypatch, Pipeline, "run")
    with pytest.raises(Late):
        ours(x)
    torch.testing.assert_close(ours(x), model(x))
    assert dt.report(ours).breaks == ()


def test_a_step_in_a_handler_of_a_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, x, y = parts()
    step = dt.training_step(model, F.mse_loss, optimizer)
    step(x, y)
    before = signal.signal(signal.SIGALRM, lambda *arguments: step(x, y))
    try:
        interrupted_once(monkeypatch, type(step), "_bound_for")
        with pytest.raises(Invalid, match="in the same thread, as from a signal handler"):
            step(x, y)
    finally:
        signal.signal(signal.SIGALRM, before)
    step(x, y)


def test_a_fork_while_another_thread_takes_its_turn() -> None:
    turns, entered, leave = Turns("a step"), threading.Event(), threading.Event()

    def hold() -> None:
        with turns:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    child = os.fork()
    if not child:
        with turns:
            os._exit(0)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with turns:
        child = os.fork()
        if not child:  # the turn is that of the thread which forked
            os._exit(3 if turns._lock.locked() else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_the_optimizers_state_is_whole_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, x, y = parts()
    theirs = copy.deepcopy(model)
    make, failed = OnRanks._make_state, []

    def fail(step: Any, parameter: torch.Tensor, name: str) -> None:
        if name == "exp_avg_sq" and not failed:
            failed.append(name)
            raise MemoryError
        make(step, parameter, name)

    step = dt.training_step(model, F.mse_loss, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(OnRanks, "_make_state", fail)
        step(x, y)
    assert failed
    other = torch.optim.AdamW(theirs.parameters())
    F.mse_loss(theirs(x), y).backward()
    other.step()
    for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_another_default_device() -> None:
    model, optimizer, x, y = parts()
    theirs = copy.deepcopy(model)
    other = torch.optim.AdamW(theirs.parameters())
    torch.set_default_device("meta")
    try:
        step = dt.training_step(model, F.mse_loss, optimizer)
        for _ in range(2):
            step(x, y)
            other.zero_grad()
            F.mse_loss(theirs(x), y).backward()
            other.step()
    finally:
        torch.set_default_device(None)
    assert step.breaks == []
    assert {t.device.type for state in optimizer.state.values() for t in state.values()} == {"cpu"}
    for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
