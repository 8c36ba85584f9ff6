"""The sweep of training recipes: what differs is wrong, and what cannot be trained is refused."""

import pytest
import torch

from benchmarks.recipes import loops, optimizers
from benchmarks.recipes.__main__ import differs, run
from benchmarks.recipes.way import Way
from daceml_train.driver.step import TrainingStep


def test_every_optimizer_and_scheduler_has_a_recipe() -> None:
    names = [name for name, _ in (*optimizers.recipes(), *loops.recipes())]
    assert len(set(names)) == len(names) > 60
    assert {"optimizer LBFGS()", "scheduler OneCycleLR"} <= set(names)


def test_what_differs_is_named() -> None:
    x = torch.ones(3, dtype=torch.float64)
    assert not differs("x", x * (1 + 1e-12), x, False)
    assert differs("x", x * (1 + 1e-6), x, False) and differs("x", x.float(), x, False) and differs("x", None, x, False)


@pytest.mark.compiled
def test_lbfgs_is_refused_and_a_difference_is_wrong() -> None:
    (row,) = run("LBFGS", dict(optimizers.recipes())["optimizer LBFGS()"], ("training_step",))
    assert row.kind == "refused" and "closure" in row.said

    def recipe(way: Way) -> None:
        way.note("kind", way.kind)

    assert [row.kind for row in run("x", recipe)] == ["wrong", "wrong"]


@pytest.mark.compiled
def test_a_step_that_runs_in_pieces_and_does_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dict(loops.recipes())["average SWALR"]
    assert [row.kind for row in run("x", recipe, ("training_step",))] == ["same"]
    monkeypatch.setattr(TrainingStep, "_bind", lambda *_: None)
    monkeypatch.setattr(TrainingStep, "_along_a_path", lambda *_: None)
    (row,) = run("x", recipe, ("training_step",))
    assert row.kind == "fallback" and row.said == "0 programs ran in 5 steps, and nothing says why"


@pytest.mark.compiled
def test_calls_without_python_are_counted() -> None:
    (row,) = run("batch sizes", dict(loops.recipes())["evaluation between the steps"], ("optimize",))
    assert row.kind == "same", row.said
