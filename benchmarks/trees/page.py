"""The page of what `benchmarks.trees` found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.provenance import origin

HEAD = """# Recursion over trees

Generated; do not edit. To measure again:

    .venv/bin/python -m benchmarks.trees             # all rows: about ten minutes on two cores
    .venv/bin/python -m benchmarks.trees rntn        # one row

Forward and backward passes of networks that call themselves over trees or DAGs, with their recursion named by
`dt.recursive`, or found in unchanged code. Batches have 25 trees of 5 to 50 leaves, or 10 DAGs of 20 to 60 nodes, none
like another. Ways take turns, batch by batch; times are medians, in processor time on one thread, and in wall clock on
two. They include the walk over the user's objects in Python; *levels by hand* begin with trees that are in the order of
levels already. *Matmuls alone* are the six large ones of the TreeLSTM, each on all nodes at once: a bound that no way
can beat. *New trees* are batches of shapes that no earlier batch had. *Difference* is the largest one of a parameter's
gradient from PyTorch's, relative to its norm.
"""
BY_LEVEL = """Of the matmuls *by level*, those two that wait for children are one per level: a bound for all ways that
run levels, which only one that does nothing else reaches.
"""
NAMES = {
    "treelstm": "TreeLSTM, 300 wide",
    "unchanged": "TreeLSTM, unchanged code",
    "dags": "child-sum network over DAGs, 200 wide",
    "rntn": "RNTN, 30 wide",
    "mutual": "mutual recursion, 200 wide",
}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The page line by line."""
    yield HEAD
    around, rows = found["surroundings"], found["rows"]
    if any("by level" in way for row in rows.values() for t in ("1", "2") for way in row.get(t, {}).get("ms", {})):
        yield BY_LEVEL
    versions = ", ".join(f"{name} {number}" for name, number in around["versions"].items())
    yield f"Measured {around['date']} on {around['cores']} cores of {around['processor']}; {versions}."
    yield origin(row["commit"] for row in rows.values())
    for threads in (t for t in ("1", "2") if any(t in row for row in rows.values())):
        yield f"\n## {'One thread' if threads == '1' else 'Two threads'}\n"
        yield "| network | way | ms a batch | daceml_train is faster |\n|---|---|---|---|"
        for name, row in rows.items():
            ms = row.get(threads, {}).get("ms", {})
            for way, time in ms.items():
                yield f"| {NAMES[name]} | {way} | {time:,.1f} | {time / ms['daceml_train']:.2f} × |"
    yield "\n## New trees, compilation, gradients\n"
    yield (
        "| network | ms with new trees | slowest | first batch, s | programs | recompiled | kinds in PyTorch "
        "| difference | in float64 |\n|---|---|---|---|---|---|---|---|---|"
    )
    for name, row in rows.items():
        one = row.get("1") or row["2"]
        yield (
            f"| {NAMES[name]} | {one['new_trees_ms']:,.1f} | {one['new_trees_most_ms']:,.1f} | {one['first_s']:.1f} "
            f"| {one['programs']} | {one['recompiled']} | {one['in_pytorch']} | {row['float32']:.1e} "
            f"| {row['float64']:.1e} |"
        )
    if "extremes" in found:
        yield from _extremes(found["extremes"])


def _extremes(found: Mapping[str, Any]) -> Iterator[str]:
    """What is measured in processes of its own."""
    shapes, deep, memory = found["shapes"], found["deep"], found["memory"]
    yield "\n## Many shapes, depth, memory, bad data\n"
    yield (
        f"{shapes['shapes']} batches of new trees, unchanged code, empty cache: the first batch takes "
        f"{shapes['first_s']:.1f} s with its compilation, and the slowest of the others "
        f"{shapes['slowest_later_ms']:,.0f} ms; {shapes['programs']} program, {shapes['recompiled']} recompiled.\n"
    )
    times = ", ".join(f"{name} {time:,.0f} ms" for name, time in deep["ms"].items())
    yield (
        f"A list of {deep['depth']:,} words as a tree, forward and backward, 30 wide: {times}; gradients differ by "
        f"{deep['difference']:.1e}.\n"
    )
    yield "| way | peak memory, MiB: 25 trees | 125 trees | 100 more trees | times levels by hand, copies |"
    yield "|---|---|---|---|---|"
    mebi = 1 << 20
    least = memory["levels by hand, copies"][1] - memory["levels by hand, copies"][0]
    for way, (few, many) in memory.items():
        more = many - few
        yield f"| {way} | {few / mebi:,.0f} | {many / mebi:,.0f} | {more / mebi:,.0f} | {more / least:.2f} |"
    yield "\nPeak memory is that of a process, with PyTorch and, in the first row, the compiler in it.\n"
    yield "| bad data | error |\n|---|---|"
    for name, message in found["bad"].items():
        yield f"| {name} | `{message}` |"
