"""Processes that share a storage compute with the same libraries, whatever each of them would measure."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.runtime import tune_matmul
from daceml_train.runtime.bound_plan import BoundPlan
from daceml_train.trials.values import same

pytestmark = pytest.mark.compiled
X, Y = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 4


def data(step: int, settings: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return X, Y


def new(storage: Path | None, **options: Any) -> dt.Stages:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.training_step(model, nn.functional.cross_entropy, optimizer, **options)
    return dt.Stages(step, data=data, storage=storage, seed=0, name="choices")


def ways(stages: dt.Stages) -> set[int]:
    """How many matmuls of the step are computed by oneDNN."""
    part = getattr(stages.step, "accumulating", stages.step)
    plans: list[BoundPlan] = [bound.plan for bounds in part._bound.values() for bound in bounds]
    return {len(plan.onednn) for plan in plans}


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2, "reduction": "mean"}], ids=str)
def test_choices_travel_with_the_storage(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tune_matmul.available():
        pytest.skip("PyTorch without oneDNN")
    trial, states = {"lr": 0.1}, []
    monkeypatch.setattr(tune_matmul, "SMALLEST", 1 << 19)
    monkeypatch.setenv("DACEML_TRAIN_CACHE", str(tmp_path / "first"))
    for folder, answer, expected in (("a", "onednn", True), ("a", "blas", True), ("b", "blas", False)):
        monkeypatch.setattr(tune_matmul, "measure", lambda p, answer=answer: answer)
        found = new(tmp_path / folder, **options)
        if folder == "a" and answer == "blas":  # a step that was bound before, with choices of its own
            found.step(X, Y)
            found.reset()
        found.store.has = lambda point: False  # trains although the other one has
        found.load(trial, 3)
        states.append(found.training.snapshot())
        assert all(bool(count) == expected for count in ways(found)) and ways(found)
    assert same(states[0], states[1])
    kept = json.loads(next((tmp_path / "a").glob("*/matmuls.json")).read_text())
    assert set(kept.values()) == {"onednn"}


def test_without_a_storage_choices_are_those_of_the_cache(tmp_path: Path) -> None:
    stored, other = new(tmp_path), None
    stored.load({"lr": 0.1}, 1)
    assert stored.step.options.matmuls == stored.store.choices
    other = dt.Stages(stored.step, data=data, seed=0, name="choices")
    other.load({"lr": 0.1}, 1)
    assert stored.step.options.matmuls is None
    stored.load({"lr": 0.1}, 2)
    assert stored.step.options.matmuls == stored.store.choices
