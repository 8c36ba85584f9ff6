"""A cell changes a session whose widget shows, or checks, the graph of before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.exploration.session.measurement import Measurement
from tests.exploration.screen import Screen


@pytest.fixture
def session() -> dt.Session:
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU())
    return dt.Session(model, torch.randn(4, 4), torch.randn(4, 3), loss=nn.functional.mse_loss)


@pytest.fixture
def screen(session: dt.Session) -> Screen:
    return Screen(session)


def test_a_box_is_one_of_the_graph_that_is_drawn(screen: Screen, session: dt.Session) -> None:
    drawn = {box["key"]: box["label"] for box in screen.state["view"]["boxes"] if box["kind"] == "operator"}
    codes = {key: screen.ask("code", key=key)["code"] for key in drawn}
    end = screen.state["view"]["ends"][-1]["key"]
    session.apply("fuse_elementwise")  # a cell, before the page is refreshed
    assert {key: screen.ask("code", key=key)["code"] for key in drawn} == codes
    assert screen.ask("details", key=end)["details"]["kind"] == "array"
    screen.ask("refresh")
    gone = next(key for key in drawn if key not in screen.requests.view.tree.items)
    for kind in ("code", "find", "details"):
        assert "not in the graph any more" in screen.ask(kind, key=gone)["error"]
    assert "is no operator" in screen.ask("code", key="step")["error"]


def test_a_check_is_about_the_graph_that_it_began_with(
    screen: Screen, session: dt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell may change the session while the widget's thread verifies or measures it."""

    def check(*_: Any, **__: Any) -> Measurement:
        session.undo() if session.history else session.apply("fuse_elementwise")
        return Measurement({}, 1)

    monkeypatch.setattr(session, "verify", check)
    monkeypatch.setattr(session, "measure", check)
    for kind in ("verify", "measure"):
        assert "the graph has changed since" in screen.ask(kind)["note"]
        assert screen.state["notes"] == {} and screen.state["totals"]["seconds"] is None
