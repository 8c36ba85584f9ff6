"""Kernels for CUDA: the code generator's, compiled by nvcc, one library for the kernels of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from daceml_train.codegen.cuda.compile import architecture, compile_program, load
from daceml_train.codegen.cuda.launch import CudaCode, generate, version
from daceml_train.codegen.launch import KernelCode, Layout
from daceml_train.ops.kernel import Kernel
from daceml_train.runtime.device import Progress
from daceml_train.tensor import Dim


class CudaToolchain:
    """For devices of this compute capability with so many multiprocessors."""

    templates = False

    def __init__(self, capability: tuple[int, int], processors: int) -> None:
        self.architecture, self.processors = architecture(*capability), processors
        self.name = f"cuda {self.architecture} {version()}"

    def generate(self, kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode:
        """See `Toolchain`."""
        return generate(kernel, operands, results)

    def blocks(self, code: KernelCode, value: Callable[[Dim], int], threads: int) -> int:
        """See `Toolchain`."""
        assert isinstance(code, CudaCode)
        return code.blocks(value, self.processors)

    def addresses(
        self, codes: Sequence[KernelCode], folder: Path, jobs: int | None, progress: Progress | None
    ) -> dict[str, tuple[int, Path]]:
        """See `Toolchain`."""
        kernels = [code for code in codes if isinstance(code, CudaCode)]
        if not kernels:
            return {}
        if progress is not None:
            progress(0, len(kernels))
        path = compile_program(kernels, folder, self.architecture)
        if progress is not None:
            progress(len(kernels), len(kernels))
        return {code.key: (load(path, code.key), path) for code in kernels}
