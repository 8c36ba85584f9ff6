"""The matches that a widget lists: found pass by pass, so that the first are there at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from daceml_train.exploration.session.listing import rank
from daceml_train.exploration.session.session import Session
from daceml_train.exploration.session.steps import Match
from daceml_train.exploration.views.view import GraphView
from daceml_train.exploration.widget.data import groups_data, options_data, sent

Wanted = tuple[int, bool]
"""The version of the graph, and whether refused matches are listed."""


class Listing:
    """The matches of the present graph, as far as they are found. A match keeps its number while the list grows."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.wanted: Wanted = (-1, False)
        self.complete = True
        self.found: list[Match] = []
        self._numbers: dict[Match, int] = {}
        self._by_number: dict[int, Match] = {}
        self._next = itertools.count()
        self._passes: Iterator[list[Match]] = iter(())
        self._lock = threading.Lock()
        """Held while the list changes: it grows in another thread than it is started in."""

    def begin(self, wanted: Wanted) -> None:
        """Start another list. Numbers stay valid until the graph changes, and are never given twice."""
        with self._lock:
            if wanted[0] != self.wanted[0]:
                self._numbers, self._by_number = {}, {}
            self.wanted, self.complete, self.found = wanted, False, []
            self._passes = self.session.matches_by_pass(refused=wanted[1])

    def step(self) -> bool:
        """Find the matches of one more pass; False after the last one."""
        passes = self._passes
        more = next(passes, None)
        with self._lock:
            if passes is not self._passes:  # what was found belongs to another list
                return True
            if more is None:
                self.complete = True
                return False
            for match in more:
                number = next(self._next)
                self._numbers[match], self._by_number[number] = number, match
            self.found = sorted([*self.found, *more], key=rank)
            return True

    def end(self) -> None:
        """Leave the list as it is."""
        self.complete = True

    def match(self, number: object) -> Match | None:
        """The match that a page knows by this number."""
        return self._by_number.get(number) if isinstance(number, int) else None

    def data(self, view: GraphView, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The matches that pass the filter `chosen`, the largest savings first."""
        found: Collection[Match] = self.found
        selection = {name for key in chosen.get("keys", ()) for name in view.arrays_of(key)}
        if selection:
            found = [m for m in found if not selection.isdisjoint(m.arrays)]
        if chosen.get("pass"):
            found = [m for m in found if m.name == chosen["pass"]]
        if wanted := str(chosen.get("text", "")).casefold():
            found = [m for m in found if wanted in f"{m.name} {m.where} {m.module} {m.operators}".casefold()]
        kept = list(found)
        return {
            "matches": [self._data(view, match) for match in sent(kept)],
            "groups": groups_data(kept),
            "found": len(kept),
            "listing": not self.complete,
            "filter": chosen,
        }

    def _data(self, view: GraphView, match: Match) -> dict[str, Any]:
        return {
            "number": self._numbers[match],
            "name": match.name,
            "level": match.level,
            "where": match.where,
            "module": match.module,
            "operators": match.operators,
            "source": match.source,
            "bytes": match.bytes,
            "refusal": match.refusal,
            "keys": view.keys_of(match.arrays),
            "options": options_data(match.transformation),
        }
