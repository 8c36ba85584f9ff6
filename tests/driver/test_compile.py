"""The road: its stages in the order in which they run, what they are told, and what is stored of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.cli import main
from daceml_train.driver import compile as road
from daceml_train.driver.module import state_of
from daceml_train.passes import Pass
from daceml_train.transformations.global_movement.rematerialize_cheap import RematerializeCheap


def test_the_stages_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stages"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [stage.name for stage in road.STAGES]
    assert all(line.rstrip().endswith(".") for line in lines), "every stage says what it does"


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["step", "module", "inference"])
def test_everything_takes_the_same_road(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken: list[str] = []
    stages = road.Stages(
        road.Stage(s.name, lambda *given, s=s: (taken.append(s.name), s.run(*given))[1], s.scope) for s in road.STAGES
    )
    monkeypatch.setattr(road, "STAGES", stages)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(2, 3)
    if kind == "step":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dt.training_step(model, lambda y: y.sum(), optimizer, cache=tmp_path)(x)
    elif kind == "module":
        dt.optimize(model, cache=tmp_path)(x).sum().backward()
    else:
        with torch.no_grad():
            dt.optimize(model, cache=tmp_path)(x)
    order = ["forward", "adapt", "extend", "distribute", "intra_operator", "divide", "transform", "lower"]
    assert [name for i, name in enumerate(taken) if name not in taken[:i]] == order
    assert taken.count("lower") == {"step": 1, "module": 2, "inference": 2}[kind] or kind == "inference"


def test_a_pass_is_told_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[Pass, ...]] = []

    def run_before(self: Pass, graph: object, rest: tuple[Pass, ...]) -> object:
        heard.append(tuple(rest))
        return graph

    monkeypatch.setattr(RematerializeCheap, "run_before", run_before)
    from tests.transformations.checking import program

    graph = program("x: f32[4]", "%y = neg(%x)", "%y")
    dt.TRAINING.run(graph, ("global_movement",))
    [rest] = heard
    assert [p.name for p in rest][:2] == ["update_in_place", "schedule"] and rest == tuple(dt.TRAINING)[-len(rest) :]


def test_records_of_warm_programs_are_those_of_cold_ones(tmp_path: Path) -> None:
    heard: list[list[str]] = []
    for _ in range(2):
        torch.manual_seed(0)
        names: list[str] = []
        module = dt.optimize(
            nn.Linear(3, 4), cache=tmp_path, pass_callback=lambda step, names=names: names.append(step.name)
        )
        module(torch.ones(2, 3)).sum().backward()
        heard.append(names)
        records = state_of(module).backend.records  # type: ignore[union-attr]
    assert heard[0] == heard[1] != [] and all(r.warm for r in records)
