"""Simulated steps on many cores."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.cli import main
from daceml_train.errors import Invalid
from daceml_train.reporting.cores import MANY_CORES, Processor, Row, programs_of, read, simulate, together

FREE = Processor(16, 0.0, 0.0)
"""Teams cost nothing."""


def rows(count: int, chained: bool, flops: int = 0) -> list[Row]:
    return [Row("kernel", 1e-3, 8, flops, (i - 1,) if chained and i else ()) for i in range(count)]


def test_independent_launches_fill_the_cores_and_a_chain_does_not() -> None:
    free = simulate(rows(32, chained=False), FREE)
    assert free.all_cores == pytest.approx(32e-3) and free.lanes == pytest.approx(2e-3, rel=0.01)
    assert free.bound == pytest.approx(2e-3) and free.gain == pytest.approx(16, rel=0.01)
    chain = simulate(rows(32, chained=True), FREE)
    assert chain.lanes == pytest.approx(chain.all_cores) == pytest.approx(chain.bound)


def test_launches_scale_up_to_their_operations_and_their_memory() -> None:
    assert Row("kernel", 1.0, 8, 32768 * 4).most == 4
    assert Row("call", 1.0, 8, 65536 * 4).most == 4
    assert Row("copy", 1.0, 8, 1 << 40).most == 1
    assert Row("kernel", 1.0, 10**8, 10**9).most == 8
    scaled = simulate(rows(4, chained=True, flops=32768 * 8), FREE)
    assert scaled.all_cores == pytest.approx(4e-3 / 8)


def test_a_call_takes_all_cores_today_and_the_best_number_is_less() -> None:
    small = [Row("call", 1e-5, 8, 1000)] * 4
    found = simulate(small, MANY_CORES)
    assert found.all_cores > 4 * 3e-5 + 4 * 3e-6 * 6
    assert found.best_each == pytest.approx(4 * 3e-5) and found.lanes == pytest.approx(3e-5, rel=0.02)


def test_programs_follow_each_other() -> None:
    one = simulate(rows(4, chained=False), FREE)
    both = together([one, one])
    assert both.launches == 8 and both.lanes == 2 * one.lanes and both.bound == 2 * one.bound
    assert simulate([], FREE).lanes == 0.0 and together([simulate([], FREE)]).gain == 1.0


@pytest.mark.compiled
def test_a_report_is_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.randn(4, 8), torch.randn(4, 4)
    report = dt.report(step, lambda: step(*data), runs=2)
    path = tmp_path / "report.json"
    report.save(path)
    (program,) = programs_of(report.functions[-1].launches)
    assert read(path) == [program]
    assert any(row.before for row in program) and all(p < i for i, row in enumerate(program) for p in row.before)
    assert main(["simulate", str(path), "--cores", "4", "--slow", "1"]) == 0
    text = capsys.readouterr().out
    assert f"{len(program)} launches on 4 cores, simulated" in text and "side by side" in text
    assert main(["simulate", str(path), "--cores", "0"]) == 2
    assert main(["simulate", str(path), "--fork", "-1"]) == 2
    stored = json.loads(path.read_text())
    for wrong in (10**6, -1, len(program) - 1):
        stored["functions"][-1]["launches"][-1]["before"] = [wrong]
        path.write_text(json.dumps(stored))
        with pytest.raises(
            Invalid, match=f"launch {len(program) - 1} of program 0 waits for one that is not before it"
        ):
            read(path)
    dt.report(step).save(path)
    with pytest.raises(Invalid, match="were not measured"):
        read(path)
    path.write_text(json.dumps({"functions": []}))
    assert main(["simulate", str(path)]) == 1
    assert "is not a report with measured launches" in capsys.readouterr().err
