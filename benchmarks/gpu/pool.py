"""Workers that get ready at the same time and are measured one after the other.

Most of a measurement is compiling, which the processor does, on many cores at once; the device serves one at a time.
A wave of workers is started, each says `ready`, and then one by one is told `go` and answers with its result. What is
done is handed on at once, so that a call that is cut off leaves all it has measured.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Item:
    """Something to measure: a name, the worker's command, and the memory of the device that it takes."""

    key: str
    command: tuple[str, ...]
    gib: float = 4.0


@dataclass
class Limits:
    """How many workers and how much of the device's memory at once; seconds until ready, and to measure."""

    workers: int = 12
    gib: float = 60.0
    ready: float = 200.0
    measure: float = 60.0


@dataclass
class Worker:
    """A running one. It says `ready`, waits for a line, and says `result` and JSON; else what it said last counts."""

    item: Item
    said: list[str] = field(default_factory=list)
    lines: queue.Queue[str | None] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            self.item.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def until(self, word: str, end: float) -> str | None:
        """The rest of the line that begins with `word`; None if it ends first, or the time does."""
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            if line is None:
                return None
            if line.startswith(word):
                return line.removeprefix(word)
            self.said = [*self.said, line][-5:]

    def go(self) -> None:
        """Let it measure."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it has ended, and says nothing more
            pass

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()

    def failure(self, what: str) -> dict[str, Any]:
        """What to write down for one that did not answer."""
        last = next((line for line in reversed(self.said) if line.strip()), "")
        return {"error": f"{what}: {last[:300]}" if last else what}


def measure(
    items: Sequence[Item], limits: Limits, end: float, done: Callable[[str, dict[str, Any]], None]
) -> list[Item]:
    """Measure until `end` (of `time.monotonic`); those that are left. An item is tried again only if time ran out."""
    left = list(items)
    while left and time.monotonic() < end:
        wave, kept = [left.pop(0)], 0.0
        kept += wave[0].gib
        while left and len(wave) < limits.workers and kept + left[0].gib <= limits.gib:
            kept += left[0].gib
            wave.append(left.pop(0))
        left = _wave(wave, limits, end, done) + left
    return left


def _wave(wave: Sequence[Item], limits: Limits, end: float, done: Callable[[str, dict[str, Any]], None]) -> list[Item]:
    """Start all, measure those that are ready; those that the end of the time cut off."""
    workers = [Worker(item) for item in wave]
    cut: list[Item] = []
    try:
        patience = time.monotonic() + limits.ready
        ready = []
        for worker in workers:
            if worker.until("ready", min(patience, end)) is not None:
                ready.append(worker)
            elif worker.process.poll() is None and end < patience:
                cut.append(worker.item)
            elif worker.process.poll() is None:
                done(worker.item.key, worker.failure(f"not ready after {limits.ready:.0f} s"))
            else:
                done(worker.item.key, worker.failure("it ended"))
            if worker not in ready:
                worker.stop()
        for worker in ready:
            worker.go()
            answer = worker.until("result ", time.monotonic() + limits.measure)
            result = worker.failure("no result") if answer is None else json.loads(answer)
            done(worker.item.key, result)
            worker.stop()
    finally:
        for worker in workers:
            worker.stop()
    return cut
