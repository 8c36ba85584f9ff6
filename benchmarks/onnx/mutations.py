"""Damaged models: valid ones with bytes changed, cut or moved must lead to an error or a model, never to a crash.

A child process reads them, so that a crash or a hang of native code is seen and does not end the run.
"""

from __future__ import annotations

import multiprocessing
import random
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from onnx.backend.test.loader import load_model_tests

import daceml_train as dt

PATIENCE = 20.0
"""Seconds after which a reading counts as hung; the models are read in milliseconds."""


def run(count: int, seed: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Read `count` damaged models; how many of each outcome, and what crashed, hung or raised another error."""
    draw = random.Random(seed)
    seeds = _seeds()
    outcomes: Counter[str] = Counter()
    failures: dict[str, list[str]] = {"crashes": [], "hangs": [], "unexpected": []}
    child = _Child()
    for number in range(count):
        data = mutate(draw, draw.choice(seeds))
        answer = child.read(data)
        if answer in ("crash", "hang"):
            failures[answer + ("es" if answer == "crash" else "s")].append(f"mutation {number}")
            child = _Child()
        elif answer not in ("read", "Invalid", "Unsupported", "Refused"):
            failures["unexpected"].append(f"mutation {number}: {answer}")
        outcomes[answer.partition(":")[0]] += 1
        advance()
    child.end()
    return {"count": count, "seed": seed, "outcomes": dict(outcomes), **failures}


def _seeds() -> list[bytes]:
    """Models small enough to be read quickly, of many operators."""
    models = [case.model.SerializeToString() for case in load_model_tests(kind="node")]
    return [data for data in models if len(data) < 4096]


def mutate(draw: random.Random, data: bytes) -> bytes:
    """One to eight changes: a bit flipped, a byte replaced, a part cut out, doubled or overwritten, the end cut off."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        if not changed:
            break
        at = draw.randrange(len(changed))
        end = min(len(changed), at + draw.randint(1, 32))
        match draw.randrange(6):
            case 0:
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                changed[at] = draw.randrange(256)
            case 2:
                del changed[at:end]
            case 3:
                changed[at:at] = changed[at:end]
            case 4:
                changed[at:end] = bytes(draw.randrange(256) for _ in range(end - at))
            case _:
                del changed[at:]
    return bytes(changed)


class _Child:
    """A process that reads models and says what came of it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_reader, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def read(self, data: bytes) -> str:
        try:
            self.pipe.send_bytes(data)
            if not self.pipe.poll(PATIENCE + (60.0 if self.process.pid is None else 0.0)):
                self.process.kill()
                return "hang"
            return self.pipe.recv_bytes().decode()
        except (EOFError, OSError):
            return "crash"

    def end(self) -> None:
        self.pipe.close()
        self.process.join(5)
        self.process.kill()


def _reader(pipe: Connection) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # an absurd allocation fails instead of swapping
    while True:
        try:
            data = pipe.recv_bytes()
        except EOFError:
            return
        try:
            dt.load_onnx(data)
            answer = "read"
        except dt.Invalid:
            answer = "Invalid"
        except dt.Unsupported:
            answer = "Unsupported"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:200]
        pipe.send_bytes(answer.encode())
