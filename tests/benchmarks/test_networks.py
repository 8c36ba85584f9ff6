"""The benchmark's networks: what they are made of, and that compiled steps agree with eager ones."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from benchmarks.agreement import Disagreement, agreement
from benchmarks.networks import NETWORKS, TWELVE, Network
from benchmarks.networks.mlp import mlp
from benchmarks.networks.table import vectors


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_built_equally_each_time(name: str) -> None:
    first, second = NETWORKS[name].build(small=True), NETWORKS[name].build(small=True, fused=True)
    given = zip(tree_leaves(first.inputs), tree_leaves(second.inputs), strict=True)
    assert all(torch.equal(a, b) for a, b in given) and torch.equal(first.targets, second.targets)
    states = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)


def test_channels_last_and_double() -> None:
    problem = NETWORKS["resnet18"].build(channels_last=True)
    assert problem.inputs.is_contiguous(memory_format=torch.channels_last)
    assert NETWORKS["resnet18"].build(double=True).inputs.dtype is torch.float64


def small(loss: object = torch.nn.functional.cross_entropy) -> Network:
    result = Network("", lambda: mlp((6, 8, 3)), lambda: vectors(4, 6, 3), loss, torch.optim.Adam, {"lr": 1e-3})
    return result


@pytest.mark.compiled
def test_agreement() -> None:
    assert agreement(small()) <= 1


PARAMETERS = {  # in millions, as published for the architectures (BERT and GPT-2: 4 of 12 layers)
    "resnet50": 25.6,
    "wide_resnet50_2": 68.9,
    "mobilenet_v2": 3.5,
    "efficientnet_b0": 5.3,
    "mixer": 18.5,
    "vit_s": 22.1,
    "bert": 52.8,
    "gpt2": 67.7,
    "dlrm": 168.7,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    with torch.device("meta"):
        model = TWELVE[name].model()
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert count == pytest.approx(PARAMETERS[name], abs=0.06)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_small_network_takes_an_eager_step(name: str) -> None:
    problem = NETWORKS[name].build(small=True)
    before = [p.detach().clone() for p in problem.model.parameters()]
    assert torch.isfinite(problem.step())
    assert any(not torch.equal(a, b) for a, b in zip(before, problem.model.parameters(), strict=True))


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", ["wavenet", "lstm", "bert"])
def test_small_networks_agree(name: str) -> None:
    """The quickest ones; `python -m benchmarks.agreement` compares all."""
    assert agreement(NETWORKS[name], small=True) <= 1


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


@pytest.mark.compiled
def test_sparse_gradients_stay_inside_a_step() -> None:
    """Tables with sparse gradients: plain descent changes them inside the program, everything else is PyTorch's."""
    import daceml_train as dt

    ours, theirs = NETWORKS["dlrm"].build(small=True), NETWORKS["dlrm"].build(small=True)
    step = dt.training_step(ours.model, ours.loss, ours.optimizer)
    for _ in range(3):
        assert float(step(ours.inputs, ours.targets)) == pytest.approx(float(theirs.step()), rel=1e-6)
    assert not step.breaks
    launches = dt.report(step).as_dict()["functions"][0]["launches"]
    assert sum(launch["kind"] == "kernel" and "add_rows" in launch["operators"] for launch in launches) == 3
    assert "aten::index_put_" not in step.records[0].calls
    for own, their in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(own, their)
    kept = dt.training_step(ours.model, ours.loss, ours.optimizer, keep_gradients=True)
    with pytest.warns(UserWarning, match="sparse=True is a sparse tensor"):
        kept(ours.inputs, ours.targets)
    assert ours.model.tables[0].weight.grad.is_sparse
