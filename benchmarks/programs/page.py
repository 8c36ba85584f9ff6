"""The stored results of the imperative programs, and the page of the documentation made from them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "programs.json", ROOT / "docs" / "results" / "programs.md"
ROWS = ROOT / "benchmarks" / "results" / "program_rows.json"
MARKS = "<!-- figures: begin -->", "<!-- figures: end -->"

Rows = Sequence[Mapping[str, Any]]


def stored() -> Rows:
    """The rows of the last run."""
    rows: Rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return rows


def stored_rows() -> dict[str, list[dict[str, Any]]]:
    """What `benchmarks.programs.rows` measured last."""
    found: dict[str, list[dict[str, Any]]] = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    return found


def _cost(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """What Python costs, as tables."""
    heads = {
        "changes": ("what changes", {"programs": "programs", "ratio": "step, with / without"}),
        "observation": (
            "what is looked at",
            {"step": "step ms", "more": "more ms", "eager": "more ms, eager", "cost": "cost beyond eager's"},
        ),
        "flips": ("what flips", {"first": "the first time / eager step", "known": "later / eager step"}),
    }
    lines = ["## What Python costs", "", "`python -m benchmarks.programs.rows --update`"] if found else []
    for kind, (what, columns) in heads.items():
        if kind in found:
            lines += ["", f"| {what} | {' | '.join(columns.values())} |", f"|---|{'--:|' * len(columns)}"]
            for row in found[kind]:
                cells = [_figure(name, row.get(name)) for name in columns]
                lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    return [*lines, ""] if lines else []


def _figure(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.1%}" if name == "cost" else f"{value:.2f}"


def replaced(rows: Rows, program: str, new: Rows, order: Sequence[str]) -> Rows:
    """The rows with those of one program replaced in the ways that ran, in the order of the programs that exist."""
    ways = {row["way"] for row in new}
    found = [*(row for row in rows if row["program"] != program or row["way"] not in ways), *new]
    return sorted((row for row in found if row["program"] in order), key=lambda row: order.index(row["program"]))


def write(rows: Rows) -> None:
    """Write the results and the page."""
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}\n{text(rows)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


def text(rows: Rows) -> str:
    """Summary, table per way, what differs, and why not all is one program."""
    names = list(dict.fromkeys(row["program"] for row in rows))
    by = {(row["program"], row["way"]): row for row in rows}
    lines = [f"{len(names)} programs, PyTorch {torch.__version__}."]
    for way in ("training_step", "optimize"):
        ours = [by[name, way] for name in names if (name, way) in by]
        lines += ["", f"## `{way}`", "", *_summary(ours, by), ""]
        lines += ["| program | mode | losses | updates | effects | random | programs | late | eager ms | ms | ratio |"]
        lines[-1] += " torch.compile |"
        lines += ["|---|---|---|---|---|---|--:|--:|--:|--:|--:|--:|"]
        lines += [_line(row, by.get((row["program"], "torch.compile"))) for row in ours]
    lines += [
        "",
        *_cost(stored_rows()),
        "## What differs",
        "",
        *_notes(rows, "differs"),
        "",
        "## Why not one program",
        "",
    ]
    return "\n".join([*lines, *_notes(rows, "reasons")])


def ratio(row: Mapping[str, Any] | None) -> float | None:
    """How many times as fast as eager execution; None where no time was taken."""
    if row is None or not row["ms"] or not row["eager_ms"]:
        return None
    return float(row["eager_ms"] / row["ms"])


def mean(ratios: Sequence[float]) -> str:
    """The geometric mean."""
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}" if ratios else "none"


def _summary(ours: Rows, by: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    same = sum(not row["differs"] and row["steps"] > 0 for row in ours)
    modes = {mode: sum(row["mode"] == mode for row in ours) for mode in ("whole", "paths", "pieces", "eager")}
    timed = [(row["program"], found) for row in ours if (found := ratio(row)) is not None]
    both = [(found, other) for name, found in timed if (other := ratio(by.get((name, "torch.compile")))) is not None]
    found = ", ".join(f"{count} {mode}" for mode, count in modes.items())
    slow, late = sum(r < 0.95 for _, r in timed), sum(row["late"] > 0 for row in ours)
    return [
        f"{same} of {len(ours)} are as in eager execution; {found}; {late} compile late.",
        f"Geometric mean over the {len(timed)} that were timed: {mean([r for _, r in timed])} × eager; {slow} of them",
        f"run slower than 0.95 × eager, and {len(ours) - len(timed)} ran out of time or failed. Over the",
        f"{len(both)} that `torch.compile` was timed on as well: {mean([a for a, _ in both])} × eager, `torch.compile`",
        f"{mean([b for _, b in both])} × eager.",
    ]


def _line(row: Mapping[str, Any], other: Mapping[str, Any] | None) -> str:
    differs, done = row["differs"], row["steps"] > 0
    failed = "error" in differs
    marks = ["no" if kind in differs else "yes" if done and not failed else "-" for kind in ("losses",)]
    complete = row["ms"] is not None
    marks += ["no" if "updates" in differs else "yes" if complete and not failed else "-"]
    marks += ["no" if kind in differs else "yes" if done and not failed else "-" for kind in ("effects", "random")]
    took, times = ratio(row), ratio(other)
    cells = [row["program"], "failed" if failed else row["mode"], *marks, row["programs"], row["late"]]
    cells += [f"{row['eager_ms']:.2f}" if row["eager_ms"] else "-", f"{row['ms']:.2f}" if row["ms"] else "-"]
    cells += ["-" if found is None else f"{found:.2f}" for found in (took, times)]
    return f"| {' | '.join(map(str, cells))} |"


def _notes(rows: Rows, kind: str) -> list[str]:
    """What is said in several rows, once, with where."""
    messages: dict[str, list[str]] = {}
    for row in rows:
        found = row[kind]
        texts = [f"{what}: {where}" for what, where in found.items()] if isinstance(found, dict) else found
        for note in texts:
            messages.setdefault(" ".join(note.split()), []).append(f"{row['program']} by `{row['way']}`")
    return [f"- {note} ({', '.join(where)})" for note, where in messages.items()] or ["Nothing."]
