"""The bytes that passes of the level `distribution` promise, and those that pass through the loopback device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from tests.driver.ranks import Ranks

pytestmark = [pytest.mark.compiled, pytest.mark.slow]

ROWS, WIDTH, READ = 40_000, 64, 8_000
STEPS = 3


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    result = Ranks(tmp_path_factory.mktemp("ranks"), request.param)
    yield result
    result.close()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.up, self.out = nn.Linear(WIDTH, 20_000), nn.Linear(20_000, 3)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.relu(self.up(self.table(words).mean(1))))
        return scores


def loopback() -> int:
    """Bytes that the loopback device has received."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[0])


def counted(rank: int, options: dict[str, Any], edits: dict[str, Any]) -> tuple[list[str], int, int, int]:
    """Breaks; bytes that the passes promise, that the step says, and that each rank sends in the least of some steps."""
    torch.manual_seed(0)
    model = Words()
    pipeline = dt.TRAINING.with_options("bucket", **edits)
    optimizer = torch.optim.AdamW(model.parameters())
    step = dt.training_step(model, F.cross_entropy, optimizer, mesh=dist.group.WORLD, pipeline=pipeline, **options)
    words, y = torch.randperm(ROWS)[:READ].view(100, -1), torch.randint(3, (100,))
    step(words, y)
    sent = []
    for _ in range(STEPS):
        dist.barrier()
        before = loopback()
        step(words, y)
        dist.barrier()
        sent.append(loopback() - before)
    (function,) = dt.report(step).functions
    promised = [change.network[1] for level, change in function.passes if level == "distribution"]
    assert isinstance(promised[-1], int)
    return step.breaks, promised[-1], sum(step.network.values()), min(sent) // dist.get_world_size()


@pytest.mark.parametrize(
    ("options", "edits"),
    [
        ({"sparse": "dense"}, {}),
        ({"sparse": "dense", "clip_norm": 1.0}, {"size": 1 << 20}),
        ({"sparse": "dense", "clip_norm": 1.0, "shard": "optimizer"}, {}),
        ({"sparse": "gather"}, {"parts": 4}),
    ],
)
def test_promised_bytes_are_counted_bytes(ranks: Ranks, options: dict[str, Any], edits: dict[str, Any]) -> None:
    """Processes of others may use the device meanwhile: of a few attempts, one has to agree."""
    for _ in range(3):
        found = ranks(counted, options, edits)
        differences = [max(abs(p / c - 1), abs(s / c - 1)) for _, p, s, c in found]
        if max(differences) < 0.01:
            break
    assert all(breaks == [] for breaks, *_ in found)
    assert max(differences) < 0.01, found
