"""Kills: `kill -9` at random moments, each followed by a run that must be right, and by a look at what is left."""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.children import begin, finished
from benchmarks.faults.training import STEPS, train
from daceml_train.runtime.cache import Cache
from daceml_train.storage.files import PARTIAL
from daceml_train.storage.folders import BUILDING, LOCK, YOUNG

MODELS = 7
"""So many models take turns, each for one turn of all moments."""

PATIENT = 400
"""Steps of a run that is to be killed in one of them."""


@dataclass(frozen=True)
class Moment:
    """Runs are killed up to so many seconds after they told of `name`; a cold one finds no programs and no kernels."""

    name: str
    seconds: float
    cold: bool = True


MOMENTS = (
    Moment("capture", 1.0),
    Moment("build", 0.3),
    Moment("install", 0.002),
    Moment("store", 0.002),
    Moment("step", 0.02),
    Moment("save", 0.003),
    Moment("start", 0.1, cold=False),
    Moment("capture", 0.3, cold=False),
    Moment("step", 0.02, cold=False),
    Moment("save", 0.003, cold=False),
)
"""They take turns."""


def sweep(kills: int, minutes: float, seed: int, folder: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    """What became of so many kills, or of as many as so many minutes allow."""
    generator, cache = random.Random(seed), folder / "cache"
    start = time.monotonic()
    first = finished(functools.partial(_train, 1000, cache, folder / "saved.pt", STEPS))
    if first.result is None or isinstance(first.result, str) or not first.result.right:
        raise SystemExit(f"an undisturbed run fails: {first.result}")
    cold = time.monotonic() - start
    killed: Counter[str] = Counter()
    found: dict[str, Any] = {"kills": 0, "ended before": 0, "wrong": [], "hangs": [], "failed": [], "left": []}
    for number in range(kills):
        if time.monotonic() - start > 60 * minutes:
            progress(f"stopped after {number} of {kills} runs, for want of time")
            break
        one, moment = number // len(MOMENTS) % MODELS, MOMENTS[number % len(MOMENTS)]
        if moment.cold:
            _forget(cache)
        steps = PATIENT if moment.name == "step" else STEPS
        child = begin(functools.partial(_train, one, cache, folder / "saved.pt", steps))
        child.await_moment(moment.name)
        child.listen(time.monotonic() + generator.uniform(0, moment.seconds))
        found["kills" if child.status is None else "ended before"] += 1
        if child.status is None:
            killed[child.moment] += 1
        child.kill()
        child.end()
        after = finished(functools.partial(_train, one, cache, folder / "saved.pt", STEPS))
        _judge(found, f"run {number} after a kill in {child.moment!r}", after)
        Cache(cache).evict()
        found["left"] += _left(cache, folder)
        if (number + 1) % 10 == 0:
            progress(f"{number + 1} of {kills}: {dict(killed)}")
    return {**found, "moments": dict(killed), "seconds of an undisturbed run": round(cold, 2)}


def _train(number: int, cache: Path, save: Path, steps: int, marks: int) -> Any:
    return train(number, cache, marks, save, steps)


def _judge(found: dict[str, Any], name: str, child: Any) -> None:
    result = child.result
    if child.hung:
        found["hangs"].append(name)
    elif result is None or isinstance(result, str):
        found["failed"].append(f"{name}: {result}")
    elif not result.right:
        found["wrong"].append(f"{name}: {result.compiled} for {result.eager}")
    elif not result.whole:
        found["failed"].append(f"{name}: breaks; {result.warned}")


def _forget(cache: Path) -> None:
    """Remove programs and kernels but not the executor, which takes half a minute to compile."""
    for kind in ("programs", "kernels"):
        for file in (cache / kind).glob("*"):
            if file.is_file():
                file.unlink(missing_ok=True)


def _left(cache: Path, folder: Path) -> list[str]:
    """What a killed process left that `evict` has not removed, but for what is younger than its patience."""

    def older(path: Path, seconds: float) -> bool:
        return time.time() - path.stat().st_mtime > seconds

    folders = [p for kind in ("programs", "kernels", "native") for p in (cache / kind).glob(f"{BUILDING}*")]
    left = [p for p in folders if (p / LOCK).exists() or older(p, YOUNG + 1)]
    left += [p for p in cache.rglob(f"{PARTIAL}*") if older(p, 3600)]
    return [str(p.relative_to(folder)) for p in left]
