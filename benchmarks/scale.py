"""Training on several processes of this machine: `python -m benchmarks.scale [--ranks 2]`.

Milliseconds per step and bytes through the loopback device, per rank, of PyTorch's DistributedDataParallel around the
eager and around the compiled module, and of the whole step with `mesh=`, beside the bytes that the step promises. One
thread per process; every variant trains the same network on the same rows, and all must end with the same parameters.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
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

WIDTH, LAYERS, ROWS = 1024, 3, 64
TOLERANCE = 1e-4
"""Largest difference of parameters between variants, which round differently, after all steps."""


def network() -> nn.Module:
    """14 MB of parameters."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 10))


def loopback() -> int:
    """Bytes that the loopback device has received."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[0])


def step_of(variant: str, model: nn.Module) -> tuple[Callable[..., torch.Tensor], Callable[[], int]]:
    """A training step, and the bytes that it promises to send."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if variant == "training_step(mesh=)":
        step = dt.training_step(model, F.cross_entropy, optimizer, mesh=dist.group.WORLD)
        return step, lambda: sum(step.network.values())
    parallel = DistributedDataParallel(model if variant == "DDP" else dt.optimize(model))

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train, lambda: 0


VARIANTS = ("DDP", "DDP(optimize)", "training_step(mesh=)")


def measured(rank: int, world: int, steps: int) -> list[tuple[float, float, int, float]]:
    """Per variant: milliseconds per step, counted and promised bytes per rank, difference from the first variant."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS * world, WIDTH, generator=generator)[rank::world]
    y = x[:, :10].argmax(1)
    models = [network() for _ in VARIANTS]
    results = [step_of(variant, model) for variant, model in zip(VARIANTS, models, strict=True)]
    seconds: list[list[float]] = [[] for _ in results]
    counted = [0] * len(results)
    for _ in range(3):
        for train, _ in results:
            train(x, y)
    for _ in range(steps):  # in turn, so that all see the same load
        for index, (train, _) in enumerate(results):
            dist.barrier()
            before, start = loopback(), time.perf_counter()
            train(x, y)
            seconds[index].append(time.perf_counter() - start)
            dist.barrier()
            counted[index] += loopback() - before
    first = list(models[0].parameters())
    rows = []
    for index, (_, promised) in enumerate(results):
        pairs = zip(first, models[index].parameters(), strict=True)
        apart = max((a - b).abs().max().item() for a, b in pairs)
        rows.append((1e3 * statistics.median(seconds[index]), counted[index] / steps / world, promised(), apart))
    return rows


def _rank(rank: int, world: int, steps: int, store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    rows = measured(rank, world, steps)
    if rank == 0:
        answers.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, options.steps, f"file://{folder}/store", answers)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        rows = answers.get(timeout=1200)
        for process in processes:
            process.join()
    table = Table(title=f"{options.ranks} processes of one thread, {ROWS} rows each", box=SIMPLE_HEAD)
    for heading in ("", "ms per step", "MB counted per rank", "MB promised", "apart from DDP"):
        table.add_column(heading, justify="right")
    for variant, (spent, counted, promised, apart) in zip(VARIANTS, rows, strict=True):
        table.add_row(variant, f"{spent:.1f}", f"{counted / 1e6:.3f}", f"{promised / 1e6:.3f}", f"{apart:.1e}")
    Console(width=100).print(table)
    return 0 if all(apart < TOLERANCE for *_, apart in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
