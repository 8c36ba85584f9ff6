"""The page of training on several processes: `python -m benchmarks.scale_page > docs/results/scale.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.provenance import origin
from daceml_train.ops.collective import AllReduce
from daceml_train.ops.divided_tables import LookupRows, ReturnRows
from daceml_train.reporting.scaling import Profile, simulated
from daceml_train.runtime.links import Link
from daceml_train.tensor import DType, Tensor

RESULTS = Path(__file__).parent / "results"
FILES = {2: RESULTS / "scale.json", 4: RESULTS / "scale_4.json"}
TABLE = RESULTS / "scale_table.json"
LINK = Link(alpha=8e-6, bandwidth=45e9, jitter=0.01)
ASSUMED = {
    "ResNet-50, float32 gradients": Profile(0.028, 0.056, 0.002, 4 * 25_600_000),
    "BERT-large, bfloat16 gradients": Profile(0.060, 0.120, 0.006, 2 * 340_000_000),
    "a GPT of 1.5 billion, bfloat16 gradients": Profile(0.250, 0.500, 0.020, 2 * 1_500_000_000),
}
"""Seconds of forward pass, backward pass and update that are assumed of a GPU, and bytes of gradients."""
MANY = (8, 64, 256, 1000)
DDP, COMPILED, STEP = "DDP", "DDP(torch.compile)", "training_step(mesh=)"

HEAD = """# Several processes

Generated; do not edit. To measure again, on an idle machine:

    .venv/bin/python -m benchmarks.scale --ranks 2 --json benchmarks/results/scale.json
    .venv/bin/python -m benchmarks.scale --ranks 4 --json benchmarks/results/scale_4.json
    .venv/bin/python -m benchmarks.scale table --ranks 4 --json benchmarks/results/scale_table.json
    .venv/bin/python -m benchmarks.scale_page > docs/results/scale.md

Each process has one thread. All variants train the same network on the same rows, in turn, and end with the same
parameters up to rounding. *Speed-up* is over the better of `DistributedDataParallel` around the eager module and around
`torch.compile`. Bytes are those of each rank and step; they are counted on the loopback device. *Simulated* is the time
that `dt.report(step, run, ranks=, link=)` predicts of steps that follow each other (*one after another*), from the
launches of one rank and the link between the processes, both measured in the same run.
"""


def main() -> int:
    """Print the page from the figures that are there."""
    print("\n".join(page()))
    return 0


def page() -> Iterator[str]:
    """The page line by line."""
    yield HEAD
    for ranks, path in FILES.items():
        if path.exists():
            yield from _networks(ranks, json.loads(path.read_text(encoding="utf-8")))
    if TABLE.exists():
        yield from _table(json.loads(TABLE.read_text(encoding="utf-8")))
    yield from _many()


def _networks(ranks: int, results: dict[str, Any]) -> Iterator[str]:
    yield f"## {ranks} processes\n"
    yield "| network | DDP, ms | DDP(torch.compile), ms | step, ms | speed-up | promised, MB | counted / promised |"
    yield "|---|---|---|---|---|---|---|"
    for name, rows in results["networks"].items():
        step, best = rows[STEP], min(rows[DDP]["ms"], rows[COMPILED]["ms"])
        times = f"{rows[DDP]['ms']:.1f} | {rows[COMPILED]['ms']:.1f} | {step['ms']:.1f} | {best / step['ms']:.2f}"
        yield f"| {name} | {times} | {step['promised'] / 1e6:.3f} | {step['counted'] / step['promised']:.4f} |"
    yield ""
    yield f"The geometric mean of the speed-ups is **{results['geometric_mean']:.2f}**. {origin([results['commit']])}\n"
    steps = {name: rows[STEP] for name, rows in results["networks"].items() if "following ms" in rows[STEP]}
    if steps:
        yield "| network | one after another, ms | simulated, ms | simulated / measured |"
        yield "|---|---|---|---|"
    for name, step in steps.items():
        ratio = step["predicted"] / step["following ms"]
        yield f"| {name} | {step['following ms']:.1f} | {step['predicted']:.1f} | {ratio:.2f} |"
    if steps:
        yield ""


def _table(results: dict[str, Any]) -> Iterator[str]:
    yield f"## A large table, {results['ranks']} processes\n"
    yield "1,000,000 rows of 64, of which each rank reads 2,048 in a step.\n"
    yield "| | parameters on a rank, MB | promised, MB | counted, MB |"
    yield "|---|---|---|---|"
    for name, row in results["rows"].items():
        sizes = (f"{row[key] / 1e6:.2f}" for key in ("held", "promised", "counted"))
        yield f"| {name} | {' | '.join(sizes)} |"
    indices, part = Tensor((2048,), DType.int64), Tensor((10**7 // 8, 64))
    asked = LookupRows(8, 0, 10**7).network_bytes(part, indices)
    returned = ReturnRows(8, 0, 10**7).network_bytes(Tensor((2048, 64)), indices)
    dense = AllReduce(8).network_bytes(Tensor((10**7, 64)))
    yield ""
    yield (
        f"Of 10,000,000 rows on 8 ranks, each sends {int(asked + returned) / 1e6:.2f} MB a step, by the same count; "
        f"the gradient as a dense array takes {int(dense) / 1e6:,.0f} MB. {origin([results['commit']])}\n"
    )


def _many() -> Iterator[str]:
    yield "## Many ranks, simulated\n"
    yield (
        f"Arithmetic, not a measurement. Links of {LINK.alpha * 1e6:g} us and {LINK.bandwidth / 1e9:g} GB/s are "
        f"assumed, a standard deviation of {LINK.jitter:.0%} of each rank's computing time, and the seconds of a step "
        "that the first columns give. Efficiency is the time on one rank as a share of that on all of them, each with "
        "as many rows, with the size of buckets that takes the least time. In all three, backward pass and update hide "
        "the messages, so only the slowest rank's jitter is lost, which is the same share of each.\n"
    )
    yield f"| network | forward, backward, update, ms | gradients, MB | {' | '.join(f'{n:,} ranks' for n in MANY)} |"
    yield f"|---|---|---|{'---|' * len(MANY)}"
    for name, profile in ASSUMED.items():
        phases = ", ".join(f"{1e3 * t:g}" for t in (profile.forward, profile.backward, profile.update))
        found = " | ".join(f"{simulated(profile, False, n, LINK).efficiency:.3f}" for n in MANY)
        yield f"| {name} | {phases} | {profile.gradients / 1e6:,.0f} | {found} |"


if __name__ == "__main__":
    raise SystemExit(main())
