"""The fuzzer of views: programs repeat, what is right passes, and a base in another layout than eager's is found."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fuzz import view_checking
from benchmarks.fuzz.checking import Rejected
from benchmarks.fuzz.view_checking import check, differences, shrunk
from benchmarks.fuzz.view_programs import ViewProgram, random_program
from benchmarks.fuzz.view_steps import ViewStep, random_step
from benchmarks.fuzz.view_sweep import program_of, way_of
from daceml_train.driver import binding, capture_only
from daceml_train.frontends.torch.dynamo import versions

COLUMN = ViewProgram(0, (3, 4), ("plain", "plain"), ("v0 = x * w", "v0.t()[2].add_(1.0)"), ("v0", "v0[0]"))
PART = ViewStep(0, (3, 4), ("plain", "plain"), ("v0 = (x * w).sum(1)",), ("v0[0]",), ("v0.detach()",))


def test_programs_repeat() -> None:
    result = 0
    for seed in range(10):
        try:
            program = random_program(seed)
        except Rejected:
            continue
        result += 1
        assert program == random_program(seed)
        compile(program.source(), "source", "exec")
    assert result > 5


def test_programs_pass() -> None:
    assert not check(COLUMN, "interpreted").wrong
    for seed in (3, 4, 7):
        assert not check(random_program(seed), "interpreted").wrong


def test_rounding_that_an_operator_enlarges() -> None:
    lines = ("b.add_(9.0)", "v1 = torch.conv1d(b, b[:, :, :1])")
    assert not check(ViewProgram(0, (2, 3, 4), ("plain", "plain"), lines, ("v1.sin()",)), "interpreted").wrong
    near, far = torch.zeros(3), torch.tensor([0.0, 0.0, 1e-3])
    assert differences({"v": near}, {"v": far}, {"v": far / 4}) == "v"
    assert not differences({"v": near}, {"v": far}, {"v": far / 2})


def test_numbers_beyond_those_of_the_kernels() -> None:
    with pytest.raises(Rejected, match="beyond float32"):
        check(ViewProgram(0, (3, 4), ("plain", "plain"), ("b.mul_(1e30)",), ("b * 2",)), "interpreted")


def test_versions_of_an_argument_that_begins_inside_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ViewProgram(0, (3, 4), ("plain", "sliced"), ("v0 = y * w",), ("v0",))
    assert not check(program, "optimize").wrong
    monkeypatch.setattr(versions, "start_at_zero", lambda example: None)
    assert check(program, "optimize").wrong.startswith("y version (2 for 1)")


def test_pytorch_refuses_first() -> None:
    with pytest.raises(Rejected):
        check(ViewProgram(0, (3, 4), ("plain", "plain"), ("x.add_(1.0)",), ("x",)), "interpreted")


def test_a_change_of_a_part_of_overlapping_elements() -> None:
    lines = (
        "v0 = y.as_strided([3, 2, 2], [1, 3, 3], 2)",
        "v1 = torch.bmm(v0, v0.transpose(1, 2))",
        "v0[2:, :1].neg_()",
    )
    found = check(ViewProgram(0, (4, 3), ("plain", "plain"), lines, ("v1",)), "interpreted")
    assert not found.wrong and "share memory with one another" in found.breaks[0]


@pytest.mark.parametrize("view", ["detach()", "data"])
def test_values_with_a_gradient_written_to_a_detached_tensor(view: str) -> None:
    lines = (f"v0 = b.{view}", "v1 = v0.squeeze()", "v1.copy_(x)")
    found = check(ViewProgram(0, (4, 3), ("plain", "plain"), lines, ("v0",)), "interpreted")
    assert not found.wrong and "detached" in found.breaks[0]


def test_as_strided_beside_gradients() -> None:
    part = ViewProgram(0, (3, 1, 4), ("plain", "plain"), ("v0 = x[0, 0:1].as_strided([3, 2], [3, 0], 4)",), ("v0",))
    lines = ("v0 = torch.conv1d(b, w[:, :, :1])", "v1 = v0.as_strided([1], [1], 14)", "v1.mul_(-2.0)")
    for program in (part, ViewProgram(0, (2, 3, 4), ("plain", "plain"), lines, ("v0",))):
        found = check(program, "interpreted")
        assert not found.wrong and "as_strided" in found.breaks[0]


def test_a_base_in_another_layout_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "same_strides", lambda *_: True)
    longer = ("v1 = x + 1.0", *COLUMN.lines, "v2 = v1.sum(0)")
    program = ViewProgram(0, (3, 4), ("plain", "sliced"), longer, ("v2", "v0", "v0[0]"))
    assert "result 1 place" in check(program, "interpreted").wrong
    small = shrunk(program, "interpreted")
    assert small.lines == COLUMN.lines[: len(small.lines)] and small.layouts == ("plain", "plain")


@pytest.mark.compiled
@pytest.mark.parametrize("way", ["compiled", "optimize"])
def test_other_ways(way: str) -> None:
    assert not check(COLUMN, way).wrong


def test_training_steps_repeat() -> None:
    result = 0
    for seed in range(12):
        try:
            program = random_step(seed)
        except Rejected:
            continue
        result += 1
        assert program == random_step(seed)
        compile(program.source(), "source", "exec")
    assert result > 5


@pytest.mark.compiled
@pytest.mark.parametrize("way", ["step", "optimize"])
def test_a_loss_that_is_a_part_of_what_is_kept(way: str) -> None:
    assert not check(PART, way).wrong


@pytest.mark.compiled
def test_a_wrong_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss differentiated as the whole of the kept tensor's memory."""
    monkeypatch.setattr(capture_only, "loss_first", lambda captured: captured)
    assert "w of step 0" in check(PART, "step").wrong


def test_a_change_by_what_it_changes_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager execution refuses it in dense memory, and reads elements before or after it writes them elsewhere."""
    program = ViewProgram(0, (4, 4), ("plain", "sliced"), ("y.copy_(y.t())", "v0 = y.sin()"), ("v0",))
    with pytest.raises(Rejected, match="elements that it changes"):
        check(program, "interpreted")
    same = ViewProgram(0, (4, 4), ("plain", "sliced"), ("y.mul_(y)", "y.add_(y[:])", "v0 = y.sin()"), ("v0",))
    assert not check(same, "interpreted").wrong
    monkeypatch.setattr(view_checking, "differences", lambda *_: "another number")
    assert check(same, "interpreted").wrong == "another number"


@pytest.mark.compiled
@pytest.mark.parametrize("seed", [23063, 25004, 29823])
def test_what_a_model_keeps_for_its_next_step(seed: int) -> None:
    assert not check(program_of(seed, 8), way_of(seed)).wrong
