"""The data that a widget receives: passes, steps, previews."""

from __future__ import annotations

import functools
from typing import Any

from daceml_train.exploration.session.listing import every_pass
from daceml_train.exploration.session.steps import Preview, Step
from daceml_train.passes.base import Pass


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
