"""Devices: where a program runs, its kernel generator, and its memory, streams and CUDA graphs.

The processor runs launch lists natively (`runtime.executor`). A GPU runs them through `runtime.gpu.plan`, on one
allocation of PyTorch's, on PyTorch's current stream, and can record them. `GPU` abstracts what a GPU does, so that
tests put another one in its place: `device_override`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from daceml_train.analysis.device_model import DeviceModel
from daceml_train.codegen.cpu.compile import compile_kernels, load
from daceml_train.codegen.cpu.launch import KernelCode, Layout, block_count, generate
from daceml_train.codegen.library.matmul_epilogue import matmul_kernel
from daceml_train.codegen.library.tiles import schedules, tiled
from daceml_train.ops.kernel import Kernel
from daceml_train.tensor import Dim

Progress = Callable[[int, int], None]
Target = Literal["cpu", "cuda"]


class Toolchain(Protocol):
    """Generates kernels: their code, and the addresses of the compiled functions."""

    name: str
    """Part of the key under which programs are cached."""
    templates: bool
    """Whether hand-written CPU kernels can be used."""

    def generate(self, kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode:
        """The code of a kernel for operands and results of these layouts."""
        ...

    def variants(self, code: KernelCode) -> Sequence[KernelCode]:
        """The kernel under all launch configurations, the current one first; only their scratch arrays differ."""
        ...

    def blocks(self, code: KernelCode, value: Callable[[Dim], int], threads: int) -> int:
        """The value of the symbol `blocks` in a kernel's integers and scratch sizes; `value` evaluates a size."""
        ...

    def addresses(
        self, codes: Sequence[KernelCode], folder: Path, jobs: int | None, progress: Progress | None
    ) -> dict[str, tuple[int, Path]]:
        """Kernel's key -> entry point and library; only libraries that the folder lacks are compiled."""
        ...


class ProcessorToolchain:
    """Generates C++ for the CPU."""

    name = "cpu"
    templates = True

    def generate(self, kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode:
        """See `Toolchain`."""
        return matmul_kernel(kernel, operands, results) or generate(kernel, operands, results)

    def variants(self, code: KernelCode) -> Sequence[KernelCode]:
        """See `Toolchain`."""
        if code.nest is None:
            return [code]
        found = (tiled(*code.nest, schedule) for schedule, _ in schedules(*code.nest))
        return [code, *(c for c in found if c is not None and c.key != code.key)]

    def blocks(self, code: KernelCode, value: Callable[[Dim], int], threads: int) -> int:
        """See `Toolchain`."""
        return 1 if threads == 1 else block_count(value(code.rows), value(code.work), threads)

    def addresses(
        self, codes: Sequence[KernelCode], folder: Path, jobs: int | None, progress: Progress | None
    ) -> dict[str, tuple[int, Path]]:
        """See `Toolchain`."""
        paths = compile_kernels(codes, folder, jobs, progress)
        return {key: (load(path, key), path) for key, path in paths.items()}


class Device(ABC):
    """Where a program runs."""

    target: Target
    torch: torch.device
    toolchain: Toolchain
    name: str
    """The name of the device for users and measurements."""
    model: DeviceModel | None = None
    """The figures of a GPU, which passes and estimates read."""
    present = True
    """Whether programs can run on it; for other devices they are lowered only."""

    @property
    def key(self) -> str:
        """The properties that programs depend on, for the cache."""
        return self.toolchain.name


class Processor(Device):
    """The CPU."""

    target = name = "cpu"
    torch = torch.device("cpu")

    def __init__(self) -> None:
        self.toolchain = ProcessorToolchain()


CPU = Processor()


ROUNDS, SECONDS = 4, 2e-3
"""How `GPU.times` measures: alternating batches of each candidate, the shortest of which counts, and their length."""


class GPU(Device):
    """The GPU interface of the runtime. Work goes to the current stream; streams and events are opaque."""

    target = "cuda"
    model: DeviceModel

    @abstractmethod
    def kernel(self, address: int, pointers: ctypes.Array[Any], integers: ctypes.Array[Any]) -> None:
        """Launch a kernel. Raises `RuntimeError` with the driver's error message."""

    @abstractmethod
    def call(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Call a function of PyTorch, which may launch work; returns its results."""

    @abstractmethod
    def stream(self) -> Hashable:
        """The current stream."""

    @abstractmethod
    def new_stream(self) -> Hashable:
        """An additional stream."""

    def side_streams(self, count: int) -> list[Hashable]:
        """Streams beside the current one, the same at each call: libraries keep workspaces for each stream."""
        while len(self._side_streams) < count:
            self._side_streams.append(self.new_stream())
        return self._side_streams[:count]

    @functools.cached_property
    def _side_streams(self) -> list[Hashable]:
        return []

    @abstractmethod
    def on(self, stream: Hashable) -> contextlib.AbstractContextManager[Any]:
        """Makes a stream the current one."""

    @abstractmethod
    def event(self, timed: bool = False) -> Any:
        """An event, recorded on the current stream."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Later launches on the current stream wait for the event."""

    @abstractmethod
    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two timed events, after both have completed."""

    def times(self, runs: Sequence[Callable[[int], None]]) -> list[float]:
        """Seconds of each candidate: the shortest of alternating batches; each is called with 0, 1, 2, ..."""

        def batch(run: Callable[[int], None], count: int) -> float:
            start = self.event(timed=True)
            for turn in range(count):
                run(turn)
            return self.seconds(start, self.event(timed=True)) / count

        for run in runs:
            batch(run, 2)  # loads code and warms up the device
        count = max(2, min(200, int(SECONDS / max(batch(runs[0], 2), 1e-6))))
        rounds = [[batch(run, count) for run in runs] for _ in range(ROUNDS)]
        return [min(times) for times in zip(*rounds, strict=True)]

    @abstractmethod
    def keeps(self, tensor: torch.Tensor, stream: Hashable) -> None:
        """Mark a tensor's memory as used on that stream, so it is not reused before that work is done."""

    def empty(self, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """New memory. In a recording it stays the recording's, also when the tensor is gone."""
        return torch.empty_strided(sizes, strides, dtype=dtype, device=self.torch)

    @abstractmethod
    def decide(self, tensor: torch.Tensor) -> bool:
        """The value of a 0-d boolean, for which the CPU waits. Raises `RuntimeError` during capture."""

    @abstractmethod
    def new_pool(self) -> Any:
        """Memory for recordings that do not run at the same time."""

    @abstractmethod
    def record(self, issue: Callable[[], None], pool: Any) -> Callable[[], None]:
        """Record what `issue` launches, without running it; the function returned runs it."""

    def capturing(self) -> bool:
        """Whether somebody else is recording what is launched on the current stream."""
        return False

    @abstractmethod
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether kernels can read the tensor in place."""

    def settings(self) -> Hashable:
        """PyTorch's settings that library calls follow: a recording is good for those it was made under."""
        return None

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which PyTorch neither records gradients nor casts."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(self.torch.type, enabled=False))
        return stack
