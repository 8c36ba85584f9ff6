"""Recursive networks beside PyTorch: `python -m benchmarks.trees [ROW ...] [--threads N ...] [--page]`.

Rows: treelstm, unchanged, dags, rntn, mutual, extremes; all by default. Results are written after each row to
`benchmarks/results/trees.json` and `docs/results/trees.md`. Ways take turns, batch by batch. Exits with 1 where
gradients differ from PyTorch's by more than 1e-5 (float64: 1e-12) of their norm.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import daceml_train as dt
from benchmarks.provenance import commit
from benchmarks.train import ROOT, surroundings
from benchmarks.trees import byhand, extremes, page
from benchmarks.trees.networks import RNTN, Dags, Mutual, TreeLSTM, Unchanged

RESULTS = ROOT / "benchmarks" / "results" / "trees.json"
PAGE = ROOT / "docs" / "results" / "trees.md"
ROWS: dict[str, Any] = {
    "treelstm": TreeLSTM,
    "unchanged": Unchanged,
    "dags": Dags,
    "rntn": RNTN,
    "mutual": Mutual,
}
EXTREMES = "extremes"
WAYS = ("daceml_train", "levels by hand, lists", "levels by hand, copies")
TREES = (25, 125)
"""Trees of batches whose memory is compared: the larger one less the smaller one is free of what is fixed."""
BATCHES, TURNS, SHAPES = 6, 3, 20
"""Batches that take turns, how often, and batches of new trees after those."""


def difference(kind: Any, dtype: torch.dtype) -> float:
    """The largest difference of a gradient from PyTorch's, relative to its norm."""
    torch.manual_seed(0)
    model = kind().to(dtype)
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    worst = 0.0
    for seed in range(2):
        model.zero_grad(), twin.zero_grad()
        data = kind.data(seed, 5)
        compiled(data).backward(), twin(data).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            worst = max(worst, float((p.grad - q.grad).norm() / q.grad.norm()))
    return worst


def measured(kind: Any, threads: int) -> dict[str, Any]:
    """Milliseconds per batch, forward and backward; processor time on one thread, wall clock on two."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    torch.manual_seed(0)
    net = kind()
    twin = copy.deepcopy(net)
    compiled: Any = dt.optimize(net)
    batches = [kind.data(seed) for seed in range(BATCHES)]
    ways: dict[str, Callable[[int], Any]] = {
        "daceml_train": lambda k: compiled(batches[k]).backward(),
        "eager recursion": lambda k: twin(batches[k]).backward(),
    }
    if issubclass(kind, TreeLSTM):
        results = [byhand.linearized(batch) for batch in batches]
        ways["levels by hand, lists"] = lambda k: byhand.by_lists(twin, results[k]).backward()
        ways["levels by hand, copies"] = lambda k: byhand.by_copies(twin, results[k]).backward()
        alone = [byhand.matmuls(twin, each) for each in results]
        by_level = [byhand.matmuls(twin, each, True) for each in results]
        ways["matmuls alone"] = lambda k: alone[k]()
        ways["matmuls alone, by level"] = lambda k: by_level[k]()
    times: dict[str, list[float]] = {name: [] for name in ways}
    start = time.perf_counter()
    ways["daceml_train"](0)
    first = time.perf_counter() - start
    for turn in range(TURNS + 1):
        for k in range(BATCHES):
            for name, run in ways.items():
                if name == "eager recursion" and (turn > 1 or k % 3):
                    continue
                net.zero_grad(), twin.zero_grad()
                start = clock()
                run(k)
                if turn:
                    times[name].append((clock() - start) * 1e3)
    programs = compiled._daceml_train.recursions["forward"].structures.programs
    before, fresh = programs.compiled, []
    for seed in range(100, 100 + SHAPES):
        batch = kind.data(seed)
        net.zero_grad()
        start = clock()
        compiled(batch).backward()
        fresh.append((clock() - start) * 1e3)
    return {
        "ms": {name: round(statistics.median(found), 2) for name, found in times.items()},
        "new_trees_ms": round(statistics.median(fresh), 2),
        "new_trees_most_ms": round(max(fresh), 2),
        "first_s": round(first, 2),
        "programs": programs.compiled,
        "recompiled": programs.compiled - before,
        "in_pytorch": len(programs.refused),
    }


def measured_alone() -> dict[str, Any]:
    """What is measured in processes of its own."""
    return {
        "shapes": extremes.alone("shapes", fresh=True),
        "deep": extremes.alone("deep"),
        "bad": extremes.alone("bad"),
        "memory": {way: [extremes.alone("memory", way, count) for count in TREES] for way in WAYS},
        "commit": commit(),
    }


def main() -> int:
    """Measure rows, and write them and the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trees", description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, EXTREMES, []], help="which rows")
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2], help="on how many threads")
    parser.add_argument("--page", action="store_true", help="write the page from the results alone")
    given = parser.parse_args()
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
    for name in [] if given.page else given.rows or [*ROWS, EXTREMES]:
        print(f"{name} ...", file=sys.stderr, flush=True)
        if name == EXTREMES:
            found[EXTREMES] = measured_alone()
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            continue
        kind = ROWS[name]
        row: dict[str, Any] = {str(threads): measured(kind, threads) for threads in given.threads}
        torch.set_num_threads(1)
        row["float32"], row["float64"] = (difference(kind, dtype) for dtype in (torch.float32, torch.float64))
        found["rows"][name] = {**row, "commit": commit()}
        found["surroundings"] = surroundings()
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(row), file=sys.stderr, flush=True)
    PAGE.write_text("\n".join(page.lines(found)) + "\n", encoding="utf-8")
    return int(any(row["float32"] > 1e-5 or row["float64"] > 1e-12 for row in found["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
