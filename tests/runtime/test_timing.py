"""Seconds per launch: what is measured, and that it stands beside the launch's bytes."""

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.runtime.timing import Timing


def test_releases_belong_to_the_launch_before_them() -> None:
    timing = Timing()
    assert timing.median() == timing.last() == []
    for factor in (1.0, 3.0, 2.0):
        timing.add([0, 0, 1, 2], [1.0 * factor, 0.5 * factor, 4.0 * factor, 8.0 * factor])
    assert timing.runs == 3
    assert timing.median() == [3.0, 8.0, 16.0]
    timing.add([0], [1.0])  # another plan
    assert timing.runs == 1 and timing.last() == [1.0]


@pytest.mark.compiled
def test_launches_are_timed_while_somebody_measures(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.Adam(model.parameters()), cache=tmp_path)
    x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
    step(x, y)
    (record,) = step.records
    assert len(record.costs) == len(record.executable.program.launches)
    assert any(cost.operators == "matmul" or cost.module for cost in record.costs)
    timing = Timing()
    record.executable.time(timing)
    for _ in range(3):
        step(x, y)
    record.executable.time(None)
    step(x, y)
    assert timing.runs == 3
    assert len(timing.median()) == len(record.costs) and all(s > 0 for s in timing.median())
    total = sum(cost.bytes for cost in record.costs)
    assert total == record.passes[-1].bytes_after
