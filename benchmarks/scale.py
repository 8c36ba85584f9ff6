"""Training on several processes of this machine: `python -m benchmarks.scale [--ranks 2] [NETWORK ...]`.

Milliseconds per step and bytes through the loopback device, per rank, of PyTorch's DistributedDataParallel around the
eager module, around `torch.compile`, and around `optimize`, and of the whole step with `mesh=`, beside the bytes that
the step promises and the time that the simulator predicts from one rank's launches. Each process has one thread. Every
variant trains the same network on the same rows, in turn, and all must end with the same parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import daceml_train as dt
from benchmarks.networks.dlrm import DLRM
from benchmarks.networks.lstm import LoopLSTM
from benchmarks.networks.mlp import mlp
from benchmarks.networks.resnet import ResNet18
from benchmarks.networks.table import clicks, images, sentences, tokens, vectors
from benchmarks.networks.transformer import Bert, VisionTransformer, token_loss
from benchmarks.provenance import commit
from daceml_train.ops.divided_tables import LookupRows, ReturnRows
from daceml_train.reporting.scaling import simulated
from daceml_train.runtime.links import measured as link_between
from daceml_train.tensor import DType, Tensor

TOLERANCE = 2e-3
"""Largest difference of parameters between variants, which round differently, after all steps."""
WARM = 3
"""Steps before the measured ones."""

MOMENTUM = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
SPARSE = partial(torch.optim.SGD, lr=0.01)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any, Any]] = {
    "mlp": (partial(mlp, (1024, 1024, 1024, 1024, 256, 10)), partial(vectors, 64, 1024, 10), F.cross_entropy, MOMENTUM),
    "resnet18": (partial(ResNet18, 100, 32), partial(images, 8, 64, 100), F.cross_entropy, MOMENTUM),
    "vit": (
        partial(VisionTransformer, 64, 8, 192, 3, 4, 100),
        partial(images, 8, 64, 100),
        F.cross_entropy,
        MOMENTUM,
    ),
    "bert": (
        partial(Bert, 8000, 192, 3, 4, 64, dropout=0.0),
        partial(sentences, 8, 64, 8000, 2),
        F.cross_entropy,
        MOMENTUM,
    ),
    "lstm": (partial(LoopLSTM, 1000), partial(tokens, 16, 32, 1000), token_loss, MOMENTUM),
    "dlrm": (
        partial(DLRM, 8, 20_000, 32, (13, 128), (256, 128)),
        partial(clicks, 128, 13, 8, 20_000, 4),
        F.binary_cross_entropy_with_logits,
        SPARSE,
    ),
}
"""A network, the batch of a rank, its loss, and its optimizer."""


TABLE = "table"
ROWS, WIDTH, READ = 1_000_000, 64, 2048
"""The rows and columns of a large table, and how many rows each rank reads in a step."""


def loopback() -> int:
    """Bytes that the loopback device has received."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[0])


