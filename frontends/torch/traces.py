"""Which traces of TorchDynamo are this package's own: those that a thread makes while it is inside of one of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Traces(threading.local):
    """A patch of TorchDynamo and this thread's traces that it is for; traces for other backends stay as they are.

    `with` it, this thread's traces are ours. `install` patches TorchDynamo, if it has not been patched yet.
    """

    depth: int = 0
    """How many calls of ours this thread is inside of."""

    def __init__(self, install: Callable[[], None]) -> None:
        self.install = install
        self._notes: dict[str, None] = {}

    def note(self, text: str) -> None:
        """Keep what the user should know of a trace."""
        self._notes[text] = None

    def noted(self) -> tuple[str, ...]:
        """What was noted since the last call, each text once."""
        notes = self._notes
        if not notes:
            return ()
        self._notes = {}
        return tuple(notes)

    def begin(self) -> None:
        """What an entry does before it counts."""

    def end(self) -> None:
        """What an exit does after it counts."""

    def __enter__(self) -> None:
        self.install()
        self.begin()
        self.depth += 1

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1
        self.end()


_backends: list[Callable[..., Any]] = []


def cover(backend: Callable[..., Any], *patches: Traces) -> None:
    """Let some patches change the traces for a backend of `torch.compile`, too, which begin outside of our calls."""
    _backends.append(backend)
    for patch in patches:
        patch.install()


def for_backend(compiler: Any) -> bool:
    """Whether what TorchDynamo calls with a graph stands for one of these backends."""
    while compiler is not None:
        if isinstance(compiler, torch._TorchCompileWrapper):
            return compiler.compiler_fn in _backends
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None)
    return False
