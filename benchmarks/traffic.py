"""The bytes of a training step: what PyTorch's eager kernels move, and what is left after each level.

    python -m benchmarks.traffic [NETWORK...] [--json FILE] [--top 5]

Nothing is executed: eager execution is watched on tensors without memory, ours is counted on the graph. The last line
is the geometric mean of the shares. Exits with 1 if a level before the last adds bytes to a network; the last one may,
since `RematerializeCheap` trades them for peak memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.accounting import CAPTURED, Account, encoder_layer_account, timed, training_account
from benchmarks.networks import NETWORKS, TWELVE
from benchmarks.train import ROOT, surroundings
from daceml_train.passes.base import LEVELS
from daceml_train.reporting import bytes_text

RESULTS = ROOT / "benchmarks" / "results" / "traffic.json"
LAYER = "bert_large_layer"
"""Not a network: one layer, without an update; it does not count for the mean."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print, write JSON where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description=__doc__)
    known = (*NETWORKS, LAYER)
    names = f"of {', '.join(known)} (default: the twelve and the layer)"
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=names)
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write the figures there; the page's: {RESULTS}")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="show the N largest operators of each network")
    parser.add_argument("--small", action="store_true", help="the networks' small sizes")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.networks if name not in known]:
        parser.error(f"no network is called {unknown[0]!r}; known: {', '.join(known)}")
    warnings.simplefilter("ignore")
    console = Console(width=None if sys.stdout.isatty() else 150)
    accounts: dict[str, Account] = {}
    for name in options.networks or (*TWELVE, LAYER):
        with console.status(f"{name}: counting") if sys.stdout.isatty() else nullcontext():
            result, seconds = timed(
                lambda name=name: (  # type: ignore[misc]
                    encoder_layer_account() if name == LAYER else training_account(NETWORKS[name], small=options.small)
                )
            )
        accounts[name] = result
        print(f"{line(name, result)}  ({seconds:.0f} s)", file=sys.stderr, flush=True)
        for text in top(result, options.top):
            print(text, flush=True)
    console.print(table(accounts))
    counted = [result for name, result in accounts.items() if name != LAYER]
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures(accounts), indent=1) + "\n", encoding="utf-8")
    if counted:
        print(f"geometric mean {mean(counted):.2f}")
    return int(any(set(result.grown) - {LEVELS[-1]} for result in accounts.values()))


def mean(accounts: Sequence[Account]) -> float:
    """The geometric mean of the shares."""
    return math.exp(sum(math.log(result.share) for result in accounts) / len(accounts))


def line(name: str, result: Account) -> str:
    """One network in one line."""
    stages = " ".join(f"{bytes_text(size)}" for size in result.stages.values())
    return f"{name:16} {bytes_text(result.eager):>9} -> {stages}  share {result.share:.3f}"


def top(result: Account, count: int) -> list[str]:
    """The largest operators, eager's and ours side by side."""
    pairs = zip(
        list(result.eager_by_operator.items())[:count], list(result.ours_by_operator.items())[:count], strict=False
    )
    return [f"    {bytes_text(a):>9} {x:44} {bytes_text(b):>9} {y}" for (x, a), (y, b) in pairs]


def table(accounts: dict[str, Account]) -> Table:
    """The figures; a level that adds bytes is marked."""
    result = Table(box=SIMPLE_HEAD)
    result.add_column("network", no_wrap=True)
    for heading in ("eager", CAPTURED, *(level.replace("_", " ") for level in LEVELS), "share", "kernels"):
        result.add_column(heading, justify="right", no_wrap=True)
    for name, row in accounts.items():
        stages = [f"{bytes_text(size)}{' !' if stage in row.grown else ''}" for stage, size in row.stages.items()]
        kernels = f"{row.eager_kernels} -> {row.kernels}"
        result.add_row(name, bytes_text(row.eager), *stages, f"{row.share:.3f}", kernels)
    return result


def figures(accounts: dict[str, Account]) -> dict[str, Any]:
    """Everything as plain data."""
    rows = {name: dataclasses.asdict(row) | {"share": row.share} for name, row in accounts.items()}
    counted = [row for name, row in accounts.items() if name != LAYER]
    found = {name: value for name, value in surroundings().items() if name in ("date", "versions")}
    return found | {"geometric_mean": mean(counted) if counted else None, "networks": rows}


if __name__ == "__main__":
    sys.exit(main())
