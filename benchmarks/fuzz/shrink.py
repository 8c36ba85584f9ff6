"""Smaller cases that still fail, layer by layer and option by option."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.fuzz.case import OPTIMIZERS, Case
from benchmarks.fuzz.checking import Rejected, check
from benchmarks.fuzz.generate import shapes_of


def shrunk(case: Case, seconds: float) -> Case:
    """A smaller case that still fails."""
    until = time.perf_counter() + seconds
    tries: Callable[[Case], Iterator[Case]] = _smaller
    while True:
        for smaller in tries(case):
            if time.perf_counter() > until:
                return case
            try:
                wrong = check(smaller).wrong
                if not wrong:
                    continue
            except Rejected:
                continue
            case = smaller
            break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    shapes = shapes_of(case) or []
    count = len(case.layers)
    for keep in (count // 2, count - 1):
        if 0 < keep < count:
            yield replace(case, layers=case.layers[:keep], results=tuple(r for r in case.results if r[0] < keep))
    if not case.tokens:
        for cut in (count // 2, 1):
            if 0 < cut < count and len(shapes) > cut and shapes[cut] and shapes[cut][0] == case.sizes[0]:
                yield replace(_without(case, range(cut)), shape=shapes[cut][1:])
    for i in range(count):
        yield _without(case, [i])
    changes: list[dict[str, Any]] = [{"without": ()}, {"threads": 1}, {"optimizer": OPTIMIZERS[0]}]
    changes += [{"results": case.results[:i] + case.results[i + 1 :]} for i in range(len(case.results))]
    changes += [{"dynamic": None}, {"backend": False}, {"unlimited": False}]
    changes += [{"channels_last": False}, {"loss": "mse_loss"}]
    for change in changes:
        if (smaller := replace(case, **change)) != case:
            yield smaller


def _without(case: Case, dropped: Sequence[int]) -> Case:
    """Without some layers; values before a dropped layer replace those after it."""
    places, left = {}, 0
    for i in range(len(case.layers)):
        places[i] = left
        left += i not in dropped
    layers = []
    for i, layer in enumerate(case.layers):
        if i in dropped:
            continue
        text = re.sub(r"\ba(\d+)\b", lambda m: f"a{places[int(m[1])]}", layer.forward)
        text = re.sub(r"self\.l(\d+)", lambda m: f"self.l{places.get(int(m[1]), 99)}", text)
        layers.append(replace(layer, forward=text))
    results = {places[i]: used for i, used in case.results if places[i] < left}
    return replace(case, layers=tuple(layers), results=tuple(sorted(results.items())))
