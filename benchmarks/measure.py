"""Interleaved measurement on a machine that others use too: visits in turn, and the disturbed ones are left out."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VISIT = 0.25
"""Seconds that one visit to a variant lasts at least; the kernel counts processor time in hundredths of a second."""
VISITS = 8
"""Undisturbed visits per variant at least."""
DISTURBED = 0.1
"""Share of a core that other processes may use during a visit that counts."""


@dataclass(frozen=True)
class Visit:
    """A few steps of one variant in a row: seconds and page faults per step, cores that others used meanwhile."""

    seconds: float
    faults: float
    others: float


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step over the visits that count, and page faults per step.

    `disturbed` says that too few visits were quiet, so that the quietest half of all had to do.
    """

    median: float
    lower: float
    upper: float
    faults: float
    visits: int
    disturbed: bool


def others_seconds() -> float:
    """Processor seconds that all other processes have used since the machine started; 0 if unknown."""
    try:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return 0.0
    busy = (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    return busy - time.process_time()


def visit(step: Callable[[], object], steps: int) -> Visit:
    """Run `steps` steps and watch."""
    others, faults = others_seconds(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return Visit(seconds / steps, faults / steps, (others_seconds() - others) / seconds)


Visitor = Callable[[int], Visit]
"""Runs so many steps and watches; `partial(visit, step)`, or a process that does so."""


def visits(variants: Mapping[str, Visitor], steps: int, patience: int = 3) -> Iterator[tuple[str, Visit, float]]:
    """Visit the variants in turn until each has `VISITS` undisturbed visits with `steps` steps in all.

    Ends after `patience` times as many where others disturb. Yields the variant, the visit, and how much is done
    between 0 and 1.
    """
    per_visit = {name: max(1, round(VISIT / _seconds(visitor))) for name, visitor in variants.items()}
    wanted = max(max(VISITS, -(-steps // count)) for count in per_visit.values())
    quiet = dict.fromkeys(variants, 0)
    for turn in range(1, patience * wanted + 1):
        for name, visitor in variants.items():
            seen = visitor(per_visit[name])
            quiet[name] += seen.others <= DISTURBED
            yield name, seen, max(turn / (patience * wanted), min(quiet.values()) / wanted)
        if min(quiet.values()) >= wanted:
            return


def _seconds(visitor: Visitor) -> float:
    """About how long a step takes, once warm."""
    visitor(2)
    return visitor(1).seconds


def timing(seen: Sequence[Visit]) -> Timing:
    """Median and quartiles over the undisturbed visits."""
    counted = [v for v in seen if v.others <= DISTURBED]
    disturbed = len(counted) < 3
    if disturbed:
        counted = sorted(seen, key=lambda v: v.others)[: max(1, len(seen) // 2)]
    times = [1e3 * v.seconds for v in counted]
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else 3 * times
    return Timing(median, lower, upper, statistics.median(v.faults for v in counted), len(counted), disturbed)
