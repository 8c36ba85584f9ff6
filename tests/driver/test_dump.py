"""`dump=`: texts after each pass, an SDFG, and the kernels' C++."""

from pathlib import Path

import dace
import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.graph.text import parse, show
from daceml_train.sdfg.convert import from_sdfg

pytestmark = pytest.mark.compiled


def test_a_folder_receives_all_that_happens(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16))
    step = dt.training_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), dump=tmp_path)
    step(torch.randn(4, 8), torch.randn(4, 16))
    texts = sorted(tmp_path.glob("*.txt"))
    names = [path.stem.split("_", 1)[1] for path in texts]
    assert any("fusion_fuse_elementwise" in name for name in names)
    last = parse(texts[-1].read_text())
    (saved,) = tmp_path.glob("*.sdfg")
    assert show(from_sdfg(dace.SDFG.from_file(str(saved)))) == show(last)
    assert len(list(tmp_path.glob("*.cpp"))) == step.records[0].distinct_kernels
