"""What a widget shows and answers while its model is captured."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.errors import CompilerError
from daceml_train.exploration.export.page import modules_html
from daceml_train.exploration.views.modules import Modules
from daceml_train.exploration.views.view import view_of
from daceml_train.exploration.widget.opening import Opening, plain
from daceml_train.exploration.widget.work import Work

MODEL = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.GELU(), nn.LayerNorm(16)), nn.Linear(16, 3))


def session() -> dt.Session:
    return dt.Session(MODEL, torch.randn(4, 8), torch.randn(4, 3), loss=nn.functional.mse_loss)


class Screen:
    """Takes what an opening sends, publishes and hands over."""

    def __init__(self, capture: Any) -> None:
        self.answers: list[dict[str, Any]] = []
        self.states: list[dict[str, Any]] = []
        self.made: tuple[dt.Session, list[str]] | None = None
        self.work = Work()
        send = lambda message, _: self.answers.append(message)  # noqa: E731
        self.opening = Opening(MODEL, capture, send, self.states.append, self._done, self.work)
        self.opening.show()

    def _done(self, result: dt.Session, opened: list[str]) -> None:
        self.made = result, opened

    def ask(self, kind: str, **what: Any) -> Any:
        return self.opening.handle({"type": kind, "id": "1", **what})


def test_modules_are_shown_and_answer_before_the_capture_ends() -> None:
    go = threading.Event()

    def slow() -> dt.Session:
        go.wait(20)
        return session()

    screen = Screen(slow)
    first = screen.states[-1]
    assert first["opening"] and first["version"] == -1
    assert [row["label"] for row in first["view"]["outline"]] == ["forward", "0", "1", "0", "1", "2"]
    assert first["view"]["outline"][0]["bytes"] == sum(4 * p.numel() for p in MODEL.parameters())
    screen.opening.begin()
    screen.ask("close", key="forward/1")
    assert len(screen.states[-1]["view"]["outline"]) == 4
    screen.ask("open", key="forward/1")
    screen.ask("details", key="forward/0")
    assert "Linear(in_features=8, out_features=16, bias=True)\n144 parameters" in screen.answers[-1]["details"]["text"]
    assert screen.ask("verify")["type"] == "verify"  # waits for the graph
    assert screen.made is None
    go.set()
    assert screen.opening.session() is screen.made[0]  # type: ignore[index]
    assert screen.made[1] == ["forward/1"]  # type: ignore[index]
    shown = len(screen.states)
    screen.opening.show()
    assert len(screen.states) == shown, "the modules must not be shown over the graph"


@pytest.mark.parametrize("works", [True, False])
def test_the_executor_is_built_beside_the_capture(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def executor() -> None:
        begun.set()
        if not works:
            raise CompilerError("there is no compiler")

    monkeypatch.setattr("daceml_train.runtime.native_build.executor", executor)

    def capture() -> dt.Session:
        assert begun.wait(60)
        return session()

    screen = Screen(capture)
    screen.opening.begin()
    assert screen.opening.session() is not None and screen.answers == []


def test_keys_are_those_of_the_graph() -> None:
    keys = {row["key"] for row in Modules(MODEL).rows()}
    assert {"forward", "forward/1"} <= keys & view_of(session().graph, {}, None, 1).tree.items.keys()


def test_what_capturing_raises_is_said_and_raised() -> None:
    def broken() -> dt.Session:
        raise dt.Unsupported("no such luck")

    screen = Screen(broken)
    with pytest.raises(dt.Unsupported, match="no such luck"):
        screen.opening.session()
    state = screen.states[-1]
    assert "no such luck" in state["failed"] and not state["opening"] and not state["listing"]
    assert screen.ask("verify") is None and "no such luck" in screen.answers[-1]["error"]
    assert screen.ask("open", key="forward/1") is None


def test_a_capture_is_cancelled() -> None:
    begun = threading.Event()

    def long() -> dt.Session:
        begun.set()
        while True:
            threading.Event().wait(0.005)

    screen = Screen(long)
    screen.opening.begin()
    assert begun.wait(10)
    screen.ask("cancel")
    with pytest.raises(dt.Invalid, match="cancelled"):
        screen.opening.session()
    assert "cancelled" in screen.states[-1]["failed"]


def test_modes_of_the_calling_thread_are_seen() -> None:
    assert plain()
    with torch.autocast("cpu", torch.bfloat16):
        assert not plain()
    with torch.device("cpu"):
        assert not plain()
    with torch.no_grad():
        assert not plain()


def test_the_page_of_modules_is_escaped() -> None:
    model = nn.Sequential()
    model.add_module("<img src=x onerror=hacked()>", nn.Linear(4, 4))
    page = modules_html(model)
    assert "<img" not in page and "&lt;img src=x onerror=hacked()&gt;" in page and "80 B" in page


def test_parameters_without_sizes_have_no_bytes() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    modules = Modules(model)
    assert [row["bytes"] for row in modules.rows()] == [32, 0, 32]
    assert "0 parameters" in (modules.details("forward/0") or {})["text"]
    assert "32 B" in modules_html(model)
