"""Figures of devices: those that are known, those of a device that is there, and what passes take from them."""

from types import SimpleNamespace

import pytest

import daceml_train as dt
from daceml_train.analysis.device_model import DEVICES, device_model, present
from daceml_train.errors import Invalid
from daceml_train.transformations.fusion.duplicate import DuplicateCheapProducers
from daceml_train.transformations.global_movement.rematerialize_cheap import RematerializeCheap


@pytest.mark.parametrize("name", DEVICES)
def test_figures_are_of_one_kind(name: str) -> None:
    """Units: a row in GB instead of TB, or with sparsity, would leave these ranges."""
    model = DEVICES[name]
    assert 2e11 < model.bandwidth < 1e13 and model.bandwidth < model.l2_bandwidth < 10 * model.bandwidth
    assert 5 < model.balance < 120
    assert model.peaks["float32"] == model.vector <= model.peaks["tf32"] <= model.peaks["bfloat16"] < 3e15
    assert 64 * 2e9 * model.processors < model.vector * 1.1 < 256 * 2 * 2.6e9 * model.processors
    assert model.source


def test_names() -> None:
    assert device_model("H100") is DEVICES["h100"] and device_model("RTX 4090") is DEVICES["rtx4090"]
    with pytest.raises(Invalid, match="no device is called 'h10', did you mean 'h100'?"):
        device_model("h10")


def test_a_known_device_that_is_there() -> None:
    """A card with fewer multiprocessors has its share of the rates; bandwidth is that of its own memory."""
    properties = SimpleNamespace(
        name="NVIDIA H100 PCIe", major=9, minor=0, multi_processor_count=114, L2_cache_size=50 << 20,
        memory_clock_rate=1593000, memory_bus_width=5120, max_threads_per_multi_processor=2048,
    )  # fmt: skip
    model = present(properties)
    assert model.name == "h100" and model.processors == 114
    assert model.bandwidth == pytest.approx(2.04e12, rel=0.01)
    assert model.peaks["bfloat16"] == pytest.approx(989.4e12 * 114 / 132)


def test_an_unknown_device_is_like_the_nearest_architecture() -> None:
    model = present(SimpleNamespace(name="NVIDIA RTX A5000", major=8, minor=6, multi_processor_count=64))
    assert model.architecture == (8, 6) and model.name == "nvidiartxa5000"
    assert model.vector == pytest.approx(DEVICES["l4"].vector * 64 / 58)


def test_times() -> None:
    h100 = DEVICES["h100"]
    assert h100.memory_seconds(3.35e9 * 0.9, 0) == pytest.approx(1e-3)
    assert h100.memory_seconds(3.35e9 * 0.9, 0, threads=132 * 256) == pytest.approx(2e-3)  # half of the threads
    large = h100.matmul_seconds(2 * 8192**3, 8192**2, "bfloat16")
    assert 1 < large / (2 * 8192**3 / 989.4e12 / 0.75) < 1.1
    assert h100.matmul_seconds(2 * 64 * 64 * 64, 64 * 64, "bfloat16") > 100 * 2 * 64**3 / 989.4e12  # one tile
    assert h100.matmul_seconds(2 * 512**3, 512**2, "float32") > h100.matmul_seconds(2 * 512**3, 512**2, "tf32")


def test_passes_read_the_balance() -> None:
    l4 = dt.TRAINING.on(DEVICES["l4"])
    (cheap,) = [p for p in l4 if isinstance(p, RematerializeCheap)]
    (duplicate,) = [p for p in l4 if isinstance(p, DuplicateCheapProducers)]
    assert cheap.intensity == pytest.approx(101) and duplicate.flops == 404
    assert l4.key != dt.TRAINING.on(DEVICES["h100"]).key != dt.TRAINING.key
    assert cheap.spare == 6 * 10**9
    chosen = dt.TRAINING.with_options(RematerializeCheap, intensity=3.0, spare=0).on(DEVICES["l4"])
    assert [(p.intensity, p.spare) for p in chosen if isinstance(p, RematerializeCheap)] == [(3.0, 0)]
