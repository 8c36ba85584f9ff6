"""`pass_callback=` and `progress=`, and pipelines given as text and files."""

from pathlib import Path

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.errors import Invalid
from daceml_train.passes import Step

TEXT = "intra_operator: decompose(), simplify()\nfusion: fuse_elementwise()"


@pytest.mark.compiled
def test_a_watcher_hears_every_pass_also_of_a_cached_program(tmp_path: Path) -> None:
    cold: list[Step] = []
    warm: list[Step] = []
    kernels: list[tuple[int, int]] = []
    for steps in (cold, warm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = dt.training_step(
            model,
            nn.functional.mse_loss,
            optimizer,
            pipeline=TEXT,
            cache=tmp_path,
            pass_callback=steps.append,
            progress=lambda done, total: kernels.append((done, total)),
        )
        step(torch.ones(2, 4), torch.ones(2, 4))
    assert [(s.level, s.transformation.name, s.position, s.passes) for s in cold] == [
        ("intra_operator", "decompose", 0, 3),
        ("intra_operator", "simplify", 1, 3),
        ("fusion", "fuse_elementwise", 2, 3),
    ]
    assert cold[-1].matches > 0
    assert cold[-1].bytes_after < cold[-1].bytes_before
    assert all(s.graph is not None for s in cold)
    assert warm == cold
    assert all(s.graph is None for s in warm)
    assert kernels
    assert kernels[-1][0] == kernels[-1][1]


def test_a_pipeline_that_does_not_read_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no pass is named 'simplifi', did you mean 'simplify'"):
        dt.optimize(nn.ReLU(), pipeline="fusion: simplifi()")
