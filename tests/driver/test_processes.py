"""Several processes that need the same programs: each program and each kernel is compiled by one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.driver.compilers import compiled, noting

pytestmark = [pytest.mark.compiled, pytest.mark.slow]

SCRIPT = """
import copy, sys
import torch, daceml_train as dt
from torch.nn import functional as F
torch.manual_seed(0)
theirs = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4), torch.nn.Softmax(-1))
ours = copy.deepcopy(theirs)
x, y = torch.randn(6, 8), torch.randn(6, 4)
optimizers = [torch.optim.AdamW(m.parameters()) for m in (ours, theirs)]
step = dt.training_step(ours, F.mse_loss, optimizers[0])
for _ in range(3):
    loss = step(x, y)
    optimizers[1].zero_grad()
    expected = F.mse_loss(theirs(x), y)
    expected.backward()
    optimizers[1].step()
    torch.testing.assert_close(loss, expected.detach())
torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
assert step.breaks == [], step.breaks
print(sum(not record.warm for record in step.records), len(step.records))
"""


def run(folder: Path, cxx: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "DACEML_TRAIN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "CXX": cxx}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    root = Path(__file__).parents[2]
    return subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=root, env=environment, text=True, **pipes)


def answers(processes: list[subprocess.Popen[str]]) -> list[tuple[int, int]]:
    """How many programs each of them compiled, and how many it ran."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        compiled, programs = map(int, out.split())
        found.append((compiled, programs))
    return found


def test_each_program_and_each_kernel_is_compiled_once(tmp_path: Path) -> None:
    """The native executor, too: its source is among the texts."""
    cxx = noting(tmp_path)
    found = answers([run(tmp_path, cxx) for _ in range(3)])
    assert sum(new for new, _ in found) == 1 and {programs for _, programs in found} == {1}
    times = Counter(compiled(tmp_path))
    assert set(times.values()) == {1}
    libraries = list((tmp_path / "cache").rglob("*.so"))
    assert len(times) == len(libraries) > 2
    assert not list((tmp_path / "cache").rglob(".*"))


def test_a_killed_process_leaves_its_work_to_one_that_waits(tmp_path: Path) -> None:
    cxx = noting(tmp_path)
    (tmp_path / "wait").touch()
    first = run(tmp_path, cxx)
    while not compiled(tmp_path):  # the native executor
        assert first.poll() is None
        time.sleep(0.05)
    others = [run(tmp_path, cxx) for _ in range(2)]
    time.sleep(3.0)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    (tmp_path / "wait").unlink()
    found = answers(others)
    assert sum(new for new, _ in found) == 1
    times = Counter(compiled(tmp_path))
    assert sorted(times.values()) == [1] * (len(times) - 1) + [2]  # what the first one was killed over
