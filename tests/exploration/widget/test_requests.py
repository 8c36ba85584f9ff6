"""What a widget asks and is answered, without a browser: stale clicks, failures, filters, files."""

from __future__ import annotations

import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.exploration.session.progress import CheckProgress
from daceml_train.exploration.widget.data import ROWS, sent
from daceml_train.exploration.widget.requests import Requests
from daceml_train.exploration.widget.telling import Telling
from daceml_train.exploration.widget.viewer import viewer_source
from daceml_train.exploration.widget.work import Cancelled, Work
from daceml_train.graph.text import show
from tests.exploration.screen import Screen


@pytest.fixture(scope="module")
def captured() -> dt.Session:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    return dt.Session(model, x, y, loss=nn.functional.cross_entropy, optimizer=optimizer)


@pytest.fixture
def session(captured: dt.Session) -> dt.Session:
    captured.jump(0)
    return captured


@pytest.fixture
def screen(session: dt.Session) -> Screen:
    return Screen(session)


def test_matches_are_ranked_and_highlight_boxes(screen: Screen) -> None:
    matches = screen.state["matches"]
    assert matches and len(matches) <= ROWS and not screen.state["listing"]
    known = [m["bytes"] for m in matches if m["bytes"] is not None]
    assert known == sorted(known)
    boxes = {box["key"] for box in screen.state["view"]["boxes"]}
    assert all(set(m["keys"]) <= boxes for m in matches)
    assert any(m["keys"] for m in matches)


def test_apply_undo_redo_jump(screen: Screen, session: dt.Session) -> None:
    first = screen.state["matches"][0]
    before = screen.state["totals"]["bytes"]
    told = screen.ask("preview", number=screen.first)["preview"]
    assert session.history == ()
    assert "error" not in screen.ask("apply", number=screen.first)
    assert screen.state["totals"]["bytes"] == before + first["bytes"] == told["rows"][0][2]
    assert screen.state["history"][0]["name"] == first["name"] and screen.state["at"] == 1
    screen.ask("undo")
    assert screen.state["totals"]["bytes"] == before and screen.state["at"] == 0
    screen.ask("redo")
    screen.ask("jump", number=0)
    assert screen.state["at"] == 0 and len(screen.state["history"]) == 1
    assert "nothing to undo" in screen.ask("undo")["error"]


def test_the_default_pipeline_is_one_click(screen: Screen, session: dt.Session) -> None:
    """After steps by hand, too: the passes that come before the gradients are left out once these are there."""
    assert "steps" in screen.ask("default")["note"]
    whole = screen.state["at"]
    assert session.pipeline() == dt.TRAINING and session.state.bytes < session.start.bytes
    screen.ask("jump", number=0)
    screen.ask("apply", **{"pass": "fuse_elementwise"})
    assert session.state.differentiated and screen.ask("default").get("error") is None
    assert 1 < len(session.history) <= whole
    assert str(session.verify()).startswith("all right")


def test_a_stale_click_changes_nothing(screen: Screen, session: dt.Session) -> None:
    old, number = screen.state["version"], screen.first
    screen.ask("apply", number=number)
    graph = show(session.graph)
    answer = screen.ask("apply", number=number, version=old)
    assert "the graph has changed" in answer["error"]
    assert show(session.graph) == graph and screen.state["at"] == 1


def test_what_a_cell_did_is_shown(screen: Screen, session: dt.Session) -> None:
    session.apply("fuse_elementwise")
    answer = screen.ask("apply", number=screen.first)
    assert "the graph has changed" in answer["error"]
    assert screen.state["version"] == session.version and screen.state["at"] == 1


@pytest.mark.parametrize(
    "request_, sentence",
    [
        ({"type": "apply", "number": 10**6}, "not listed any more"),
        ({"type": "apply", "pass": "no_such_pass"}, "no_such_pass"),
        ({"type": "apply", "pass": "rematerialize", "options": {"budget": "__import__('os')"}}, "budget"),
        ({"type": "preview", "pass": "rematerialize", "options": {"nonsense": "1"}}, "nonsense"),
        ({"type": "details", "key": "no such box"}, "not in the graph"),
        ({"type": "replay", "path": "no/such.json"}, "there is no file"),
        ({"type": "save", "path": " "}, "a file's path is needed"),
        ({"type": "__init__"}, "unknown request"),
        ({"type": "keep", "array": "x"}, "no step of the history"),
    ],
)
def test_what_is_refused_says_why(screen: Screen, session: dt.Session, request_: dict[str, Any], sentence: str) -> None:
    graph = show(session.graph)
    kind = request_.pop("type")
    assert sentence in screen.ask(kind, **request_)["error"]
    assert show(session.graph) == graph and session.history == ()


