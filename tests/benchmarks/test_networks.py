"""The benchmark's networks: what they are made of, and that compiled steps agree with eager ones."""

import pytest
import torch

from benchmarks.agreement import Disagreement, agreement
from benchmarks.networks import NETWORKS, Network
from benchmarks.networks.mlp import mlp
from benchmarks.networks.table import vectors


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_built_equally_each_time(name: str) -> None:
    first, second = NETWORKS[name].build(), NETWORKS[name].build(fused=True)
    assert torch.equal(first.inputs, second.inputs) and torch.equal(first.targets, second.targets)
    states = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)


def test_channels_last_and_double() -> None:
    problem = NETWORKS["resnet18"].build(channels_last=True)
    assert problem.inputs.is_contiguous(memory_format=torch.channels_last)
    assert NETWORKS["resnet18"].build(double=True).inputs.dtype is torch.float64


def small(loss: object = torch.nn.functional.cross_entropy) -> Network:
    made = Network("", lambda: mlp((6, 8, 3)), lambda: vectors(4, 6, 3), loss, torch.optim.Adam, {"lr": 1e-3})
    return made


@pytest.mark.compiled
def test_agreement() -> None:
    assert agreement(small()) <= 1


@pytest.mark.compiled
def test_another_loss_is_a_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: a compiled step whose loss is off by a thousandth must not be timed."""
    import daceml_train as dt

    def off(model: object, loss: object, optimizer: object, **options: object) -> object:
        return real(model, lambda x, y: 1.001 * loss(x, y), optimizer, **options)  # type: ignore[operator]

    real = dt.training_step
    monkeypatch.setattr(dt, "training_step", off)
    with pytest.raises(Disagreement, match=r"by training_step: relative error 1\.0e-03"):
        agreement(small())
