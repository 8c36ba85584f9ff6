import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from benchmarks.conformance import captured, compiled, refused, report
from benchmarks.conformance.compare import Results, difference
from benchmarks.conformance.outcome import Outcome, general, row
from benchmarks.conformance.samples import LEFT_OUT, THROUGH_OPTIMIZE, entries, label, samples
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture import prepass


def results(*values: torch.Tensor) -> Results:
    return Results(list(values), [], [], [False] * len(values))


def entry(name: str) -> object:
    (found,) = (op for op in entries() if label(op) == name)
    return found


def test_a_difference_is_measured_against_float64() -> None:
    exact = torch.tensor([1.0, 2.0, 1000.0, torch.inf], dtype=torch.float64)
    eager, off = results(exact.float()), exact.float() + torch.tensor([0, 1e-3, 0, 0])
    assert difference(eager, eager, results(exact)) == ""
    assert difference(results(off), eager, results(exact)) == "values[0]: 1 of 4 elements, such as 2.001 instead of 2"
    assert "should not be finite" in difference(results(exact.float().clamp(max=9)), eager, None)
    assert "requires_grad" in difference(dataclasses.replace(eager, differentiable=[True]), eager, None)
    assert "float64[4] instead of" in difference(results(exact), eager, None)
    chosen = torch.tensor([1, 2])
    assert difference(results(chosen), results(chosen + torch.tensor([0, 1])), None) == "values[0]: 1 of 2 elements"


def test_a_sample_as_a_module() -> None:
    a, b = torch.randn(3), torch.randn(3)
    result, tensors = compiled.as_module(torch.cat, [(SampleInput([a, b], kwargs={"dim": 0}), False)])
    assert len(tensors) == 2
    torch.testing.assert_close(result()(*tensors), (torch.cat([a, b]),))


@pytest.mark.compiled
def test_an_operator_is_right(tmp_path: Path) -> None:
    op = entry("exp")
    found = list(compiled.outcomes(op, samples(op, torch.float32, True), 1, str(tmp_path)))
    assert [(o.sample, o.kind) for o in found] == [("0", "native"), ("0+", "native")]


def test_each_operand_alone_has_a_gradient() -> None:
    """Backward operators return nothing for other operands; `grid_sample` of a constant image was an error once."""
    a, b, index = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True), torch.tensor([0])
    sample = SampleInput(a, args=(index, b))
    alone = [[t.requires_grad for t in (s.input, *s.args)] for s in compiled.one_gradient(sample)]
    assert alone == [[True, False, False], [False, False, True]]
    assert list(compiled.one_gradient(SampleInput(a, args=(index,)))) == []


