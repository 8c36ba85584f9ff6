"""Progress and failure of a command."""

from __future__ import annotations

import sys


class Failure(Exception):
    """Ends the command with this message and a status: 1, or one that the command chooses."""

    def __init__(self, sentence: str, status: int = 1) -> None:
        super().__init__(sentence)
        self.status = status


def say(text: str) -> None:
    """Progress, on a terminal only; nothing clears the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if text.endswith(".") else "", file=sys.stderr, flush=True)
