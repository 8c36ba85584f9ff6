"""What came of a sample, and of all samples of an entry."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.provenance import commit

KINDS = ("native", "ATen", "as PyTorch", "left out", "wrong", "raised")
"""In a graph of our operators alone; in a graph, with calls of PyTorch's; run by PyTorch, with the reason; not
comparable, with the reason; and the two that must not be."""
FAILURES = ("wrong", "raised")


@dataclass
class Outcome:
    """One sample: its number (with `+` where it is `h + op(h)`), one of `KINDS`, and what differs or why."""

    sample: str
    kind: str
    detail: str = ""
    fallbacks: tuple[str, ...] = ()


@dataclass
class Row:
    """One entry in one stage: how many samples came out how, reasons, and the operators called in PyTorch."""

    stage: str
    entry: str
    counts: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    """`as PyTorch` and `left out`: a reason without what differs from sample to sample -> samples."""
    failures: list[str] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    commit: str = ""


def row(stage: str, entry: str, outcomes: Iterable[Outcome], seconds: float) -> Row:
    """The samples of one entry together."""
    results = list(outcomes)
    kinds = collections.Counter(o.kind for o in results)
    reasons = collections.Counter(
        f"{o.kind}: {general(o.detail)}" for o in results if o.kind in ("as PyTorch", "left out")
    )
    failures = [f"#{o.sample} {o.kind}: {o.detail}"[:300] for o in results if o.kind in FAILURES]
    fallbacks = collections.Counter(name for o in results for name in o.fallbacks)
    counts = {kind: kinds[kind] for kind in KINDS if kinds[kind]}
    return Row(stage, entry, counts, dict(reasons), failures, dict(fallbacks), round(seconds, 2), commit())


def general(reason: str) -> str:
    """A reason without what differs from sample to sample."""
    first = reason.strip().splitlines()[0] if reason.strip() else ""
    first = re.sub(r"\s*\(at [^)]*\)", "", first)
    return re.sub(r"'[^']*'|\d+|\[[^]]*\]|[fibc]\d+\[.*?\]|\bu\d+", "…", first)[:120].strip()
