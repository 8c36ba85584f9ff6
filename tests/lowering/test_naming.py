"""Names of kernels and calls: what they compute and where."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.step import TrainingStep

pytestmark = pytest.mark.compiled


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + x)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block())
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer1(x).mean((2, 3)))


def train(folder: Path, **options: object) -> TrainingStep:
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    step = dt.training_step(model, F.cross_entropy, optimizer, cache=folder, **options)  # type: ignore[arg-type]
    for _ in range(2):
        step(torch.randn(2, 4, 5, 5), torch.tensor([0, 2]))
    return step


def test_kernels_and_calls_are_named_by_what_they_compute_and_where(tmp_path: Path) -> None:
    step = train(tmp_path)
    names = [cost.name for cost in step.records[-1].costs]
    assert all(cost.name for cost in step.records[-1].costs if cost.kind in ("kernel", "call"))
    assert any(name.startswith("layer1.0.bn1 + relu") for name in names)
    assert "layer1.0.conv1" in names
    assert "fc backward" in names
    assert any("adamw fc.weight" in name for name in names)
    report = dt.report(step)
    assert any(launch.name.startswith("layer1.0.conv1") for launch in report.functions[0].launches)
    largest = str(report).split("largest launches:")[1]
    assert any(name in largest for name in names)


def test_names_are_no_part_of_kernels(tmp_path: Path) -> None:
    """Layers of one shape share their kernels, and their sources say nothing of a place."""
    step = train(tmp_path)
    record = step.records[-1]
    assert record.distinct_kernels < record.kernels
    assert record.executable is not None
    for code in record.executable.program.codes:
        assert not any(word in code.source for word in ("layer1", "conv", "adamw", "test_naming"))


def test_dumped_sources_say_where_they_are_used(tmp_path: Path) -> None:
    train(tmp_path / "cache", dump=tmp_path / "dump")
    texts = [path.read_text() for path in (tmp_path / "dump").glob("*.cpp")]
    assert any("// layer1.0.bn1" in text and "test_naming.py:" in text for text in texts)
    assert any(text.startswith("// ") and "%" in text.split("\n")[1] for text in texts)
    named = 0
    for text in (t for t in texts if "_internal(" in t):  # the first use of a kernel names its arrays
        result, read = text.split("\n")[1].removeprefix("//   ").rstrip(")").split(" = (")
        values = {re.sub(r"\W+", "_", value.removeprefix("%")) for value in f"{result}, {read}".split(", ")}
        named += bool(set(re.findall(r"\b[xy]\d+_(\w+)\b", text)) & values)
    assert named > 3


def test_a_profile_shows_programs_by_name(tmp_path: Path) -> None:
    step = train(tmp_path)
    module = dt.optimize(Network(), cache=tmp_path)
    x = torch.randn(2, 4, 5, 5)
    module(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(x, torch.tensor([0, 2]))
        module(x).sum().backward()
    seen = {event.key for event in profile.key_averages()}
    assert {"daceml_train: training_step", "daceml_train: forward", "daceml_train: backward"} <= seen
