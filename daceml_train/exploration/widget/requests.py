"""Requests of a widget to a session: plain data in, plain data out. No browser or notebook is needed.

A request is a dictionary with a `type`, an `id` that its answer repeats, and its arguments. A request that changes the
session has the `version` that was on the screen: a click on a match of an older graph is answered with a message, and
the list is resent. A failure is an answer with an `error`; the session is then unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from daceml_train.errors import Invalid, message_of
from daceml_train.exploration.session.progress import OnProgress
from daceml_train.exploration.session.session import Session
from daceml_train.exploration.session.steps import Match, Preview, Step
from daceml_train.exploration.views.details import Sources, code_of, details
from daceml_train.exploration.views.saved import REMATERIALIZED, crossings
from daceml_train.exploration.views.sdfg import sdfg_of
from daceml_train.exploration.views.times import seconds_of, timeline_of
from daceml_train.exploration.views.tree import Item
from daceml_train.exploration.views.view import GraphView, view_of
from daceml_train.exploration.widget.data import passes_data, preview_data, step_data
from daceml_train.exploration.widget.listing import Listing, Wanted
from daceml_train.exploration.widget.telling import Telling
from daceml_train.exploration.widget.viewer import viewer_source
from daceml_train.exploration.widget.work import Cancelled, Publish, Send, Work
from daceml_train.passes import notation
from daceml_train.passes.base import Pass
from daceml_train.passes.pipeline import Pipeline
from daceml_train.reporting.numbers import bytes_text, counted, seconds_text
from daceml_train.transformations.at_place import AtPlace
from daceml_train.transformations.global_movement.rematerialize import Rematerialize
from daceml_train.transformations.pipelines import TRAINING

OFTEN = 0.4
"""Seconds between two states that are published while matches are found."""
REPEATS = 20
"""The default number of runs of a measurement."""
KEPT = 100
"""The maximum number of saved arrays that are sent."""
ASIDE = frozenset({"preview", "code"})
"""Requests that read the session for long: they do not wait for the work of `CHECKS`, which does not change it."""
CHECKS = frozenset({"verify", "measure", "listing matches"})
LOOKING = frozenset({"viewer", "refresh", "open", "close", "reveal", "filter", "search", "find", "details"})
"""Read-only requests: they are answered at once, also during long work."""


class Requests:
    """Answers a widget. `send(message, buffers)` takes answers, `publish(state)` the state to show.

    Long requests go to `work`, or run at once; `opened` are keys of groups that are open at first, too.
    """

    def __init__(
        self, session: Session, send: Send, publish: Publish, work: Work | None = None, opened: Iterable[str] = ()
    ) -> None:
        self.session, self.send, self.publish = session, send, publish
        self.work = work or Work(threads=False)
        self.aside = self.work.another()
        self._lock = threading.RLock()
        """Held while the view changes and is published: queries and work are two threads."""
        self.sources = Sources(session.subject.model)
        self.results = {"module": None, "loss": 1, "step": 1}[session.subject.kind]
        self.view: GraphView = view_of(session.graph, {}, None, self.results, session.state.traffic)
        for key in opened:
            self.view = self.view.opening(key)
        self.seconds: dict[int, float] = {}
        """Measured seconds by position of the node, of the graph of version `timed`."""
        self.timed = -1
        self.filter: dict[str, Any] = {}
        self.listing = Listing(session)
        self.shown = session.version
        self.notes: dict[str, Any] = {}
        """Results of verification and measurement, by kind."""

    # ---- answering ------------------------------------------------------------------------------------------------
    def handle(self, request: Mapping[str, Any], buffers: object = None) -> None:
        """Answer one request, at once or after those that wait."""
        kind, number = str(request.get("type")), request.get("id")
        if kind == "cancel":
            doing = self.work.cancel() or self.aside.cancel()
            self.send({"type": "answer", "id": number, "note": f"cancelling: {doing}" if doing else ""}, [])
            return
        method = getattr(self, f"on_{kind}", None) if kind.isidentifier() else None
        if method is None:
            self.send({"type": "answer", "id": number, "error": f"unknown request {kind!r}"}, [])
            return
        with self._lock:  # the list may be another one when the work begins
            meant = {**request, "match": self.listing.match(request.get("number"))}
            if kind in LOOKING:
                self._answer(method, meant)
                return
        self.send({"type": "begun", "id": number}, [])
        work = self.aside if kind in ASIDE and self.work.doing in CHECKS else self.work
        work.put(functools.partial(self._answer, method, meant), kind)

    def _answer(self, method: Callable[[dict[str, Any]], Any], request: dict[str, Any]) -> None:
        number = request.get("id")
        try:
            result = method(request)
            answer, buffers = result if isinstance(result, tuple) else (result, [])
            self.send({"type": "answer", "id": number, **(answer or {})}, buffers)
        except Cancelled:
            self.show()
            self.send({"type": "answer", "id": number, "error": "cancelled; nothing was changed"}, [])
        except Exception as error:
            self.show()
            self.send({"type": "answer", "id": number, "error": message_of(error)}, [])

    def show(self) -> None:
        """Publish the state of the session."""
        with self._lock:
            self._show()

    def _show(self) -> None:
        if self.shown != self.session.version or self.view.tree.graph is not self.session.graph:
            seconds = self.seconds if self.timed == self.session.version else None
            self.view = self.view.over(self.session.graph, seconds, self.session.state.traffic)
            self.shown = self.session.version
        if started := self.listing.wanted != self._wanted:
            self.listing.begin(self._wanted)
        self.publish(self.state())
        if started:
            self.work.put(self._list, "listing matches")

    def _list(self) -> None:
        """List all matches, pass by pass, which takes seconds on large graphs; other work goes first."""
        listing = self.listing
        if listing.complete:
            return
        self.send({"type": "begun", "id": None, "what": "listing matches"}, [])
        shown = time.monotonic()
        try:
            while listing.step():
                if self.work.waiting:
                    self.work.put(self._list, "listing matches")
                    return
                if time.monotonic() - shown > OFTEN and listing.found:
                    with self._lock:
                        self.publish(self.state())
                    shown = time.monotonic()
        except Cancelled:
            pass
        except Exception as error:
            self.send({"type": "answer", "id": None, "error": f"matches cannot be listed: {message_of(error)}"}, [])
        listing.end()
        with self._lock:
            self.publish(self.state())
        self.send({"type": "answer", "id": None}, [])

    @property
    def _wanted(self) -> Wanted:
        return self.session.version, bool(self.filter.get("refused"))

    # ---- state ----------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """The complete state of a widget."""
        session = self.session
        now, start = session.state, session.start
        return {
            "version": session.version,
            "name": session.subject.name,
            "totals": {
                "bytes": now.bytes,
                "start": start.bytes,
                "peak": now.peak,
                "start_peak": start.peak,
                "flops": now.flops,
                "operators": len(now.graph.nodes),
                "seconds": self.view.tree.root.seconds,
            },
            "sdfg": sdfg_of(self.view),
            "view": self.view.as_dict(),
            "history": [step_data(step) for step in (*session.history, *session.undone)],
            "at": len(session.history),
            "passes": passes_data(),
            "kept": self.kept(),
            "timeline": timeline_of(self.view.tree, self.seconds if self.timed == session.version else None),
            "notes": self.notes if self.notes.get("version") == session.version else {},
            **self.listing.data(self.view, self.filter),
        }

    def kept(self) -> list[dict[str, Any]]:
        """Arrays of the forward pass that the backward pass reads, with their boxes."""
        rows = []
        for found in crossings(self.session.graph, {}, self.results)[:KEPT]:
            keys = self.view.keys_of((found.array, *found.readers[:20]))
            rows.append({**dataclasses.asdict(found), "keys": keys, "gradients": list(found.gradients[:8])})
        return rows

    # ---- the picture ----------------------------------------------------------------------------------------------
    def on_viewer(self, _: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """DaCe's viewer, compressed."""
        return {}, [viewer_source()]

    def on_refresh(self, _: dict[str, Any]) -> None:
        """Resend the state."""
        self.show()

    def on_open(self, request: dict[str, Any]) -> None:
        """Open a group."""
        self.view = self.view.opening(request["key"])
        self.show()

    def on_close(self, request: dict[str, Any]) -> None:
        """Close a group."""
        self.view = self.view.closing(request["key"])
        self.show()

    def on_reveal(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open the groups that hide the arrays of a match or a saved array."""
        arrays = self._listed(request).arrays if "number" in request else tuple(request["arrays"])
        self.view = self.view.revealing(arrays)
        self.show()
        return {"keys": self.view.keys_of(arrays)}

    def on_filter(self, request: dict[str, Any]) -> None:
        """Which matches are listed."""
        names = ("keys", "pass", "text", "refused")
        self.filter = {name: request[name] for name in names if request.get(name)}
        self.show()

    def on_search(self, request: dict[str, Any]) -> dict[str, Any]:
        """Find groups and operators by a text."""
        found = self.view.search(str(request.get("text", "")))
        return {"found": [{"key": i.key, "label": i.label, "module": i.module, "phase": i.phase} for i in found]}

    def on_find(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open the groups around an item."""
        item = self._box(self.view, request["key"])
        if item.parent is not None and item.parent.parent is not None:
            self.view = self.view.opening(item.parent.key)
        self.show()
        return {"keys": [item.key]}

    def on_details(self, request: dict[str, Any]) -> dict[str, Any]:
        """The details of a box."""
        key, tree = request["key"], self.view.tree
        if key in self.view.ends:
            name = self.view.ends[key]
            return {"details": {"key": key, "label": name, "kind": "array", "text": str(tree.graph.tensors[name])}}
        return {"details": details(tree, self._box(self.view, key), {}, self.sources)}

    def on_code(self, request: dict[str, Any]) -> dict[str, Any]:
        """The C++ of an operator, in the graph that is drawn: a cell may have changed the session's since."""
        view = self.view
        item, graph = self._box(view, request["key"]), view.tree.graph
        if item.kind not in ("operator", "statement"):
            raise Invalid(f"{item.label} is no operator", advice="open it, and choose one in it")
        return {"code": code_of(graph, graph.nodes[item.nodes[0]])}

    # ---- transformations ------------------------------------------------------------------------------------------
    def on_preview(self, request: dict[str, Any]) -> dict[str, Any]:
        """What a match, or a pass everywhere, would do."""
        target, options = self._target(request)
        found = self.session.preview(target, **options)
        return {"preview": {**preview_data(found), **self._drawn(found)}}

    def _drawn(self, found: Preview) -> dict[str, Any]:
        """The picture after what is previewed, and the boxes that go and come, in the picture before and after."""
        if found.after is None or found.before is not self.session.state:
            return {}
        before = self.view
        after = before.over(found.after.graph, None, found.after.traffic)
        gone = [name for node in found.removed for name in node.outputs]
        new = [name for node in found.added for name in node.outputs]
        view = {name: after.as_dict()[name] for name in ("boxes", "edges")}
        return {
            "keys": before.keys_of(gone),
            "after": {"sdfg": sdfg_of(after), "keys": after.keys_of(new), **view},
        }

    def on_apply(self, request: dict[str, Any]) -> dict[str, Any]:
        """Apply a match, or a pass everywhere."""
        target, options = self._target(request)
        step = self.session.apply(target, **options)
        self.show()
        return {"note": _said(step)}

    def on_default(self, request: dict[str, Any]) -> dict[str, Any]:
        """Apply the passes of the default pipeline, a step each; of level `forward` while there are no gradients."""
        self._current(request)
        open_ = {
            level: p for level, p in TRAINING.passes if level != "forward" or not self.session.state.differentiated
        }
        before, steps = self.session.state, len(self.session.history)
        self.session.apply(Pipeline(**open_))
        self.show()
        count, saved = len(self.session.history) - steps, before.bytes - self.session.state.bytes
        return {"note": f"the default pipeline: {count} steps, {bytes_text(saved)} saved"}

    def on_undo(self, _: dict[str, Any]) -> dict[str, Any]:
        """Undo one step."""
        step = self.session.undo()
        self.show()
        return {"note": f"undone: {step.name}"}

    def on_redo(self, _: dict[str, Any]) -> dict[str, Any]:
        """Redo one step."""
        step = self.session.redo()
        self.show()
        return {"note": f"redone: {step.name}"}

    def on_jump(self, request: dict[str, Any]) -> None:
        """Go to the state after a step."""
        self.session.jump(request["number"])
        self.show()

    def on_rematerialize(self, request: dict[str, Any]) -> dict[str, Any]:
        """Rematerialize one saved array in the backward pass."""
        self._current(request)
        step = self.session.apply(Rematerialize(recompute=(str(request["array"]),)))
        self.show()
        return {"note": f"{_said(step)}; peak {bytes_text(step.peak[0])} to {bytes_text(step.peak[1])}"}

    def on_keep(self, request: dict[str, Any]) -> dict[str, Any]:
        """Keep an array after all: undo the step that rematerializes it, and reapply the later ones."""
        self._current(request)
        array = str(request["array"]).split(REMATERIALIZED)[0]
        steps = self.session.history
        candidates = [
            s for s in steps if isinstance(s.transformation, Rematerialize) and array in s.transformation.recompute
        ]
        if not candidates:
            raise Invalid(f"no step of the history rematerializes {array} alone", advice="undo the step that does")
        replayed = self.session.leave_out(candidates[-1].number)
        self.show()
        lost = [f"{_applied(p).name}: {reason}" for p, reason in replayed.missed]
        count = len(replayed.steps) + len(lost)
        losses = f"; of {counted(count, 'later step')} {len(lost)} no longer apply: {'; '.join(lost)}" if lost else ""
        return {"note": f"{array} is kept{losses}"}

    # ---- checking and keeping -------------------------------------------------------------------------------------
    def on_verify(self, request: dict[str, Any]) -> dict[str, Any]:
        """Outputs and gradients against PyTorch."""
        version = self.session.version
        verification = self.session.verify(self._progress(request))
        return self._noted("verified", version, str(verification), str(verification).splitlines()[0])

    def on_measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """The times at the start and at present, and the time of each operator of the present graph."""
        repeats, version = int(request.get("repeats") or REPEATS), self.session.version
        measured = self.session.measure(repeats, progress=self._progress(request))
        if self.session.version == version:
            self.seconds, self.timed = seconds_of(self.session), version
            self.shown = -1  # the same boxes, with their times
        times = ", ".join(f"{name} {seconds_text(timed.median)}" for name, timed in measured.timed.items())
        return self._noted("measured", version, str(measured), f"measured: {times}")

    def on_save(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write the history to a file."""
        path = _path(request)
        self.session.save(path)
        return {"note": f"saved: {path}"}

    def on_replay(self, request: dict[str, Any]) -> dict[str, Any]:
        """Apply the steps of a file."""
        path = _path(request)
        if not path.exists():
            raise Invalid(f"there is no file {path}", advice="give the path of a saved file")
        summary = str(self.session.replay(path))
        self.show()
        return {"note": f"replayed {path}", "report": summary}

    def on_export(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write a page that needs no kernel."""
        path = _path(request)
        self.session.export_html(path)
        return {"note": f"written: {path}"}

    def _progress(self, request: Mapping[str, Any]) -> OnProgress:
        return Telling(request.get("id"), str(request.get("type")), lambda message: self.send(message, []))

    def _noted(self, name: str, version: int, text: str, said: str) -> dict[str, Any]:
        """Keep the result of a check of the graph of a version: a cell may have changed the session during it."""
        if self.notes.get("version") != version:
            self.notes = {"version": version}
        self.notes[name] = text
        self.show()
        return {"note": said if self.session.version == version else f"{said}; the graph has changed since"}

    # ---- lookup ---------------------------------------------------------------------------------------------------
    def _box(self, view: GraphView, key: str) -> Item:
        item = view.boxes.get(key) or view.tree.items.get(key)
        if item is None:
            raise Invalid("this box is not in the graph any more", advice="choose another")
        return item

    def _current(self, request: Mapping[str, Any]) -> None:
        if request.get("version") != self.session.version:
            raise Invalid(
                "the graph has changed since this was shown; nothing was done", advice="choose from the present list"
            )

    def _listed(self, request: Mapping[str, Any]) -> Match:
        self._current(request)
        found: Match | None = request["match"]
        if found is None:
            raise Invalid("this match is not listed any more", advice="choose from the present list")
        return found

    def _target(self, request: Mapping[str, Any]) -> tuple[Match | Pass, dict[str, Any]]:
        """A listed match or a pass by name, and edited options, given as texts."""
        self._current(request)
        given = {str(k): str(v) for k, v in (request.get("options") or {}).items()}
        if "number" in request:
            match = self._listed(request)
            name = match.name
        else:
            match, name = None, str(request["pass"])
        text = ", ".join(f"{option}={value}" for option, value in given.items())
        edited = notation.parse_pass(f"{name}({text})")
        if match is None:
            return edited, {}
        return match, {option: getattr(edited, option) for option in given}


def _applied(kept: Pass) -> Pass:
    return kept.transformation if isinstance(kept, AtPlace) else kept


def _path(request: Mapping[str, Any]) -> Path:
    text = str(request.get("path", "")).strip()
    if not text:
        raise Invalid("a file's path is needed", advice="such as steps.json")
    return Path(text).expanduser()


def _said(step: Step) -> str:
    before, after = step.bytes
    place = f" at {step.where}" if step.where else ""
    return f"{step.name}{place}: {bytes_text(before)} to {bytes_text(after)}"
