"""The example of data-parallel training learns the same, on one process and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed" / "train.py"
ROOT = EXAMPLE.parents[2]


def printed(*launcher: str) -> str:
    command = [sys.executable, *launcher, str(EXAMPLE)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.compiled
@pytest.mark.slow
def test_two_processes_learn_what_one_does() -> None:
    alone = printed()
    together = printed("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    losses = [[float(x) for x in re.findall(r"loss ([\d.]+)", text)] for text in (alone, together)]
    assert losses[0][-1] < 0.01 < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)  # three digits are printed, and sums are rounded otherwise
    assert "1 ranks, 0 breaks; each sends 0 bytes" in alone
    parameters = 16 * 64 + 64 + 64 + 64 + 64 * 4 + 4
    assert f"2 ranks, 0 breaks; each sends {4 * (parameters + 2)} bytes" in together  # with the loss and a weight


@pytest.mark.compiled
@pytest.mark.slow
def test_processes_of_ray_learn_the_same() -> None:
    pytest.importorskip("ray.train", reason="Ray is not installed")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}  # no token in the home folder
    command = [sys.executable, str(EXAMPLE.with_name("ray_train.py"))]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert ran.returncode == 0, ran.stderr[-3000:]
    loss = re.search(r"step 100: loss ([\d.]+), 0 breaks", ran.stdout)
    assert loss is not None and float(loss[1]) < 0.01


def test_the_page_shows_the_example() -> None:
    assert EXAMPLE.read_text(encoding="utf-8") in (ROOT / "docs/guide/distributed.md").read_text(encoding="utf-8")


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", pytest.param("dlrm", marks=pytest.mark.wide)])
def test_a_job_that_fails_goes_on_from_its_checkpoint_with_another_number_of_processes(
    tmp_path: Path, model: str
) -> None:
    def run(processes: int, *options: str) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        script = [str(EXAMPLE.with_name("restart.py")), model, "--folder", str(tmp_path), "--steps", "30", *options]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        environment["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, *launcher, *script]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    failed = run(2, "--fail-at", "25")
    assert failed.returncode != 0 and "2 ranks begin at step 0" in failed.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20"]
    resumed = run(1)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "1 ranks begin at step 20" in resumed.stdout and "0 breaks" in resumed.stdout
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", failed.stdout + resumed.stdout)]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
