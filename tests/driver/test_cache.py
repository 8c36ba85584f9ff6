"""The cache and the compiler that fills it, over process boundaries: training goes on whatever state they are in."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.driver import compile as road
from daceml_train.driver.module import state_of
from daceml_train.errors import CompilerError, Invalid, Refused, Rejected, Unsupported
from daceml_train.storage.folders import cache_folder
from tests.driver.compilers import compiled, noting

pytestmark = pytest.mark.compiled

SCRIPT = """
import sys, warnings
import torch, daceml_train as dt
from daceml_train.driver.module import state_of
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
x, y = torch.randn(6, 8), torch.randn(6, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimized = dt.optimize(model)
    torch.testing.assert_close(optimized(x), model(x))
    optimized(x).sum().backward()
    step = dt.training_step(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [float(step(x, y)) for _ in range(3)]
records = [*state_of(optimized).backend.records, *step.records]
ours = [w for w in caught if "daceml_train" in str(w.message)]
print(*map(str, ours), file=sys.stderr)
warm = all(r.warm for r in records)
print(*["%.5f" % loss for loss in losses], len(ours), warm, "dace" in sys.modules, len(step.breaks))
"""


def run(cache: Path, cxx: str | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "DACEML_TRAIN_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    if cxx is not None:
        environment["CXX"] = cxx
    root = Path(__file__).parents[2]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=root, env=environment, text=True, **pipes)


def answer(process: subprocess.Popen[str]) -> tuple[list[str], int, bool, bool, bool]:
    """Losses, warnings, whether all came from the cache, whether DaCe was imported, whether the step is whole."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    words = out.split()
    return words[:3], int(words[3]), words[4] == "True", words[5] == "True", words[6] == "0"


def with_native(folder: Path) -> Path:
    """A new cache that holds the executor, whose compilation takes half a minute, and nothing else."""
    from daceml_train.runtime.native_library import library

    library()
    folder.mkdir()
    (folder / "native").symlink_to(cache_folder() / "native")
    return folder


def test_two_processes_then_warm_then_damaged(tmp_path: Path) -> None:
    cache = with_native(tmp_path / "cache")
    cold = [answer(process) for process in [run(cache), run(cache)]]
    assert cold[0][0] == cold[1][0] and all(whole for *_, whole in cold)
    losses = cold[0][0]
    programs, kernels = list((cache / "programs").iterdir()), list((cache / "kernels").glob("*.so"))
    assert {p.suffix for p in programs} == {".program"} and kernels

    # A fresh process needs neither the compiler nor DaCe.
    assert answer(run(cache, cxx="/nonexistent")) == (losses, 0, True, False, True)
    assert answer(run(cache, cxx="false")) == (losses, 0, True, False, True)

    # What is damaged is rebuilt.
    for path in programs:
        path.write_bytes(path.read_bytes()[:-7])
    for path in kernels:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert answer(run(cache))[:2] == (losses, 0)
    assert answer(run(cache, cxx="/nonexistent")) == (losses, 0, True, False, True)


@pytest.mark.slow
def test_what_one_host_builds_the_others_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, compiler = tmp_path / "secret", noting(tmp_path)
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    monkeypatch.setenv("DACEML_TRAIN_REMOTE_CACHE", f"file://{tmp_path}/common")
    monkeypatch.setenv("DACEML_TRAIN_REMOTE_CACHE_KEY", str(secret))
    losses, warned, *_ = answer(run(tmp_path / "first", cxx=compiler))
    texts = compiled(tmp_path)
    common = {file.name for file in (tmp_path / "common").rglob("*.*")}
    assert warned == 0 and len(common) > len(texts) > 1  # kernels and the executor; programs

    second = tmp_path / "second"
    assert answer(run(second, cxx=compiler)) == (losses, 0, True, False, True)
    assert compiled(tmp_path) == texts  # nothing more
    assert {file.name for kind in ("kernels", "native", "programs") for file in (second / kind).glob("*.*")} == common


@pytest.mark.parametrize("cxx", ["/nonexistent", "false"])
def test_without_a_compiler_training_goes_on(cxx: str, tmp_path: Path) -> None:
    expected = None
    for folder in (with_native(tmp_path / "executor"), tmp_path / "nothing"):
        losses, warned, _, _, whole = answer(run(folder, cxx=cxx))
        assert warned in (1, 2) and not whole
        assert expected in (None, losses)
        expected = losses


def test_one_warning_names_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    model, x = nn.Sequential(nn.Linear(7, 5), nn.Sigmoid()), torch.randn(3, 7)
    optimized = dt.optimize(model, cache=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.testing.assert_close(optimized(x), model(x))
    ours = [str(w.message) for w in caught if "daceml_train" in str(w.message)]
    assert len(ours) == 1 and "/nonexistent" in ours[0] and "CXX" in ours[0]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (IndexError("a bug"), "internal error, IndexError: a bug"),
        (Invalid("%b updates %a"), "internal error, %b updates %a"),
        (Refused("no lowering"), "internal error, no lowering"),
        (Rejected("g++ failed"), "internal error, g\\+\\+ failed"),
        (Unsupported("complex numbers"), "PyTorch does: complex numbers"),
        (CompilerError("there is no g++"), "PyTorch does: there is no g"),
    ],
)
def test_an_internal_error_does_not_end_training(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(road, "lower", fails)
    model, x = nn.Sequential(nn.Linear(7, 5), nn.Sigmoid()), torch.randn(3, 7)
    optimized = dt.optimize(model, cache=tmp_path)
    with pytest.warns(UserWarning, match=message):
        torch.testing.assert_close(optimized(x), model(x))
    step = dt.training_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()), cache=tmp_path)
    with pytest.warns(UserWarning, match=message):
        step(x, torch.zeros(3, 5))
    assert step.breaks[0].startswith("internal error") == message.startswith("internal error")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "programs").write_text("a file where a folder should be")
    model, x = nn.Sequential(nn.Linear(7, 5), nn.Sigmoid()), torch.randn(3, 7)
    optimized = dt.optimize(model, cache=tmp_path)
    with pytest.warns(UserWarning, match="cannot use its cache"):
        torch.testing.assert_close(optimized(x), model(x))
    assert state_of(optimized).backend.breaks == []  # type: ignore[union-attr]
