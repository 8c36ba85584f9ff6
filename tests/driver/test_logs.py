"""`DACEML_TRAIN_LOG` and the loggers: a line per event, with the user's line."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train import logs
from daceml_train.driver.step import TrainingStep
from tests.driver.test_cache import with_native

pytestmark = pytest.mark.compiled


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.factor = 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x)) * self.factor


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2


def heard(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == f"daceml_train.{name}"]


def listen(caplog: pytest.LogCaptureFixture, *names: str) -> None:
    for name in names:
        logging.getLogger(f"daceml_train.{name}").disabled = False  # whoever configures logging may have disabled it
        caplog.set_level(logging.INFO, logger=f"daceml_train.{name}")


def step_of(model: nn.Module, folder: Path, **options: object) -> TrainingStep:
    optimizer = torch.optim.SGD(list(model.parameters()) or [torch.zeros(1)], lr=0.1)
    return dt.training_step(model, nn.functional.mse_loss, optimizer, cache=folder, **options)  # type: ignore[arg-type]


def test_passes_and_kernels(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    listen(caplog, "passes", "kernels")
    x = torch.ones(2, 3)
    step = step_of(Scaled(), tmp_path)
    step(x, x)
    passes, kernels = heard(caplog, "passes"), heard(caplog, "kernels")
    assert len(passes) == len(step.records[0].passes)
    fused = next(line for line in passes if ": fuse_elementwise(" in line and " 0 matches" not in line)
    assert re.match(r"training_step: fusion: .* -> .* operators, .* bytes, .* \(at .*test_logs.py:\d+", fused)
    assert len(kernels) == step.records[0].distinct_kernels
    assert all("compiled in" in line for line in kernels)
    assert any(re.search(r"test_logs\.py:\d+", line) for line in kernels)
    assert all("\n" not in line for line in passes + kernels)
    caplog.clear()
    step_of(Scaled(), tmp_path)(x, x)
    assert all("on disk already" in line for line in heard(caplog, "kernels")) and heard(caplog, "kernels")


def test_recompiles_and_guards(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    listen(caplog, "recompiles", "guards")
    model = Scaled()
    step, module = step_of(model, tmp_path, dynamic=False), dt.optimize(model, cache=tmp_path, dynamic=False)
    for called in (lambda x: step(x, x), module):
        caplog.clear()
        called(torch.ones(2, 3))
        assert heard(caplog, "recompiles") == []
        conditions = heard(caplog, "guards")
        assert any("check_tensor" in line or "size" in line for line in conditions)
        assert any(re.search(r"test_logs\.py:\d+", line) for line in conditions)
        called(torch.ones(4, 3))
        model.factor += 1
        called(torch.ones(4, 3))
        told = heard(caplog, "recompiles")
        assert any(re.match(r"test_logs\.py:\d+: .*expected 2, actual 4", line) for line in told)
        assert any("factor" in line and re.match(r"test_logs\.py:\d+", line) for line in told)


def test_what_binds_a_step_anew(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    listen(caplog, "recompiles")
    model, x = Scaled(), torch.ones(2, 3)
    step = step_of(model, tmp_path)
    step(x, x)
    step.optimizer.param_groups[0]["weight_decay"] = 0.5
    step(x, x)
    assert "training step of Scaled is rebound: the optimizer has other options" in heard(caplog, "recompiles")
    model.inner.weight = nn.Parameter(model.inner.weight.detach().clone())
    step(x, x)
    assert any("is another object" in line for line in heard(caplog, "recompiles"))


@pytest.mark.filterwarnings("ignore:daceml_train runs")
def test_breaks(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    listen(caplog, "breaks")
    model = nn.Sequential(nn.Linear(3, 3), Broken())
    step = step_of(model, tmp_path)
    step(torch.ones(2, 3), torch.ones(2, 3))
    assert step.breaks and step.breaks[0].split()[0] in heard(caplog, "breaks")[0]
    assert re.search(r"test_logs\.py:\d+", heard(caplog, "breaks")[0])


SCRIPT = """
import torch, daceml_train as dt
dt.optimize(torch.nn.Linear(3, 2))(torch.ones(1, 3))
"""


def run(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    given = {**os.environ, "DACEML_TRAIN_CACHE": str(with_native(tmp_path / "cache")), **environment}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=given, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_environment_asks_for_logs_and_dumps(tmp_path: Path) -> None:
    done = run(tmp_path, DACEML_TRAIN_LOG="passes, kernels", DACEML_TRAIN_DUMP=str(tmp_path / "dump"))
    assert done.returncode == 0, done.stderr
    assert "[daceml_train.passes] " in done.stderr
    assert "[daceml_train.guards] " not in done.stderr
    names = {path.suffix for path in (tmp_path / "dump").iterdir()}
    assert {".txt", ".sdfg", ".plan"} <= names


def test_unknown_logs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, "passes,kernel")
    sentence = (
        "names no log 'kernel', did you mean 'kernels'?; there are breaks, recompiles, guards, passes, kernels, and"
    )
    with pytest.raises(dt.Invalid, match=re.escape(sentence)):
        dt.optimize(nn.Linear(3, 2))
    monkeypatch.setenv("DACEML_TRAIN_DUMP", "/dev/null/folder")
    monkeypatch.setenv(logs.VARIABLE, "")
    with pytest.raises(dt.Invalid, match=r"nothing can be dumped into /dev/null/folder \(from \$DACEML_TRAIN_DUMP\)"):
        dt.optimize(nn.Linear(3, 2))
