"""Compiler commands: a time limit, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import daceml_train as dt
from daceml_train.codegen import compiler
from daceml_train.codegen.compiler import TIMEOUT, compiler_command, failure, run
from daceml_train.codegen.cpu import compile as compiling
from daceml_train.codegen.cpu.compile import compile_kernels
from daceml_train.errors import CompilerError, internal
from tests.codegen.cpu.test_compile import some_code


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler whose helper never ends and holds its output open."""
    path = tmp_path / "hangs"
    path.write_text("#!/bin/sh\n[ $1 = --version ] && exit\nsleep 4242 & echo $! >> $0.helpers\nwait\n")
    path.chmod(0o755)
    monkeypatch.setattr(compiler, "_hung", {})
    monkeypatch.setenv(TIMEOUT, "0.5")
    return path


def helpers(compiler: Path, count: int = 1) -> list[str]:
    """The helpers that a compiler has started, once there are that many."""
    noted, end = Path(f"{compiler}.helpers"), time.monotonic() + 60
    while not noted.exists() or len(found := noted.read_text().split()) < count:
        assert time.monotonic() < end, "the compiler was not started"
        time.sleep(0.01)
    return found


def lives(process: str) -> bool:
    """Whether a process still runs."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", process], capture_output=True, text=True).stdout.strip()
    return state != "" and not state.startswith("Z")


def end_soon(processes: list[str]) -> bool:
    """Whether they end within seconds."""
    end = time.monotonic() + 10
    while any(map(lives, processes)):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_compiler_that_hangs_is_ended_with_its_helpers(hanging: Path) -> None:
    start = time.monotonic()
    for _ in range(3):
        with pytest.raises(CompilerError, match=rf"hangs' did not end within 0.5 s.*{TIMEOUT}"):
            run([str(hanging), "x.cpp"])
    assert time.monotonic() - start < 10
    (helper,) = helpers(hanging)  # the compiler was asked once
    assert not lives(helper)


ALONE = """
import os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as without nohup
from concurrent.futures import ThreadPoolExecutor
from daceml_train.codegen.compiler import run
command, forks = [sys.argv[1], "x.cpp"], sys.argv[2] == "and forks"
with ThreadPoolExecutor() as pool:
    pool.submit(run, command)
    if forks:
        while not os.path.exists(f"{command[0]}.helpers"):
            time.sleep(0.01)
        if os.fork() == 0:  # as the workers of a data loader
            time.sleep(4242)
    run(command)
"""


@pytest.mark.parametrize(
    ("number", "forks"),
    [(signal.SIGKILL, ""), (signal.SIGTERM, ""), (signal.SIGHUP, ""), (signal.SIGKILL, "and forks")],
)
def test_compilers_end_with_the_process_that_needs_them(
    number: int, forks: str, hanging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMEOUT, "100")
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", ALONE, str(hanging), forks], cwd=root, start_new_session=True)
    try:
        started = helpers(hanging, 2)
        process.send_signal(number)
        assert process.wait(10) == -number
        assert end_soon(started)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if forks else process.kill()


class Late(Exception):
    """What a user's signal handler raises."""


@pytest.mark.parametrize("raised", [KeyboardInterrupt, Late])
def test_what_interrupts_a_compilation_ends_its_compilers(
    raised: type[BaseException], hanging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(*_: object) -> None:
        raise raised

    ended = threading.Event()

    def interrupt() -> None:
        helpers(hanging, 2)
        while not ended.wait(1):  # Python ignores what is raised in a finalizer
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    monkeypatch.setenv(TIMEOUT, "20")
    before, thread = signal.signal(signal.SIGUSR1, handler), threading.Thread(target=interrupt)
    thread.start()
    start = time.monotonic()
    try:
        with pytest.raises(raised):
            compile_kernels([some_code(i) for i in range(4)], tmp_path / "kernels", jobs=2, compiler=str(hanging))
        ended.set()
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - start < 10
    assert len(helpers(hanging)) == 2 and not any(map(lives, helpers(hanging)))
    assert list((tmp_path / "kernels").iterdir()) == []


@pytest.mark.compiled
def test_training_goes_on_with_a_compiler_that_hangs(
    hanging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(hanging))
    model, x = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Sigmoid()), torch.randn(3, 7)
    optimized = dt.optimize(model, cache=tmp_path / "cache")
    with pytest.warns(UserWarning, match="did not end within 0.5 s"):
        torch.testing.assert_close(optimized(x), model(x))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'error writing to k.o: No space left on device' >&2; exit 1", "No space left on device"),
        ("echo 'cc1plus: out of memory: Cannot allocate memory' >&2; exit 1", "Cannot allocate memory"),
        ("echo 'fatal error: Killed signal terminated program cc1plus' >&2; exit 1", "it was killed"),
        ("kill -9 $$", "it was killed"),
    ],
)
def test_what_the_machine_lacks_is_no_defect_of_the_text(script: str, why: str, tmp_path: Path) -> None:
    error = failure(run(["sh", "-c", script]), "g++ on a kernel")
    assert str(error).startswith(f"g++ on a kernel failed: {why}")
    assert not internal(error)


def test_a_text_that_the_compiler_refuses_is_a_defect() -> None:
    assert internal(failure(run(["sh", "-c", "echo 'error: expected ;' >&2; exit 1"]), "g++ on a kernel"))


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan"])
def test_a_limit_that_is_no_time_is_named(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, given)
    with pytest.raises(CompilerError, match=f"{TIMEOUT}='{given}' is not a positive number"):
        run(["true"])


def test_the_variable_may_bring_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "ccache 'my g++' -m64")
    assert compiler_command() == ["ccache", "my g++", "-m64"]
    assert compiler_command("clang++") == ["clang++"]


def test_a_full_disk_is_a_compilers_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiling, "install", full)
    with pytest.raises(CompilerError, match="kernel_x.so cannot be written.*No space left"):
        compiling.build('extern "C" void kernel_x() {}', tmp_path / "kernel_x.so")
    assert list(tmp_path.iterdir()) == []
