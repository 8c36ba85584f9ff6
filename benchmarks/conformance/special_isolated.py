"""Entries in a process of their own: at some special values PyTorch's own kernels end the process that runs them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.conformance.samples import label
from benchmarks.conformance.special_run import Found, Stage, swept

SECONDS = 900.0
"""What one entry may take."""


def results(work: Sequence[tuple[Stage, Any]], cache: str, seconds: float = SECONDS) -> Iterator[Found]:
    """What is found for each stage and entry, in order.

    A sample in whose eager execution the process ends is left out, one in ours is wrong; then the entry runs a second
    time.
    """
    context = multiprocessing.get_context("fork")
    place = context.Array("q", [0, 0])
    done, skipped, ended = 0, dict[int, str](), list[str]()
    while done < len(work):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(work[done:], cache, place, skipped, sender))
        process.start()
        sender.close()
        try:
            while done < len(work):
                if not receiver.poll(seconds):
                    process.kill()
                found: Found = receiver.recv()
                found.wrong += ended
                done, skipped, ended = done + 1, {}, []
                yield found
        except EOFError:
            process.join()
            number, eager = place
            how = f"signal {-process.exitcode}" if (process.exitcode or 0) < 0 else f"status {process.exitcode}"
            if number in skipped:
                raise RuntimeError(f"{work[done][0].name} {label(work[done][1])} ends the process: {how}") from None
            skipped[number] = f"eager execution ends the process with {how}" if eager else "ends the process"
            ended += [] if eager else [f"#{number}: the process ended with {how}"]
        process.join()


def _worker(
    work: Sequence[tuple[Stage, Any]], cache: str, place: Any, skipped: dict[int, str], out: Connection
) -> None:
    def notice(number: int, eager: bool) -> None:
        place[0], place[1] = number, eager

    torch.set_num_threads(1)  # a forked process has none of the threads that OpenMP of its parent waits for
    for position, (stage, op) in enumerate(work):
        first = position == 0
        out.send(swept(stage, op, cache, notice, skipped if first else {}, 1 if first and skipped else None))
