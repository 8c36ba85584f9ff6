"""Links between processes, measured; see `analysis.links` for the model."""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from daceml_train.analysis.links import Link

SIZES = tuple(1 << power for power in range(10, 25, 2))
"""Bytes of the messages that are measured."""
REPEATS = 7
PATIENCE = 120
"""Seconds within which the processes of a measurement are done."""


def measured(
    group: dist.ProcessGroup | None = None, sizes: Sequence[int] = SIZES
) -> tuple[Link, list[tuple[int, float]]]:
    """The link between the ranks of a group, which all call this, and seconds of an all-reduce by its bytes."""
    ranks, points = dist.get_world_size(group), []
    for size in sizes:
        x = torch.ones(max(size // 4, 1))
        dist.all_reduce(x, group=group)
        times = []
        for _ in range(REPEATS):
            dist.barrier(group=group)
            start = time.perf_counter()
            dist.all_reduce(x.fill_(1.0), group=group)
            times.append(time.perf_counter() - start)
        slowest = torch.tensor([sorted(times)[REPEATS // 2]])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        points.append((x.nbytes, float(slowest)))
    return fitted(points, ranks), points


def fitted(points: Sequence[tuple[int, float]], ranks: int) -> Link:
    """The link whose all-reduces take closest to the given seconds, by relative error."""
    messages = 2 * min(ranks - 1, math.ceil(math.log2(max(ranks, 2))))
    rows = torch.tensor([[messages, 2 * (ranks - 1) / ranks * size] for size, _ in points], dtype=torch.float64)
    seconds = torch.tensor([t for _, t in points], dtype=torch.float64)
    found = torch.linalg.lstsq(rows / seconds[:, None], torch.ones(len(points), 1, dtype=torch.float64)).solution
    alpha, beta = (max(float(x), least) for x, least in zip(found[:, 0], (0.0, 1e-13), strict=True))
    return Link(alpha, 1 / beta)


def of_job() -> tuple[Link, int, list[tuple[int, float]]] | None:
    """The link between the processes that `torchrun` started, their number and the measurements; None but on rank 0."""
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    try:
        link, points = measured()
        return (link, dist.get_world_size(), points) if dist.get_rank() == 0 else None
    finally:
        if own:
            dist.destroy_process_group()


def of_machine(ranks: int) -> tuple[Link, int, list[tuple[int, float]]]:
    """The link between so many processes of one thread that are started on this machine, and the measurements."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        processes = [context.Process(target=_measure, args=(rank, ranks, store, answers)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            link, points = answers.get(timeout=PATIENCE)
        finally:
            for process in processes:
                process.join(PATIENCE)
    return link, ranks, points


def _measure(rank: int, ranks: int, store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    found = measured()
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


__all__ = ["Link", "fitted", "measured", "of_job", "of_machine"]
