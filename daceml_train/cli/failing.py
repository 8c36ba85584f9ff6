"""How a command says that it goes on, and that it cannot."""

from __future__ import annotations

import sys


class Failure(Exception):
    """Ends the command with status 1 and this sentence."""


def say(text: str) -> None:
    """Progress, on a terminal only; nothing clears the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if text.endswith(".") else "", file=sys.stderr, flush=True)
