"""Times of a call that neither other threads nor a full garbage collection disturb."""

import time
from collections.abc import Callable

REPEATS = 3
"""A full collection of a long test process takes seconds, but comes in at most one of these calls."""


def thread_seconds(call: Callable[[], object]) -> float:
    """The fewest seconds of this thread's processor time that `call` takes, of a few calls."""
    times = []
    for _ in range(REPEATS):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)
