"""All passes as a page, from their docstrings: `python -m benchmarks.passes > docs/results/passes.md`."""

from __future__ import annotations

from collections.abc import Iterator

from daceml_train.passes.base import LEVELS, Description
from daceml_train.transformations import catalog
from daceml_train.transformations.pipelines import INFERENCE, MIXED_PRECISION, TRAINING

HEAD = """# Passes

Generated from the passes' docstrings; do not edit. To regenerate it:

    .venv/bin/python -m benchmarks.passes > docs/results/passes.md

The picture of a pass shows the pattern that it matches, an arrow, and the replacement. "Runs in" lists the built-in
pipelines that contain the pass."""


def main() -> None:
    """Print the page."""
    print("\n".join(page()))


def page() -> Iterator[str]:
    """The page line by line."""
    yield HEAD
    own = {n: kind for n, kind in catalog.passes().items() if kind.__module__.startswith("daceml_train.")}
    told = {level: [kind.describe() for _, kind in sorted(own.items()) if kind.level == level] for level in LEVELS}
    yield "\n| level | pass | what it does | runs in |\n|---|---|---|---|"
    for level, descriptions in told.items():
        for description in descriptions:
            name = f"[`{description.name}`](#{description.name})"
            summary = " ".join(description.summary.split())
            yield f"| {level.replace('_', ' ')} | {name} | {summary} | {_places(description)} |"
    for level, descriptions in told.items():
        yield f"\n## {level.replace('_', ' ').capitalize()}"
        for description in descriptions:
            yield from _section(description)


def _section(description: Description) -> Iterator[str]:
    yield f"\n### {description.name}\n\n{description.summary}\n\n```\n{description.picture}\n```"
    if description.details:
        yield f"\n{description.details}"
    if description.options:
        yield "\n| option | type | default |\n|---|---|---|"
        for name, (kind, default) in description.options.items():
            yield f"| `{name}` | `{kind}` | `{default}` |".replace(" | None", " \\| None")


def _places(description: Description) -> str:
    """Where the pipelines hold a pass."""
    found = []
    for label, pipeline in (("TRAINING", TRAINING), ("INFERENCE", INFERENCE)):
        levels = [level for level, passes in pipeline.passes if any(p.name == description.name for p in passes)]
        elsewhere = [level.replace("_", " ") for level in levels if level != description.level]
        if levels:
            found.append(label + (f" (also {', '.join(elsewhere)})" if elsewhere else ""))
    if not found and any(p.name == description.name for p in MIXED_PRECISION):
        found.append("MIXED_PRECISION")
    return ", ".join(found) or "none: add it where you want it"


if __name__ == "__main__":
    main()
