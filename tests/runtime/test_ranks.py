"""Waiting for the other ranks: slowness is no failure, and a failure is not waited for."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from daceml_train.runtime import ranks as module
from daceml_train.runtime.ranks import RankError, Ranks


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(module, "GRACE", 0.2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Ranks(dist.group.WORLD)
    dist.destroy_process_group()


class Work:
    """A collective that is over just after the `slow`-th wait has ended, with an error or without."""

    def __init__(self, slow: int, error: str = "") -> None:
        self.slow, self.error, self.waits = slow, error, 0

    def is_completed(self) -> bool:
        return self.waits >= self.slow

    def wait(self, timeout: timedelta) -> bool:
        self.waits += 1
        if self.waits <= self.slow:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True


def test_what_ends_between_two_looks_is_no_failure(ranks: Ranks) -> None:
    for slow in (0, 1, 3):
        work = Work(slow)
        ranks.finish(work)
        assert work.waits == slow + 1
    assert ranks.group not in Ranks.broken


def test_a_lost_connection_ends_the_wait(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"a connection between ranks broke.*Connection closed by peer"):
        ranks.finish(Work(2, "Connection closed by peer"))
    with pytest.raises(RankError, match="start all processes from a checkpoint"), ranks.step():
        raise AssertionError("the step runs")


def test_a_failure_that_a_rank_reports_ends_the_wait(ranks: Ranks) -> None:
    with pytest.raises(ValueError), ranks.step():
        ranks.begin("nothing", 1)
        raise ValueError("too late")
    with pytest.raises(RankError, match="rank 0 raised ValueError: too late while it ran step 0"):
        ranks.finish(Work(100))