def test_a_pass_that_raises_loses_nothing(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("inside a pass")

    screen.ask("apply", number=screen.first)
    monkeypatch.setattr(screen.requests.session, "apply", broken)
    assert "ZeroDivisionError: inside a pass" in screen.ask("apply", number=screen.first)["error"]
    assert screen.state["at"] == 1 and screen.state["matches"]


def test_filters(screen: Screen) -> None:
    screen.ask("filter", **{"pass": "fuse_elementwise"})
    assert {m["name"] for m in screen.state["matches"]} == {"fuse_elementwise"}
    screen.ask("filter", refused=True)
    assert any(m["refusal"] for m in screen.state["matches"])
    match = next(m for m in screen.state["matches"] if m["keys"])
    screen.ask("filter", keys=match["keys"][:1])
    assert screen.state["found"] > 0
    screen.ask("filter", text="layer_norm")
    assert screen.state["filter"] == {"text": "layer_norm"}


def test_open_close_search_details(screen: Screen) -> None:
    screen.ask("open", key="update")
    assert "update" in screen.state["view"]["open"]
    screen.ask("close", key="update")
    assert "update" not in screen.state["view"]["open"]
    found = screen.ask("search", text="gelu")["found"]
    assert screen.ask("find", key=found[0]["key"])["keys"] == [found[0]["key"]]
    told = screen.ask("details", key=found[0]["key"])["details"]
    assert told["label"] == found[0]["label"] and told["code"]
    end = screen.state["view"]["ends"][0]["key"]
    assert screen.ask("details", key=end)["details"]["kind"] == "array"


def test_looking_does_not_wait_for_work(session: dt.Session) -> None:
    answers: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    work, go, begun = Work(), threading.Event(), threading.Event()
    requests = Requests(session, lambda message, _: answers.append(message), states.append, work)
    requests.show()
    end = time.monotonic() + 60
    while (not states or states[-1]["listing"]) and time.monotonic() < end:
        time.sleep(0.01)
    wanted = states[-1]["matches"][0]
    other = next(m["name"] for m in states[-1]["matches"] if m["name"] != wanted["name"])
    work.put(lambda: (begun.set(), go.wait(20)), "long")  # type: ignore[arg-type, return-value]
    assert begun.wait(5)
    requests.handle({"type": "open", "id": "look", "key": "update"})
    requests.handle({"type": "apply", "id": "work", "number": wanted["number"], "version": session.version})
    requests.handle({"type": "filter", "id": "other", "pass": other})  # another match is the first from here on
    assert [a["id"] for a in answers if a["type"] == "answer" and a["id"]] == ["look", "other"]
    assert "update" in states[-1]["view"]["open"] and states[-1]["matches"][0]["name"] == other
    go.set()
    while not any(a["type"] == "answer" and a["id"] == "work" for a in answers) and time.monotonic() < end:
        time.sleep(0.01)
    assert session.history[0].where == wanted["where"] and session.history[0].name == wanted["name"]


class Passes(Work):
    """A queue that runs one call at a time, when it is told to."""

    def __init__(self) -> None:
        super().__init__(threads=False)
        self.calls: list[Any] = []

    @property
    def waiting(self) -> bool:
        return bool(self.calls)

    def put(self, call: Any, what: str) -> None:
        self.calls.append(call)

    def run(self) -> None:
        self.calls.pop(0)()


def test_matches_are_there_before_all_are_found_and_keep_their_numbers(
    session: dt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daceml_train.exploration.widget.requests.OFTEN", 0)
    states: list[dict[str, Any]] = []
    requests = Requests(session, lambda *_: None, states.append)
    requests.show()
    partial = [state for state in states if state["listing"] and state["matches"]]
    assert len(partial) > 3 and not states[-1]["listing"]
    counts = [state["found"] for state in states]
    assert counts == sorted(counts) and counts[-1] == len(session.matches())
    last = {match["number"]: match["where"] for match in states[-1]["matches"]}
    for state in partial:
        known = [m["bytes"] for m in state["matches"] if m["bytes"] is not None]
        assert known == sorted(known)
        assert all(last.get(m["number"], m["where"]) == m["where"] for m in state["matches"])
    old = states[-1]["matches"][0]["number"]
    requests.handle({"type": "filter", "id": "1", "refused": True})  # another list: the number on a page stays valid
    requests.handle({"type": "apply", "id": "2", "number": old, "version": session.version})
    assert session.history[0].where == last[old]
    assert min(match["number"] for match in states[-1]["matches"]) > old


def test_other_work_goes_before_the_rest_of_the_list(session: dt.Session) -> None:
    states: list[dict[str, Any]] = []
    work = Passes()
    requests = Requests(session, lambda *_: None, states.append, work)
    requests.show()
    requests.handle({"type": "apply", "id": "1", "pass": "fuse_elementwise", "version": session.version})
    work.run()  # the first pass, and then the list waits
    assert not session.history
    work.run()
    assert session.history and states[-1]["listing"] and states[-1]["version"] == session.version
    while work.calls:
        work.run()
    assert not states[-1]["listing"] and states[-1]["found"] == len(session.matches())


def test_recompute_and_keep(screen: Screen, session: dt.Session) -> None:
    kept = [k for k in screen.state["kept"] if not k["rematerialized"]]
    answers = [screen.ask("rematerialize", array=k["array"]) for k in kept[:6]]
    done = [k for k, answer in zip(kept, answers, strict=False) if "error" not in answer]
    assert done, answers
    assert any(k["rematerialized"] for k in screen.state["kept"])
    steps = len(session.history)
    assert "is kept" in screen.ask("keep", array=done[0]["array"])["note"]
    assert len(session.history) < steps
    first = session.history[0].transformation.recompute[0]  # type: ignore[attr-defined]
    session.apply(dt.Pipeline.parse("intra_operator: bucket"))
    screen.ask("refresh")
    steps = len(session.history)
    assert screen.ask("keep", array=first)["note"] == f"{first} is kept"  # also passes that change nothing stay
    assert len(session.history) == steps - 1 and not session.undone


def test_save_replay_export(screen: Screen, session: dt.Session, tmp_path: Path) -> None:
    screen.ask("apply", number=screen.first)
    graph = show(session.graph)
    assert "saved" in screen.ask("save", path=str(tmp_path / "steps.json"))["note"]
    screen.ask("jump", number=0)
    assert "error" not in screen.ask("replay", path=str(tmp_path / "steps.json"))
    assert show(session.graph) == graph
    (tmp_path / "bad.json").write_text("{]")
    assert "error" in screen.ask("replay", path=str(tmp_path / "bad.json"))
    assert show(session.graph) == graph
    screen.ask("export", path=str(tmp_path / "page.html"))
    assert len((tmp_path / "page.html").read_text()) < 300_000


@pytest.mark.compiled
def test_verify_and_measure() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU())
    screen = Screen(dt.Session(model, torch.randn(4, 4), torch.randn(4, 3), loss=nn.functional.mse_loss))
    screen.ask("apply", **{"pass": "fuse_elementwise"})
    assert screen.ask("verify")["note"].startswith("all right")
    assert "now" in screen.ask("measure", repeats=2)["note"]
    timed = [box["seconds"] for box in screen.state["view"]["boxes"] if "seconds" in box]
    assert timed and min(timed) > 0 and screen.state["totals"]["seconds"] > 0
    assert set(screen.state["notes"]) == {"version", "verified", "measured"}
    screen.ask("undo")
    assert screen.state["notes"] == {} and screen.state["totals"]["seconds"] is None


def test_the_viewer_is_the_one_that_dace_brings() -> None:
    assert viewer_source()[:2] == b"\x1f\x8b" and len(viewer_source()) < 3_000_000


def test_work_is_cancelled_and_goes_on() -> None:
    work, messages = Work(), list[str]()
    started, ended = threading.Event(), threading.Event()

    def long() -> None:
        started.set()
        try:
            while True:
                time.sleep(0.005)
        except Cancelled:
            messages.append("cancelled")

    work.put(long, "verify")
    assert started.wait(5)
    assert work.cancel() == "verify"
    work.put(lambda: (messages.append("next"), ended.set()), "next")  # type: ignore[arg-type, return-value]
    assert ended.wait(5) and messages == ["cancelled", "next"]
    time.sleep(0.05)
    assert work.cancel() == ""


def test_the_widget_is_a_widget(session: dt.Session) -> None:
    pytest.importorskip("anywidget")
    result = dt.explore(session)
    assert result.state["name"] == "Sequential, Adam"
    bundle = result._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in data and len(data["text/html"]) < 300_000
    with pytest.raises(dt.Invalid, match="already has its model and inputs"):
        dt.explore(session, torch.randn(4, 8))


def test_matches_come_with_totals_per_pass_and_module(screen: Screen, session: dt.Session) -> None:
    groups, found = screen.state["groups"], session.matches()
    assert sum(group["count"] for group in groups) == len(found) and not any(group["refused"] for group in groups)
    totals = [group["bytes"] for group in groups]
    assert totals == sorted(totals) and totals[0] < 0
    for group in groups:
        own = [match for match in found if match.name == group["name"]]
        assert group["bytes"] == sum(match.bytes or 0 for match in own)
        assert {m["name"]: m["count"] for m in group["modules"]} == Counter(match.module for match in own)
    assert {group["name"] for group in groups} == {match["name"] for match in screen.state["matches"]}
    screen.ask("filter", refused=True)
    assert any(group["refused"] for group in screen.state["groups"])


def test_each_pass_has_some_of_the_matches_that_are_sent() -> None:
    many: list[Any] = [SimpleNamespace(name="first") for _ in range(2 * ROWS)]
    few = [SimpleNamespace(name="second") for _ in range(3)]
    chosen = sent(many + few)
    assert len(chosen) == ROWS and chosen[-3:] == few and chosen[:-3] == many[: ROWS - 3]
    assert sent(few) == few


def test_a_preview_has_the_picture_after_it(screen: Screen, session: dt.Session) -> None:
    before = session.graph
    made = screen.ask("preview", number=screen.first)["preview"]
    boxes = {box["key"] for box in screen.state["view"]["boxes"]}
    assert made["keys"] and set(made["keys"]) <= boxes
    after = made["after"]
    assert after["keys"] and set(after["keys"]) <= {box["key"] for box in after["boxes"]}
    assert session.graph is before
    screen.ask("apply", number=screen.first)
    assert after["sdfg"] == screen.state["sdfg"]
    assert after["boxes"] == screen.state["view"]["boxes"]


@pytest.mark.compiled
def test_checks_tell_progress_and_first_results(screen: Screen) -> None:
    for kind, stages in (
        (
            "verify",
            (
                "lowering the forward pass",
                "lowering the program",
                "running PyTorch",
                "with gradients",
                "float64",
                "comparing all tensors",
            ),
        ),
        ("measure", ("warming up eager", "applying the default pipeline", "lowering now", "warming up now")),
    ):
        before = len(screen.answers)
        assert "error" not in screen.ask(kind, repeats=2)
        told = [message for message in screen.answers[before:] if message["type"] == "progress"]
        assert all(message["id"] == "1" and message["kind"] == kind for message in told)
        text = "\n".join(message["text"] for message in told)
        assert all(stage in text for stage in stages), text
        partial = [message["partial"] for message in told if "partial" in message]
        if kind == "verify":
            assert len(partial) == 2 and all(text.startswith("all right: 1 result") for text in partial)
            assert "the forward pass by itself, 1 of" in partial[0].splitlines()[0]
            assert all("tensors so far" in text.splitlines()[0] for text in partial)
        else:
            names = [[line.split()[0] for line in part.splitlines()[1:]] for part in partial]
            assert names[0] == ["eager"] and names[1] == ["now", "eager"]
            assert names[3] == ["now", "start", "default", "eager"]
            rows = screen.state["timeline"]
            assert {row["phase"] for row in rows} == {"forward", "backward", "update"}
            assert all(a["begin"] + a["seconds"] == pytest.approx(b["begin"]) for a, b in pairwise(rows))
            screen.ask("apply", number=screen.first)
            assert screen.state["timeline"] == []


def test_progress_of_one_thing_is_sent_now_and_then() -> None:
    sent_messages: list[dict[str, Any]] = []
    telling = Telling(7, "measure", sent_messages.append)
    for done in range(1000):
        telling(CheckProgress("running", done, 1000, 3.2))
    assert len(sent_messages) < 50
    telling(CheckProgress("running", 1, 2, result="now"))
    assert sent_messages[0]["text"] == "running: 0 of 1000, about 3 s left"
    assert sent_messages[-1] == {
        "type": "progress", "id": 7, "kind": "measure", "text": "running: 1 of 2", "done": 1, "of": 2, "partial": "now"
    }  # fmt: skip


def test_previews_are_answered_while_a_check_runs(session: dt.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Event(), threading.Event()

    def verify(*_: object) -> str:
        begun.set()
        release.wait(60)
        return "all right"

    monkeypatch.setattr(session, "verify", verify, raising=False)
    answers: list[dict[str, Any]] = []
    requests = Requests(session, lambda message, _: answers.append(message), lambda _: None, Work())
    requests.show()
    while requests.state()["listing"]:
        time.sleep(0.01)
    requests.handle({"type": "verify", "id": "check"})
    assert begun.wait(60)
    number = requests.state()["matches"][0]["number"]
    requests.handle({"type": "preview", "id": "see", "number": number, "version": session.version})
    requests.handle({"type": "apply", "id": "do", "number": number, "version": session.version})
    answered: set[Any] = set()
    for _ in range(6000):
        answered = {message["id"] for message in answers if message["type"] == "answer"}
        if "see" in answered:
            break
        time.sleep(0.01)
    assert "see" in answered and not answered & {"check", "do"} and session.history == ()
    release.set()
    while "do" not in {message["id"] for message in answers if message["type"] == "answer"}:
        time.sleep(0.01)
    assert len(session.history) == 1
