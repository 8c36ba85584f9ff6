"""Which traces of TorchDynamo are this package's own: those that a thread makes while it is inside of one of ours."""

from __future__ import annotations

import threading


class Traces(threading.local):
    """What a patch of TorchDynamo knows of this thread's traces; traces for other backends stay as they are."""

    depth: int = 0
    """How many calls of ours this thread is inside of."""
