"""Long work that is cancelled while native code runs: at worst what it is at is finished, and nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.codegen.cpu import compile as compilation
from daceml_train.exploration.session.program import Program
from daceml_train.exploration.widget.requests import Requests
from daceml_train.exploration.widget.work import Cancelled, Work


def until(condition: Callable[[], Any], seconds: float = 600.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


def test_compilation_ends_with_what_the_compiler_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def build(source: str, path: Path, compiler: str | None = None) -> None:
        built.append(source)
        time.sleep(0.05)

    monkeypatch.setattr(compilation, "build", build)
    codes: Any = [SimpleNamespace(key=f"k{i}", source=str(i)) for i in range(400)]
    work, ended = Work(), list[bool]()

    def long() -> None:
        try:
            compilation.compile_kernels(codes, tmp_path, jobs=2)
        except Cancelled:
            ended.append(True)

    work.put(long, "verify")
    until(lambda: len(built) > 2)
    at = len(built)
    work.cancel()
    until(lambda: ended)
    assert len(built) < at + 100, "kernels that had not begun were compiled all the same"
    count = len(built)
    time.sleep(0.15)
    assert len(built) == count


@pytest.mark.compiled
def test_a_measurement_ends_between_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU())
    session = dt.Session(model, torch.randn(4, 4), torch.randn(4, 3), loss=nn.functional.mse_loss)
    session.apply("fuse_elementwise")
    runs, native = [0], threading.Event()
    run = Program.run

    def counted(self: Program, tensors: Any) -> Any:
        runs[0] += 1
        native.set()
        result = run(self, tensors)
        native.clear()
        return result

    monkeypatch.setattr(Program, "run", counted)
    answers: list[dict[str, Any]] = []
    requests = Requests(session, lambda message, _: answers.append(message), lambda state: None, Work())

    def answer(number: str) -> dict[str, Any] | None:
        return next((a for a in answers if a["type"] == "answer" and a["id"] == number), None)

    before, weights = session.version, model[0].weight.clone()
    requests.handle({"type": "measure", "id": "long", "repeats": 10**7})
    until(lambda: runs[0] > 20)
    assert native.wait(10)  # the program runs: native code, which no exception reaches
    requests.handle({"type": "cancel", "id": "cancel"})
    until(lambda: answer("long"))
    assert answer("cancel")["note"] == "cancelling: measure"  # type: ignore[index]
    assert answer("long")["error"] == "cancelled; nothing was changed"  # type: ignore[index]
    assert session.version == before and len(session.history) == 1 and torch.equal(model[0].weight, weights)
    requests.handle({"type": "measure", "id": "short", "repeats": 2})
    until(lambda: answer("short"))
    assert "measured" in answer("short")["note"]  # type: ignore[index]
