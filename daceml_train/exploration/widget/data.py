"""The data that a widget receives: passes, steps, previews."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from daceml_train.exploration.session.listing import every_pass
from daceml_train.exploration.session.steps import Match, Preview, Step
from daceml_train.passes.base import Pass

ROWS = 150
"""The maximum number of matches that are sent; the filters find the others."""
EACH = 5
"""Matches of each pass that are sent in any case, the largest savings first."""


def sent(found: Sequence[Match]) -> list[Match]:
    """The matches that a page receives, in their order: the first of each pass, and the largest savings."""
    first: dict[str, int] = {}
    kept = set()
    for place, match in enumerate(found):
        first[match.name] = first.get(match.name, 0) + 1
        if first[match.name] <= EACH:
            kept.add(place)
    for place in range(len(found)):
        if len(kept) >= ROWS:
            break
        kept.add(place)
    return [found[place] for place in sorted(kept)[:ROWS]]


def groups_data(found: Sequence[Match]) -> list[dict[str, Any]]:
    """Totals per pass, and in it per module; the largest savings first. Refused matches count apart.

    Savings of matches that exclude each other are added up all the same, so a total is a bound.
    """
    passes: dict[str, dict[str, Any]] = {}
    for match in found:
        group = passes.setdefault(match.name, {**_no_matches(match.name), "level": match.level, "modules": {}})
        module = group["modules"].setdefault(match.module, _no_matches(match.module))
        for total in (group, module):
            total["refused" if match.refusal else "count"] += 1
            if not match.refusal:
                total["bytes"] += match.bytes or 0
                total["unknown"] += match.bytes is None
    ranked = sorted(passes.values(), key=lambda group: group["bytes"])
    return [{**g, "modules": sorted(g["modules"].values(), key=lambda m: m["bytes"])} for g in ranked]


def _no_matches(name: str) -> dict[str, Any]:
    return {"name": name, "count": 0, "refused": 0, "bytes": 0, "unknown": 0}


def step_data(step: Step) -> dict[str, Any]:
    """A step of the history."""
    return {
        "number": step.number,
        "name": step.name,
        "text": str(step.transformation),
        "where": step.where,
        "module": step.module,
        "matches": step.matches,
        "before": step.bytes[0],
        "after": step.bytes[1],
        "seconds": step.seconds,
    }


def preview_data(result: Preview) -> dict[str, Any]:
    """What applying would do, or why it is impossible."""
    if result.reason is not None:
        return {"reason": result.reason, "text": str(result.transformation)}
    return {
        "text": str(result.transformation),
        "rows": [[name, *getattr(result, name)] for name in ("bytes", "peak", "flops", "operators")],
        "removed": [str(node) for node in result.removed[:8]],
        "gone": len(result.removed),
        "added": [str(node) for node in result.added[:8]],
        "new": len(result.added),
    }


def options_data(transformation: Pass) -> dict[str, str]:
    """The options of a pass that differ from the default, as texts."""
    found = str(transformation).removeprefix(f"{transformation.name}(").removesuffix(")")
    return {"text": found} if found else {}


@functools.cache
def passes_data() -> list[dict[str, Any]]:
    """Every pass: name, level, picture and options."""
    rows = []
    for transformation in every_pass():
        about = transformation.describe()
        options = [{"name": n, "type": t, "default": d} for n, (t, d) in about.options.items()]
        rows.append(
            {
                "name": about.name,
                "level": about.level,
                "summary": about.summary,
                "picture": about.picture,
                "details": about.details,
                "options": options,
            }
        )
    return rows
