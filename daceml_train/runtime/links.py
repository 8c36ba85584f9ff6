"""Links: what a message between ranks costs, given or measured, and the times of collectives that follow from it.

The model is alpha-beta (Hockney, 1994): a message of b bytes takes `alpha + b / bandwidth` seconds. Collectives are
those of a ring, or of a tree where that needs fewer messages one after the other (Thakur et al., 2005).
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from daceml_train.errors import Invalid

SIZES = tuple(1 << power for power in range(10, 25, 2))
"""Bytes of the messages that are measured."""
REPEATS = 7
PATIENCE = 120
"""Seconds within which the processes of a measurement are done."""


@dataclass(frozen=True)
class Link:
    """A link between ranks: `alpha` seconds per message, `bandwidth` bytes per second.

    `jitter` is the standard deviation of a rank's computing time, as a share of it: all wait for the slowest one.
    """

    alpha: float
    bandwidth: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.bandwidth > 0 and self.jitter >= 0):
            raise Invalid(f"a link has a latency and jitter of at least 0 and a positive bandwidth, given {self}")

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of a sum of arrays of `size` bytes."""
        return 2 * self.half(size, ranks)

    def half(self, size: float, ranks: int) -> float:
        """Seconds of a reduce-scatter or an all-gather, of which each rank has the whole array before or after."""
        messages = min(ranks - 1, math.ceil(math.log2(max(ranks, 1))))
        return messages * self.alpha + (ranks - 1) / ranks * size / self.bandwidth

    def gather(self, size: float, ranks: int) -> float:
        """Seconds until each rank has the `size` bytes of every other."""
        messages = min(ranks - 1, math.ceil(math.log2(max(ranks, 1))))
        return messages * self.alpha + (ranks - 1) * size / self.bandwidth

    def bucket(self, ranks: int) -> int:
        """Bytes of the smallest array in whose sum the messages' latency is at most a tenth of the bytes' time.

        Larger buckets gain little, and start later. Without latency, each gradient is sent by itself.
        """
        if ranks == 1:
            return 1
        messages = min(ranks - 1, math.ceil(math.log2(ranks)))
        return max(1, math.ceil(10 * messages * self.alpha * self.bandwidth * ranks / (ranks - 1)))

    def slowest(self, ranks: int) -> float:
        """How many times as long as the mean the slowest rank computes: the expected largest of normal deviates."""
        return 1.0 + self.jitter * math.sqrt(2 * math.log(ranks))


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
