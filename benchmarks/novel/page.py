"""The page of the gallery of operators."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.provenance import origin


def ratio(row: Mapping[str, Any]) -> float:
    """The time of the best of PyTorch over that of the best of ours, in `optimize`."""
    theirs = [row[way] for way in ("eager", "compile") if way in row]
    ours = [row[way] for way in ("optimized", "tuned") if way in row]
    return min(theirs) / min(ours) if theirs and ours else math.nan


def page(rows: Mapping[str, Mapping[str, Any]], when: str, windows: Sequence[str]) -> str:
    """The page of these rows."""
    inductor = any("compile" in row for row in rows.values())
    theirs = "the best of eager PyTorch and `torch.compile`" if inductor else "eager PyTorch"
    lines = [
        "# Operators as expressions",
        "",
        "Generated; do not edit. To measure again:",
        "",
        "    .venv/bin/python -m benchmarks.novel --tune --save                  # with torch.compile: about two hours",
        "    .venv/bin/python -m benchmarks.novel --tune --save --no-inductor    # without: half an hour",
        "",
        "Forward pass and all gradients of the operators of the gallery: as a PyTorch user composes them, as an",
        "expression that is called at once, in `dt.optimize`, and there with schedules that `dt.tune` has measured.",
        "Milliseconds of processor time per call, medians of interleaved visits. *Faster* is the time of",
        f"{theirs} over that of the better of the last two. *Error* is the largest norm-wise difference of a gradient",
        "from eager's.",
        "",
        f"Measured {when}. {origin(str(row['commit']) for row in rows.values())}",
        "",
        "| operator | eager | torch.compile | called at once | optimized | tuned | faster | schedules, dropped "
        "| tuning | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [
            f"{row[way]:.2f}" if way in row else "" for way in ("eager", "compile", "expression", "optimized", "tuned")
        ]
        counts = f"{row['schedules']}, {row['dropped schedules']}" if "schedules" in row else ""
        tuning = f"{row['tuning seconds']:.0f} s" if row.get("schedules") else ""
        error = max(row.get(f"{way} error", 0.0) for way in ("expression", "optimized", "tuned"))
        lines.append(f"| {' | '.join([name, *cells, f'{ratio(row):.2f} ×', counts, tuning, f'{error:.0e}'])} |")
    lines.append("")
    for label, names in (("all", list(rows)), ("those that read windows", [n for n in windows if n in rows])):
        known = [found for found in (ratio(rows[name]) for name in names) if not math.isnan(found)]
        if known:
            lines.append(f"Geometric mean of {label}: {math.exp(statistics.fmean(map(math.log, known))):.2f} ×.")
    return "\n".join(lines) + "\n"


__all__ = ["page", "ratio"]
