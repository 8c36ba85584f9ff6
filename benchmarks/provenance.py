"""Provenance: the commit that a row of results comes from, and the sentence that a page says about it."""

from __future__ import annotations

import functools
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

NOT_RECORDED = "a commit that was not recorded"


@functools.cache
def commit() -> str:
    """The commit of this project, with a mark if files differ from it; empty where git does not say.

    Results, which the rows before have written, do not count.
    """
    name = _git("describe", "--always", "--exclude=*")
    others = (".", ":(exclude)benchmarks/results", ":(exclude)docs/results")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *others)
    return f"{name}-dirty" if name and changed else name


def _git(*arguments: str) -> str:
    folder = Path(__file__).parents[1]
    found = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=folder)
    return found.stdout.strip()


def origin(commits: Iterable[str], rows: str = "rows") -> str:
    """Which commits the rows come from: of one run all have the same."""
    counts = Counter(name or NOT_RECORDED for name in commits)
    if counts.keys() <= {NOT_RECORDED}:
        return f"The commits of these {rows} were not recorded: they may come from several runs."
    if len(counts) == 1:
        return f"All {rows} are of {_named(next(iter(counts)))}."
    parts = ", ".join(f"{count} of {_named(name)}" for name, count in counts.most_common())
    return f"The {rows} come from several commits: {parts}."


def _named(name: str) -> str:
    return name if name == NOT_RECORDED else f"commit {name}"
