"""What a page is told while a check runs: how far it is, and what is known so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from daceml_train.exploration.session.progress import CheckProgress

OFTEN = 0.2
"""The least seconds between two messages about the same thing without a result."""


@dataclass
class Telling:
    """Sends the progress of a request as messages of type `progress`: each partial result, the rest now and then."""

    number: object
    kind: str
    send: Callable[[dict[str, Any]], None]
    _last: tuple[str, float] = field(default=("", 0.0), init=False)

    def __call__(self, progress: CheckProgress) -> None:
        now = time.monotonic()
        if progress.result is None and progress.what == self._last[0] and now - self._last[1] < OFTEN:
            return
        self._last = progress.what, now
        message: dict[str, Any] = {"type": "progress", "id": self.number, "kind": self.kind, "text": str(progress)}
        message |= {"done": progress.done, "of": progress.of}
        if progress.result is not None:
            message["partial"] = str(progress.result)
        self.send(message)
