"""Generated CUDA kernels, compiled by nvcc into one library per program, or a few."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from daceml_train.codegen.cpu.launch import KernelCode, Layout
from daceml_train.codegen.cuda.compile import architecture, compile_program, compiled, find_nvcc, load
from daceml_train.codegen.cuda.launch import CudaCode, CudaPart, generate, variants, version, whole_of
from daceml_train.lowering.device import Progress
from daceml_train.ops.kernel import Kernel
from daceml_train.storage.interruption import workers
from daceml_train.tensor import Dim

TOGETHER = 24
"""Kernels per file, which takes nvcc a few seconds; a model with more kernels has several files, built in parallel."""


def newest_runtime() -> int | None:
    """The major version of CUDA up to which programs run: PyTorch's, or the driver's; None without CUDA."""
    if torch.version.cuda is None:
        return None
    driver: int = getattr(torch._C, "_cuda_getDriverVersion", int)()
    return max(int(torch.version.cuda.split(".")[0]), driver // 1000)


@functools.cache
def suitable_nvcc() -> Path:
    """The nvcc whose programs run in this process. Raises `CompilerError`."""
    return find_nvcc(newest_runtime())


class CudaToolchain:
    """For devices of this compute capability with so many multiprocessors."""

    templates = False

    def __init__(self, capability: tuple[int, int], processors: int) -> None:
        self.architecture, self.processors = architecture(*capability), processors
        self.name = f"cuda {self.architecture} {version()}"

    def generate(self, kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode:
        """See `Toolchain`."""
        return generate(kernel, operands, results)

    def variants(self, code: KernelCode) -> Sequence[KernelCode]:
        """See `Toolchain`."""
        if isinstance(code, CudaPart):  # the second part goes with the first one
            return [each.parts[0] for each in variants(code.whole)] if not code.number else [code]
        assert isinstance(code, CudaCode)
        return variants(code)

    def blocks(self, code: KernelCode, value: Callable[[Dim], int], threads: int) -> int:
        """See `Toolchain`."""
        return whole_of(code).blocks(value, self.processors)

    def addresses(
        self, codes: Sequence[KernelCode], folder: Path, jobs: int | None, progress: Progress | None
    ) -> dict[str, tuple[int, Path]]:
        """See `Toolchain`."""
        if not codes:
            return {}
        nvcc = suitable_nvcc()
        wholes = {code.key: whole_of(code) for code in codes}
        distinct = sorted({code.key: code for code in wholes.values()}.values(), key=lambda code: code.key)
        parts = [distinct[i : i + TOGETHER] for i in range(0, len(distinct), TOGETHER)]
        built: dict[str, tuple[int, Path]] = {}
        with workers(jobs) as pool:
            running = []
            for part in parts:
                if not compiled(part, folder, self.architecture, nvcc):
                    for code in part:
                        _ = code.source  # generated here: DaCe's generator is not thread-safe
                running.append(pool.submit(compile_program, part, folder, self.architecture, nvcc))
            for part, future in zip(parts, running, strict=True):
                if progress is not None:
                    progress(len(built), len(distinct))
                path = future.result()
                names = {code.key for code in part}
                built |= {key: (load(path, key), path) for key, code in wholes.items() if code.key in names}
        if progress is not None:
            progress(len(built), len(distinct))
        return built
