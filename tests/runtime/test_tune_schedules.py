"""Schedules of tiled kernels: candidates agree with the operators, the wrong ones are dropped, the fastest is kept."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.cli import main
from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.library.launch import launch_of
from daceml_train.codegen.library.tile_schedule import MOST, TileSchedule
from daceml_train.codegen.library.tiles import schedules
from daceml_train.driver.module import state_of
from daceml_train.expressions import array, total
from daceml_train.lowering.device import ProcessorToolchain
from daceml_train.runtime.schedules import scheduled, stored

pytestmark = [pytest.mark.compiled, pytest.mark.slow]


@dt.expression
def windowed(x: Any, k: Any) -> Any:
    """A sum over windows of each pixel's own kernel."""
    B, C, H, W = x.shape
    _, R, S, _, _ = k.shape
    return array(
        total(x.outside(0)[b, c, h + r - 1, w + s - 1] * k[b, r, s, h, w] for r in R for s in S)
        for b in B
        for c in C
        for h in H
        for w in W
    )


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return windowed(x * self.scale, k)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, 10, 20), torch.randn(2, 3, 3, 10, 20)


def compiled(cache: Path) -> Any:
    module = dt.optimize(Windowed(), cache=cache)
    module(*operands())
    return module


def nests(module: Any) -> list[KernelCode]:
    state = state_of(module)
    assert state is not None
    programs = [r.executable.program for r in state.backend.records if r.executable is not None]
    return [code for program in programs for code in program.codes if code.nest is not None]


def test_a_schedule_is_its_text() -> None:
    for schedule in (TileSchedule(3, 1, -1, 1), TileSchedule(0, 4, 12, 6), TileSchedule(2, 2, 1, 3, 10)):
        assert TileSchedule.of(str(schedule)) == schedule


def test_candidates_are_few_and_the_default_comes_first(tmp_path: Path) -> None:
    for code in nests(compiled(tmp_path)):
        assert code.nest is not None
        found = schedules(*code.nest)
        assert 1 < len(found) <= MOST and found[0][0] == code.schedule
        assert len({text for text, _ in found}) == len(found)


def test_the_choice_is_kept_and_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daceml_train.runtime.tune_schedules.MARGIN", 0.0)  # no default is kept
    monkeypatch.setattr("daceml_train.runtime.tune_schedules.Nest.chosen", property(lambda nest: nest.candidates[-1]))
    told: list[tuple[int, int]] = []
    module = compiled(tmp_path)
    expected = module(*operands())
    explored = dt.tune(module, lambda *counts: told.append(counts))
    assert explored.nests and not explored.dropped
    assert told[-1][0] == told[-1][1] == sum(len(n.candidates) for n in explored.nests)
    assert all(c.seconds for nest in explored.nests for c in nest.candidates)
    other = compiled(tmp_path)
    chosen = {nest.chosen.schedule for nest in explored.nests}
    assert {code.schedule for code in nests(other)} == chosen != {code.schedule for code in nests(module)}
    torch.testing.assert_close(other(*operands()), expected)


def test_a_training_step_has_the_choices_from_its_next_call_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daceml_train.runtime.tune_schedules.Nest.chosen", property(lambda nest: nest.candidates[-1]))
    model = Windowed()
    step = dt.training_step(
        model, lambda y: y.square().mean(), torch.optim.SGD(model.parameters(), 0.1), cache=tmp_path
    )
    first = float(step(operands()))
    explored = dt.tune(step)
    second = float(step(operands()))
    assert second < first
    program = step.records[-1].executable.program  # type: ignore[union-attr]
    found = {code.schedule for code in program.codes if code.nest is not None}
    assert found == {nest.chosen.schedule for nest in explored.nests}


def test_corrupted_candidates_are_dropped_and_no_other_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in ten is wrong in its sums, in what it leaves out, or ends the process."""
    right, corrupted = ProcessorToolchain.variants, set[str]()

    def variants(self: ProcessorToolchain, code: KernelCode) -> Sequence[KernelCode]:
        found = list(right(self, code))
        for position, how in zip(range(1, len(found), 3), ("wrong", "crash", "partial"), strict=False):
            found[position] = changed(found[position], how)
            corrupted.add(found[position].key)
        return found

    def changed(code: KernelCode, how: str) -> KernelCode:
        text = code.source.split('extern "C"')[0].partition("\n\n")[2]
        other = {
            "wrong": text.replace("+= t", "-= t", 1),
            "partial": re.sub(r"(st\d+\(y0)", r"if (y0[0] == 12345.0f) \1", text),
            "crash": text.replace(
                "int64_t blocks = integers[0];", "int64_t blocks = integers[0]; *(volatile int*)16 = 0;"
            ),
        }[how]
        assert other != text, how
        result = launch_of("tiles.h", "tiles::run", (), code.rows, code.work, text=other)
        return dataclasses.replace(result, nest=code.nest, schedule=code.schedule)

    monkeypatch.setattr(ProcessorToolchain, "variants", variants)
    module = compiled(tmp_path)
    explored = dt.tune(module)
    candidates = [c for nest in explored.nests for c in nest.candidates]
    assert len(corrupted) >= 2 and len(explored.dropped) == len(corrupted)
    assert all(nest.chosen.refusal == "" for nest in explored.nests)
    assert all(c.seconds is not None for c in candidates if not c.refusal)
    assert any("SIGSEGV" in c.refusal for _, c in explored.dropped)
    assert any("of its norm away" in c.refusal or "not finite" in c.refusal for _, c in explored.dropped)
    for _, candidate in explored.dropped:
        assert candidate.refusal in str(explored) and candidate.schedule in explored._repr_html_()


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    codes = nests(compiled(tmp_path))
    path = tmp_path / "damaged.json"
    for text in ("{", "[]", '{"a": 1}', json.dumps({"k": {"chosen": 3}})):
        path.write_text(text)
        assert scheduled(codes, path) == codes and isinstance(stored(path), dict)


def test_tune_before_the_first_call_and_of_other_objects() -> None:
    with pytest.raises(dt.Invalid, match="no programs yet"):
        dt.tune(dt.optimize(Windowed()))
    with pytest.raises(dt.Invalid, match="tune takes"):
        dt.tune(nn.Linear(2, 2))


MODEL = """
import torch
from torch import nn
from tests.runtime.test_tune_schedules import Windowed, operands

def model():
    return Windowed(), operands()
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DACEML_TRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own.py").write_text(MODEL)
    assert main(["tune", f"{tmp_path}/own.py:model", "-o", f"{tmp_path}/page.html"]) == 0
    assert "schedules of Windowed" in capsys.readouterr().out
    assert "cycles, predicted" in (tmp_path / "page.html").read_text()
    assert stored(tmp_path / "cache" / "schedules.json")