def test_views_are_computed_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that is a view of its input would leave nothing to check: a wrong rule has to be seen."""
    from daceml_train.frontends.torch.rules.translate import RULES

    op = entry("t")
    sample = SampleInput(torch.randn(2, 3, requires_grad=True))
    assert captured.outcome(op, 0, sample, True).kind == "native"
    monkeypatch.setitem(RULES, "aten.permute.default", lambda t, x, dims: x.view(t.type.shape))
    assert captured.outcome(op, 0, sample, True).kind == "wrong"


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from daceml_train.ops import elementwise

    op = entry("exp")
    sample = next(samples(op, torch.float32, True))
    row_ = dataclasses.replace(elementwise.TABLE["exp"], gradients=("g * a",))
    monkeypatch.setitem(elementwise.TABLE, "exp", row_)
    found = captured.outcome(op, 0, sample, True)
    assert found.kind == "wrong" and found.detail.startswith("gradients[0]")


def test_equal_elements_may_be_chosen_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = SimpleNamespace(input=torch.tensor([2.0, 1.0, 2.0]), args=(), kwargs={})
    outputs = [
        Results([torch.tensor(order)], [], [], [False]) for order in ([1, 0, 2], [1, 2, 0], [0, 1, 2], [1, 0, 0])
    ]
    first, *others = (captured.chosen(sample, results) for results in outputs)
    assert [bool(difference(other, first, None)) for other in others] == [False, True, True]


@pytest.mark.parametrize("order", ["nuc", 2])
def test_results_that_nobody_reads_have_no_part_in_a_derivative(order: object) -> None:
    """The vectors of a decomposition have no derivative where its values are equal; the values do."""
    x = torch.zeros(3, 3, requires_grad=True)
    op = SimpleNamespace(op=torch.linalg.norm, name="norm")
    sample = SimpleNamespace(input=x, args=(order,), kwargs={}, output_process_fn_grad=lambda y: y)
    found = captured.outcome(op, 0, sample, True)
    assert (found.kind, found.detail) == ("ATen", "")


def test_outcomes_that_are_not_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    op = entry("exp")
    sample = next(samples(op, torch.float32, True))

    def refuse(*given: object) -> None:
        raise Unsupported("the operator of line 7")

    monkeypatch.setattr(captured, "capture", refuse)
    assert captured.outcome(op, 0, sample, True) == Outcome("0", "as PyTorch", "the operator of line 7")
    monkeypatch.setattr(captured, "capture", lambda *given: 1 / 0)
    assert captured.outcome(op, 0, sample, True).kind == "raised"
    monkeypatch.undo()
    drawing = SimpleNamespace(op=torch.rand_like, name="rand_like")
    assert captured.outcome(drawing, 0, sample, True) == Outcome("0", "left out", "draws random numbers")


def test_rows_are_read_back_and_become_a_page(tmp_path: Path) -> None:
    result = row("captured", "exp", [Outcome("0", "native"), Outcome("1", "as PyTorch", "the size 12 of 'x'")], 1.0)
    result = dataclasses.replace(result, fallbacks={"aten.lu.default": 2})
    other = row("compiled", "lu", [Outcome("0", "wrong", "values[0]: off")], 2.0)
    report.write(tmp_path / "rows", [other, result])
    assert report.read([tmp_path / "rows"]) == [result, other]
    page = report.page([result, other])
    assert "| the size … of … | 1 | `exp` |" in page and "compiled: `lu` #0 wrong: values[0]: off" in page
    assert "`lu` 2" in page
    assert report.in_graph(report.counts([result])) == 0.5


def test_the_page_is_that_of_the_results() -> None:
    if not report.RESULTS.exists():
        pytest.skip("no complete sweep has been kept")
    rows = report.read([report.RESULTS])
    assert report.PAGE.read_text() == report.page(rows) == report.page(rows[::-1])


def test_reasons_are_general() -> None:
    assert general("the size 12 of 'x' (at m.py:3)\nmore") == "the size … of …"


def test_what_is_left_out_has_a_reason() -> None:
    names = {op.name for op in entries(differentiable=False)}
    assert set(LEFT_OUT) <= names and all(LEFT_OUT.values())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(9))
def test_first_samples(part: int) -> None:
    """The first sample of every entry; `make conformance-ops` runs all of them."""
    for op in entries()[part::9]:
        if op.name not in LEFT_OUT | THROUGH_OPTIMIZE:
            sample = next(samples(op, torch.float32, True), None)
            if sample is not None:
                found = captured.outcome(op, 0, sample, True)
                assert found.kind not in ("wrong", "raised"), f"{label(op)}: {found.detail}"


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.conformance", "--only", "exp", "--stage", "captured"]
    ran = subprocess.run([*command, "--results", str(tmp_path / "r.jsonl")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (line,) = (tmp_path / "r.0-of-1.jsonl").read_text().splitlines()
    assert json.loads(line)["entry"] == "exp" and "captured" in ran.stdout


def test_what_eager_execution_refuses_is_wrong_if_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    op = entry("nn.functional.gelu")
    given = list(samples(op, torch.float32, False))[:1]
    assert not [o for o in refused.outcomes(op, given) if o.kind == "wrong"]
    monkeypatch.setattr(prepass, "refusal", lambda *arguments: "")
    wrong = [o for o in refused.outcomes(op, given) if o.kind == "wrong"]
    assert [o.sample for o in wrong] == ["0 of torch.int64", "1 of torch.bool", "3 first of torch.int64"]
    assert all("GeluKernelImpl" in o.detail for o in wrong)
