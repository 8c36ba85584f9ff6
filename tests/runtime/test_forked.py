"""A copy belongs to the process that forked it: whatever the user forks meanwhile neither ends it nor reads its messages."""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.background import BackgroundStep
from daceml_train.runtime import forked
from daceml_train.runtime.forked import Forked, Tell


def in_a_child(work: Callable[[], Any]) -> None:
    """Run `work` in a process that is forked as users fork."""
    pid = os.fork()
    if not pid:
        right = False
        try:
            work()
            right = True
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(not right)
    assert os.waitpid(pid, 0)[1] == 0


def result_of(copy: Forked) -> tuple[list[Any], Any]:
    found = []
    while copy.result is None:
        found += copy.poll()
        time.sleep(0.01)
    return found, copy.result


def after_a_file(path: Path) -> Callable[[Tell], dict[str, Any]]:
    """Work that says what it waits for, and ends once it is there."""

    def work(tell: Tell) -> dict[str, Any]:
        tell({"waits": path.name})
        while not path.exists():
            time.sleep(0.01)
        return {"found": True}

    return work


@pytest.mark.parametrize("told", [True, False])  # of the fork by Python, or not, as where native code forks
@pytest.mark.parametrize("how", ["drops it", "ends it", "asks it", "exits"])
def test_a_child_of_the_user_has_no_part_in_it(
    how: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not told:
        monkeypatch.setattr(forked, "_copies", weakref.WeakSet())
    copies = [Forked(after_a_file(tmp_path / "file"))]
    if not told:
        forked._copies.clear()

    def child() -> None:
        if how == "asks it":
            time.sleep(0.1)  # the message is there
            assert copies[0].poll() == [] and copies[0].foreign and not copies[0].running
            assert copies[0].result == {"error": forked.FOREIGN}
        elif how == "ends it":
            copies[0].end()
        elif how == "exits":
            weakref.finalize._exitfunc()  # type: ignore[attr-defined]
        copies.clear()
        gc.collect()

    in_a_child(child)
    assert copies[0].running
    (tmp_path / "file").touch()
    assert result_of(copies[0]) == ([{"waits": "file"}], {"found": True})


def test_it_ends_with_its_process_where_a_child_lives_on() -> None:
    receive, send = os.pipe()
    owner = os.fork()
    if not owner:
        copy = Forked(lambda tell: time.sleep(600) or {})
        child = os.fork()
        if not child:
            time.sleep(600)
        os.write(send, f"{copy.pid} {child}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(owner, 0)
    copied, child = map(int, os.read(receive, 100).split())
    try:
        end = time.monotonic() + 10
        while copied in forked.family(copied) and state(copied) != "Z":
            assert time.monotonic() < end, "the copy lives on"
            time.sleep(0.02)
        assert state(child) != "Z"
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(receive)
        os.close(send)


def state(pid: int) -> str:
    """The state of a process, `Z` if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The threads of OpenMP are not copied: PyTorch's in a child would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.compiled
@pytest.mark.usefixtures("one_thread")
def test_a_step_that_compiles_is_compiled_whatever_a_child_does(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = dt.training_step(model, F.cross_entropy, optimizer, compile="background", cache=tmp_path)
    assert isinstance(step, BackgroundStep)
    x, y = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)
    for _ in range(2):
        step(x, y)
    assert "so far" in step.compilation[-1]

    def child() -> None:
        assert step.compilation == []
        step(x, y)  # finds that it has no copy, and makes one
        assert not step.breaks and "so far" in step.compilation[-1]

    in_a_child(child)
    assert step.wait(300)
    step(x, y)
    assert not step.breaks and "takes over" in step.compilation[-1]
