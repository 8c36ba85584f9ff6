"""Graphs that PyTorch runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Refused:
    """A graph that PyTorch runs; counts how often.

    `note` says why: it is called once PyTorch has accepted the arguments.
    """

    forward: Callable[..., Any]
    note: Callable[[], None] | None = None
    runs: int = 0

    def __call__(self, *arguments: Any) -> Any:
        result = self.forward(*arguments)
        self.runs += 1
        if self.note is not None:
            note, self.note = self.note, None
            note()
        return result


__all__ = ["Refused"]
