"""Which nvcc is taken, and for which architecture: toolkits are scripts that say a version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daceml_train.codegen.cuda import compile as compiling
from daceml_train.codegen.cuda.compile import architecture, find_nvcc, nvcc_version, run_nvcc, target
from daceml_train.errors import CompilerError
from daceml_train.runtime.gpu import toolchain


def toolkit(folder: Path, major: int, codes: str = "sm_80 sm_90 sm_100 compute_100") -> Path:
    """An nvcc that prints its command line."""
    folder.mkdir(parents=True)
    path = folder / "nvcc"
    lines = [f'--version) echo "Cuda compilation tools, release {major}.2, V{major}.2.1";;']
    lines += [f'--list-gpu-code) printf "{codes.replace(" ", chr(92) + "n")}\\n";;', "dryrun) ;;", '*) echo "$@";;']
    path.write_text(f"#!/bin/sh\ncase $1 in {' '.join(lines)} esac\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """A newer toolkit, which is found first, and an older one."""
    paths = toolkit(tmp_path / "13", 13), toolkit(tmp_path / "12", 12)
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setattr(compiling, "_candidates", lambda tool: iter(paths))
    return paths


def test_the_major_version_is_that_of_pytorch(two: tuple[Path, Path]) -> None:
    newer, older = two
    assert nvcc_version(newer) == (13, 2)
    assert find_nvcc() == find_nvcc(13) == find_nvcc(14) == newer
    assert find_nvcc(12) == older
    with pytest.raises(CompilerError, match=r"up to CUDA 11, and .*13/nvcc is of CUDA 13.*toolkit 11.*NVCC"):
        find_nvcc(11)


def test_an_nvcc_that_was_named_is_not_replaced(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC", str(two[0]))
    with pytest.raises(CompilerError, match="is of CUDA 13; install"):
        find_nvcc(12)


@pytest.mark.parametrize(
    ("built", "driver", "newest"), [(None, 13000, None), ("12.8", 12040, 12), ("12.8", 13010, 13), ("13.0", 13000, 13)]
)
def test_what_a_process_can_run(
    monkeypatch: pytest.MonkeyPatch, built: str | None, driver: int, newest: int | None
) -> None:
    """A library contains the runtime of its toolkit, which a driver of an older major version refuses."""
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    assert toolchain.newest_runtime() == newest


def test_newer_devices_get_the_newest_ptx(tmp_path: Path) -> None:
    nvcc = toolkit(tmp_path / "12", 12, "sm_80 sm_86 sm_90 compute_90")
    assert target(nvcc, architecture(8, 6)) == "sm_86"
    assert target(nvcc, architecture(12, 0)) == "compute_90"
    assert target(nvcc, architecture(8, 9)) == "compute_86"
    assert "-arch=compute_90" in run_nvcc(nvcc, ["x.cu"], "sm_120").split()
    with pytest.raises(CompilerError, match="compiles for sm_80 and newer, the device is sm_75"):
        target(nvcc, architecture(7, 5))


def test_other_toolkits_have_libraries_of_their_own(two: tuple[Path, Path], tmp_path: Path) -> None:
    names = {compiling.library_path([], tmp_path, "sm_90", nvcc).name for nvcc in two}
    assert len(names) == 2
