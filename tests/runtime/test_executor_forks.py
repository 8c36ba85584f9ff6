"""A process that is forked while a plan runs: its child can run that plan, and others on the same arena."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from daceml_train.errors import ExecutionError
from daceml_train.runtime.executor import Arena
from tests.runtime.executing import Builder

pytestmark = pytest.mark.compiled


def within() -> None:
    """What the operator does before it computes."""


@torch.library.custom_op("daceml_executor::within", mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    """Twice the argument."""
    within()
    return x * 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The threads of OpenMP are not copied."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plan_on(arena: Arena, like: torch.Tensor) -> Builder:
    """Four times its input, by way of the arena."""
    builder = Builder(arena=arena)
    _, given = builder.input(like)
    _, kept = builder.arena(0, list(like.shape))
    result, _ = builder.result(like)
    builder.plan.call("daceml_executor::within", "", [given], [kept])
    builder.plan.call("daceml_executor::within", "", [kept], [result])
    builder.plan.finalize(4 * like.numel(), [result])
    return builder


def in_a_child(work: Callable[[], bool]) -> None:
    """Run `work` in a forked process, which must not hang."""
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        os._exit(not work())
    assert os.waitpid(pid, 0)[1] == 0


def test_a_child_runs_what_another_thread_ran_at_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    x, arena = torch.randn(3), Arena()
    plans = [plan_on(arena, x) for _ in range(2)]
    entered, leave = threading.Event(), threading.Event()
    for plan in plans:
        plan.plan.run([x])

    def wait() -> None:
        if threading.current_thread() is thread:
            entered.set()
            leave.wait()

    def child() -> bool:
        monkeypatch.undo()
        right = []

        def often() -> None:
            for i in range(50):
                y = torch.full((3,), float(i))
                right.append(all(torch.equal(plan.plan.run([y])[0], 4 * y) for plan in plans))

        threads = [threading.Thread(target=often) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return right == [True] * 150

    thread = threading.Thread(target=lambda: found.extend(plans[0].plan.run([x])))
    found: list[torch.Tensor] = []
    monkeypatch.setattr(f"{__name__}.within", wait)
    thread.start()
    entered.wait()
    try:
        in_a_child(child)
    finally:
        leave.set()
        thread.join()
    assert torch.equal(found[0], 4 * x)


def test_a_thread_that_forks_within_a_plan_still_runs_it_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    x, builder, pids = torch.randn(3), plan_on(Arena(), torch.randn(3)), []

    def fork() -> None:
        if not pids:
            pids.append(os.fork())
        elif not pids[0]:
            with pytest.raises(ExecutionError, match="already running on this thread"):
                builder.plan.run([x])

    monkeypatch.setattr(f"{__name__}.within", fork)
    right = False
    try:
        first = builder.plan.run([x])[0]
        monkeypatch.undo()
        signal.alarm(0 if pids[0] else 20)
        right = torch.equal(first, 4 * x) and torch.equal(builder.plan.run([x])[0], 4 * x)
    finally:
        if pids[0] == 0:
            os._exit(not right)
    assert right and os.waitpid(pids[0], 0)[1] == 0
