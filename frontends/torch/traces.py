"""Which traces of TorchDynamo are this package's own: those that a thread makes while it is inside of one of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Traces(threading.local):
    """A patch of TorchDynamo and this thread's traces that it is for; traces for other backends stay as they are.

    `with` it, this thread's traces are ours. `install` patches TorchDynamo, if it has not been patched yet.
    """

    depth: int = 0
    """How many calls of ours this thread is inside of."""

    def __init__(self, install: Callable[[], None]) -> None:
        self._install = install
        self._notes: dict[str, None] = {}

    def note(self, text: str) -> None:
        """Keep what the user should know of a trace."""
        self._notes[text] = None

    def noted(self) -> tuple[str, ...]:
        """What was noted since the last call, each text once."""
        notes, self._notes = self._notes, {}
        return tuple(notes)

    def begin(self) -> None:
        """What an entry does before it counts."""

    def end(self) -> None:
        """What an exit does after it counts."""

    def __enter__(self) -> None:
        self._install()
        self.begin()
        self.depth += 1

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1
        self.end()