def step_of(variant: str, name: str, model: nn.Module) -> tuple[Callable[..., torch.Tensor], Callable[[], int], Any]:
    """A training step, the bytes that it promises to send, and itself if it is a whole one."""
    _, _, loss_of, optimizer_of = NETWORKS[name]
    optimizer = optimizer_of(model.parameters())
    if variant == "training_step(mesh=)":
        step = dt.training_step(model, loss_of, optimizer, mesh=dist.group.WORLD)
        return step, lambda: sum(step.network.values()), step
    inner = {"DDP": lambda: model, "DDP(torch.compile)": lambda: torch.compile(model)}
    parallel = DistributedDataParallel(inner.get(variant, lambda: dt.optimize(model))())

    def train(x: Any, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(parallel(*x) if isinstance(x, tuple) else parallel(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train, lambda: 0, None


VARIANTS = ("DDP", "DDP(torch.compile)", "DDP(optimize)", "training_step(mesh=)")


def measured(rank: int, name: str, steps: int) -> dict[str, Any]:
    """Per variant: milliseconds per step, counted and promised bytes per rank, difference from the first variant."""
    build, data, _, _ = NETWORKS[name]
    torch.manual_seed(rank)
    batch = data()
    models = []
    for _ in VARIANTS:
        torch.manual_seed(0)
        models.append(build())
    results = [step_of(variant, name, model) for variant, model in zip(VARIANTS, models, strict=True)]
    seconds: list[list[float]] = [[] for _ in results]
    counted = [0] * len(results)
    for _ in range(WARM):
        for train, _, _ in results:
            train(*batch)
    for _ in range(steps):  # in turn, so that all see the same load
        for index, (train, _, _) in enumerate(results):
            dist.barrier()
            before, start = loopback(), time.perf_counter()
            train(*batch)
            seconds[index].append(time.perf_counter() - start)
            dist.barrier()
            counted[index] += loopback() - before
    first = list(models[0].parameters())
    rows: dict[str, Any] = {}
    for index, (variant, (_, promised, _)) in enumerate(zip(VARIANTS, results, strict=True)):
        pairs = zip(first, models[index].parameters(), strict=True)
        rows[variant] = {
            "ms": 1e3 * statistics.median(seconds[index]),
            "counted": counted[index] / steps / dist.get_world_size(),
            "promised": promised(),
            "apart": max((a - b).abs().max().item() for a, b in pairs),
        }
    step = results[-1][2]
    rows[VARIANTS[-1]] |= _simulated(step, batch, steps)
    rows[VARIANTS[-1]]["breaks"] = step.breaks
    return rows


def _simulated(step: Any, batch: Any, steps: int) -> dict[str, Any]:
    """Milliseconds of steps one after the other, and as the simulator predicts them from the launches of this rank.

    In turn with other variants, a step finds none of its memory in caches. Processes that are more than the cores
    share them.
    """
    world = dist.get_world_size()
    link, _ = link_between()
    report = dt.report(step, lambda: step(*batch), runs=steps, ranks=world, link=link)
    assert report.scaling is not None
    crowded = report.scaling.profile.on_cores(min(1.0, len(os.sched_getaffinity(0)) / world))
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step(*batch)
        seconds.append(time.perf_counter() - start)
    predicted = simulated(crowded, True, world, link).apart
    parts = {name: 1e3 * getattr(crowded, name) for name in ("forward", "backward", "update", "exchange", "host")}
    parts["network"] = 1e3 * predicted - sum(parts.values())
    return {"following ms": 1e3 * statistics.median(seconds), "predicted": 1e3 * predicted, "parts": parts}


def _rank(rank: int, world: int, name: str, steps: int, store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    rows = tables(rank, steps) if name == TABLE else measured(rank, name, steps)
    if rank == 0:
        answers.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def run(name: str, ranks: int, steps: int) -> dict[str, Any]:
    """The rows of a network on so many new processes."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, name, steps, f"file://{folder}/store", answers)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        rows: dict[str, Any] = answers.get(timeout=1200)
        for process in processes:
            process.join()
    return rows


class Rows(nn.Module):
    """A large table, of which each row of a batch reads one row."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        new = partial(dt.ShardedEmbedding, mesh=dist.group.WORLD) if divided else nn.Embedding
        self.table, self.out = new(ROWS, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of eight classes."""
        scores: torch.Tensor = self.out(self.table(words))
        return scores


def tables(rank: int, steps: int) -> dict[str, Any]:
    """A table that all ranks have, of which rows are exchanged, beside one that is divided among them."""
    rows: dict[str, Any] = {}
    for name, divided in (("rows of a table on each rank", False), ("a table divided among the ranks", True)):
        torch.manual_seed(0)
        model = Rows(divided)
        step = dt.training_step(model, F.cross_entropy, SPARSE(model.parameters()), mesh=dist.group.WORLD)
        torch.manual_seed(rank)
        batch = torch.randperm(ROWS)[:READ], torch.randint(8, (READ,))
        step(*batch)
        seconds, counted = [], 0
        for _ in range(steps):
            dist.barrier()
            before, start = loopback(), time.perf_counter()
            step(*batch)
            seconds.append(time.perf_counter() - start)
            dist.barrier()
            counted += loopback() - before
        sent = torch.tensor(float(sum(step.network.values())))
        dist.all_reduce(sent)
        world = dist.get_world_size()
        held = sum(p.nbytes for p in model.parameters())
        rows[name] = {"ms": 1e3 * statistics.median(seconds), "counted": counted / steps / world, "held": held}
        rows[name] |= {"promised": float(sent) / world, "breaks": step.breaks}
        del step, model
    return rows


def _print_tables(rows: dict[str, Any], ranks: int) -> None:
    title = f"a table of {ROWS:,} x {WIDTH}, {READ:,} rows a rank, {ranks} processes of one thread"
    table = Table(title=title, box=SIMPLE_HEAD)
    for heading in ("", "ms per step", "MB of parameters", "MB counted per rank", "MB promised"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        sizes = (f"{row[key] / 1e6:.3f}" for key in ("held", "counted", "promised"))
        table.add_row(name, f"{row['ms']:.2f}", *sizes)
    Console(width=110).print(table)
    indices, part = Tensor((READ,), DType.int64), Tensor((10**7 // 8, WIDTH))
    asked = LookupRows(8, 0, 10**7).network_bytes(part, indices)
    returned = ReturnRows(8, 0, 10**7).network_bytes(Tensor((READ, WIDTH)), indices)
    print(f"of 10,000,000 rows on 8 ranks, each rank sends {(asked + returned) / 1e6:.3f} MB a step")


def ratio(rows: dict[str, Any]) -> float:
    """How many times as fast the whole step is as the better of PyTorch's own two."""
    return min(rows[v]["ms"] for v in VARIANTS[:2]) / rows[VARIANTS[-1]]["ms"]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "networks", nargs="*", metavar="NETWORK", help=f"{', '.join(NETWORKS)} (default: all), or {TABLE}"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="where the results are kept")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.networks == [TABLE]:
        found = run(TABLE, options.ranks, options.steps)
        _print_tables(found, options.ranks)
        if options.json is not None:
            options.json.write_text(
                json.dumps({"commit": commit(), "ranks": options.ranks, "rows": found}, indent=1) + "\n"
            )
        return 0
    for name in options.networks or NETWORKS:
        found[name] = rows = run(name, options.ranks, options.steps)
        table = Table(title=f"{name}, {options.ranks} processes of one thread", box=SIMPLE_HEAD)
        for heading in (
            "",
            "ms in turn",
            "ms one after another",
            "simulated",
            "MB counted per rank",
            "MB promised",
            "apart from DDP",
        ):
            table.add_column(heading, justify="right")
        for variant, row in rows.items():
            times = [f"{row[name]:.2f}" if name in row else "" for name in ("following ms", "predicted")]
            sizes = (f"{row['counted'] / 1e6:.3f}", f"{row['promised'] / 1e6:.3f}", f"{row['apart']:.1e}")
            table.add_row(variant, f"{row['ms']:.2f}", *times, *sizes)
        Console(width=110).print(table)
        print(f"{name}: {ratio(rows):.2f} times as fast as the best of DDP and DDP(torch.compile)", flush=True)
    mean = math.exp(statistics.fmean(math.log(ratio(rows)) for rows in found.values()))
    print(f"geometric mean over {len(found)} networks: {mean:.2f}")
    if options.json is not None:
        kept = {"commit": commit(), "ranks": options.ranks, "networks": found, "geometric_mean": mean}
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["apart"] < TOLERANCE for rows in found.values() for row in rows.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
