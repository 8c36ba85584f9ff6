"""The simulated step on many ranks, and the links that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.reporting.scaling import Profile, simulated
from daceml_train.runtime.links import Link, fitted

LINK = Link(8e-6, 45e9)
BERT = Profile(0.060, 0.120, 0.006, 680_000_000)


def test_a_collective_costs_messages_and_bytes() -> None:
    assert Link(1e-3, 1e9).all_reduce(1e6, 4) == pytest.approx(2 * (2 * 1e-3 + 3 / 4 * 1e-3))
    assert Link(1e-3, 1e9).all_reduce(1e6, 1) == 0
    assert Link(0.0, 1e9).gather(1e6, 8) == pytest.approx(7e-3)
    assert Link(0.0, 1e9).slowest(1000) == 1.0
    assert Link(0.0, 1e9, 0.01).slowest(1000) == pytest.approx(1.0372, abs=1e-4)


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_a_bucket_is_as_large_as_its_latency_asks_for(ranks: int) -> None:
    link = Link(1e-5, 1e9)
    size = link.bucket(ranks)
    latency = link.all_reduce(0, ranks)
    assert latency == pytest.approx(0.1 * (link.all_reduce(size, ranks) - latency), rel=1e-4)
    assert Link(0.0, 1e9).bucket(ranks) == 1 == link.bucket(1)


@pytest.mark.parametrize("bad", [(-1.0, 1e9), (0.0, 0.0), (0.0, float("nan"))])
def test_links_are_positive(bad: tuple[float, float]) -> None:
    with pytest.raises(dt.Invalid, match="a link has a latency"):
        dt.Link(*bad)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_link_is_found_from_its_times(ranks: int) -> None:
    link = Link(5e-5, 2e9)
    found = fitted([(size, link.all_reduce(size, ranks)) for size in (1 << 10, 1 << 16, 1 << 22)], ranks)
    assert (found.alpha, found.bandwidth) == pytest.approx((5e-5, 2e9))


def test_what_is_hidden_costs_nothing() -> None:
    found = simulated(BERT, True, 1000, LINK)
    assert BERT.alone == pytest.approx(found.seconds) and found.seconds < found.apart
    assert found.apart == pytest.approx(BERT.alone + LINK.all_reduce(BERT.gradients, 1000))
    assert found.efficiency == pytest.approx(1)  # the update takes longer than the last bucket
    assert found.sent == round(2 * 999 / 1000 * BERT.gradients)
    assert simulated(BERT, True, 1, LINK).efficiency == 1
    clipped = simulated(Profile(0.060, 0.120, 0.006, 680_000_000, clipped=True), True, 1000, LINK)
    assert clipped.efficiency < found.efficiency


def test_a_slow_link_bounds_a_step() -> None:
    slow = Link(0.0, 1e9)
    found = simulated(BERT, True, 64, slow)
    assert found.seconds >= slow.all_reduce(BERT.gradients, 64)
    rows = simulated(Profile(0.01, 0.02, 0.0, 0, rows=1_000_000), True, 8, slow)
    assert rows.sent == 7_000_000 and rows.seconds == pytest.approx(0.037)


def step() -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    found = dt.training_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    return found, (torch.randn(6, 8), torch.randint(4, (6,)))


@pytest.mark.compiled
def test_a_report_simulates_ranks() -> None:
    found, batch = step()
    found(*batch)
    estimated = dt.report(found, ranks=1000, link=dt.Link(alpha=8e-6, bandwidth=45e9))
    assert estimated.scaling is not None and not estimated.scaling.measured
    assert estimated.scaling.sent == round(2 * 999 / 1000 * 4 * (8 * 16 + 16 + 16 * 4 + 4))
    assert "simulated on 1000 ranks, from launches at the machine's roofline" in str(estimated)
    measured = dt.report(found, lambda: found(*batch), runs=2, ranks=8, link=dt.Link(1e-4, 1e9, 0.01))
    assert measured.scaling is not None and measured.scaling.measured
    assert 0 < measured.scaling.alone < measured.scaling.seconds
    assert '"efficiency"' not in measured.to_json() and '"scaling"' in measured.to_json()


def test_what_cannot_be_simulated_is_refused() -> None:
    found, _ = step()
    for options in ({"ranks": 8}, {"link": LINK}, {"ranks": 0, "link": LINK}, {"ranks": True, "link": LINK}):
        with pytest.raises(dt.Invalid, match="ranks"):
            dt.report(found, **options)
    with pytest.raises(dt.Invalid, match="simulates a training step"):
        dt.report(dt.optimize(nn.Linear(2, 2)), ranks=8, link=LINK)
