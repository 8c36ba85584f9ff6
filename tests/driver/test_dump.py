"""`dump=`: texts after each pass, an SDFG, the plan, and the kernels' C++."""

import re
from pathlib import Path

import dace
import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.driver.step import TrainingStep
from daceml_train.graph.text import parse, show
from daceml_train.sdfg.convert import from_sdfg

pytestmark = pytest.mark.compiled


def train(folder: Path | None) -> TrainingStep:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16))
    step = dt.training_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), dump=folder)
    step(torch.randn(4, 8), torch.randn(4, 16))
    return step


def test_a_folder_receives_all_that_happens(tmp_path: Path) -> None:
    step = train(tmp_path)
    texts = sorted(tmp_path.glob("*.txt"))
    names = [path.stem.split("_", 1)[1] for path in texts]
    assert any("training_step_fusion_fuse_elementwise" in name for name in names)
    last = parse(texts[-1].read_text())
    assert last.name == "training_step"
    (saved,) = tmp_path.glob("*.sdfg")
    assert show(from_sdfg(dace.SDFG.from_file(str(saved)))) == show(last)
    assert len(list(tmp_path.glob("*.cpp"))) == step.records[0].distinct_kernels


def test_the_plan_lists_buffers_and_launches(tmp_path: Path) -> None:
    step = train(tmp_path)
    executable = step.records[0].executable
    assert executable is not None
    program = executable.program
    text = (tmp_path / "training_step.plan").read_text()
    assert len(re.findall(r"^    b\d+ ", text, re.MULTILINE)) == len(program.slots)
    launches = re.findall(r"^ +(\d+) (.*)$", text, re.MULTILINE)
    assert len(launches) == len(program.launches)
    for code in program.codes:
        assert f"kernel_{code.key}(" in text
    assert "input parameter 0.weight, written" in text


def test_the_environment_names_a_folder_that_models_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DACEML_TRAIN_DUMP", str(tmp_path / "all"))
    train(None)
    train(None)
    assert {path.stem for path in (tmp_path / "all").glob("*.plan")} == {"training_step", "training_step_2"}
    numbers = [path.name[:3] for path in sorted((tmp_path / "all").glob("*.txt"))]
    assert len(numbers) == len(set(numbers))
