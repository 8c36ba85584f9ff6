"""A widget's requests without a browser."""

from __future__ import annotations

import json
from typing import Any

import daceml_train as dt
from daceml_train.exploration.widget.requests import Requests


class Screen:
    """A widget that only listens."""

    def __init__(self, session: dt.Session) -> None:
        self.answers: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.requests = Requests(session, lambda message, _: self.answers.append(message), self._see)
        self.requests.show()

    def _see(self, state: dict[str, Any]) -> None:
        self.state = json.loads(json.dumps(state))  # what is sent is plain data

    @property
    def first(self) -> int:
        """The number of the match that is listed first."""
        number: int = self.state["matches"][0]["number"]
        return number

    def ask(self, kind: str, **what: Any) -> dict[str, Any]:
        self.requests.handle({"type": kind, "id": "1", "version": self.state["version"], **what})
        return next(a for a in reversed(self.answers) if a["type"] == "answer" and a.get("id") == "1")
