"""Kernels on a CUDA device, against their NumPy meaning in float64, and by compute-sanitizer where it exists."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from daceml_train.codegen.cuda.compile import architecture, compile_program, load
from daceml_train.runtime.gpu.toolchain import suitable_nvcc
from daceml_train.storage.folders import cache_folder
from tests.codegen.cuda.running import code_of
from tests.codegen.running import Case, number
from tests.codegen.test_families import families

pytestmark = pytest.mark.gpu

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
SHAPES = [(23, 52), (5, 130), (300, 1024)]


def on_device(cases: list[Case]) -> list[str]:
    """Run each case once on the device, and say which are wrong."""
    codes = [code_of(case) for case in cases]
    arch = architecture(*torch.cuda.get_device_capability())
    path = compile_program(codes, cache_folder() / "cuda", arch, suitable_nvcc())
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    wrong = []
    for case, code in zip(cases, codes, strict=True):
        known = {"blocks": code.blocks(lambda size: number(size, blocks=1), processors)}
        integers = (ctypes.c_int64 * len(code.integers))(*(number(i, **known) for i in code.integers))
        scratch = [torch.full((number(s, **known) + 64,), 255, dtype=torch.uint8).cuda() for s in code.scratch]
        updated = dict(case.kernel.updates)
        inputs = [_moved(x) for x in case.inputs]
        outputs = [inputs[updated[i]] if i in updated else _moved(x) for i, x in enumerate(case.outputs)]
        memory = [*inputs, *(x for i, x in enumerate(outputs) if i not in updated), *scratch]
        pointers = (ctypes.c_void_p * max(1, len(memory)))(*(x.data_ptr() for x in memory))
        stream = torch.cuda.current_stream().cuda_stream
        error = LAUNCH(load(path, code.key))(ctypes.addressof(pointers), ctypes.addressof(integers), stream)
        torch.cuda.synchronize()
        for there, here in zip(outputs, case.outputs, strict=True):
            here.copy_(there)
        if error or not case.worst() <= case.tolerance:
            wrong.append(f"{case.name}: error {error}, {case.worst():.3g}")
        if any((x[-64:] != 255).any() for x in scratch):
            wrong.append(f"{case.name} writes beyond its scratch")
    return wrong


def _moved(x: torch.Tensor) -> torch.Tensor:
    """A copy on the device in the same strides, with room for what lies between."""
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    flat = torch.zeros(reach, dtype=x.dtype, device="cuda")
    return flat.as_strided(x.shape, x.stride()).copy_(x) if x.numel() else flat.view(x.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_families(shape: tuple[int, int]) -> None:
    assert on_device(families(*shape, 1)) == []


@pytest.mark.parametrize("tool", ["racecheck", "memcheck"])
def test_races_and_accesses(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.small"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if "not supported" in run.stdout:
        pytest.skip(f"compute-sanitizer refuses this device: {run.stdout.strip().splitlines()[0]}")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
