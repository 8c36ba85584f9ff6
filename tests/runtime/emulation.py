"""A GPU that is not there: its memory is the host's, its streams are queues, and a recording is a list of operations.

Launches outside a recording run at once. A recording runs nothing; each of its runs takes the operations in another
random order that streams and events allow, on the memory that was recorded. Work that would need another stream's
result without waiting for it thus gives wrong numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from daceml_train.analysis.device_model import device_model
from daceml_train.codegen.cpu.compile import compile_kernels, load
from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.cuda.launch import whole_of
from daceml_train.lowering.device import GPU, ProcessorToolchain, Progress, Toolchain
from daceml_train.runtime.gpu.toolchain import CudaToolchain
from daceml_train.runtime.placement import device_override
from tests.codegen.cuda.running import emulated as library_of

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class HostKernels(ProcessorToolchain):
    """The processor's kernels, as a GPU's: none is written by hand."""

    name = "emulated, the processor's kernels"
    templates = False

    def __init__(self) -> None:
        self._entries: list[Any] = []

    def addresses(
        self, codes: Sequence[KernelCode], folder: Path, jobs: int | None, progress: Progress | None
    ) -> dict[str, tuple[int, Path]]:
        results = {}
        for key, path in compile_kernels(codes, folder, jobs, progress).items():
            kernel = KERNEL(load(path, key))

            def launch(pointers: int, integers: int, stream: int, kernel: Any = kernel) -> int:
                kernel(pointers, integers)
                return 0

            self._entries.append(LAUNCH(launch))
            results[key] = ctypes.cast(self._entries[-1], ctypes.c_void_p).value or 0, path
        return results


class EmulatedCuda(CudaToolchain):
    """CUDA kernels, run by the emulator of `tests/codegen/cuda`."""

    def __init__(self) -> None:
        super().__init__((9, 0), 2)
        self.name = f"emulated, {self.name}"

    def addresses(
        self, codes: Sequence[KernelCode], folder: Path, jobs: int | None, progress: Progress | None
    ) -> dict[str, tuple[int, Path]]:
        library = library_of([whole_of(code) for code in codes])
        results = {}
        for code in codes:
            entry = ctypes.cast(getattr(library, f"launch_{code.key}"), ctypes.c_void_p)
            results[code.key] = entry.value or 0, Path(library._name)
        return results


@dataclass
class Operation:
    run: Callable[[], None]
    stream: int
    waits: list[int] = field(default_factory=list)
    """Positions of operations after which it runs."""


@dataclass
class Event:
    after: int
    """Position of the last operation of its stream when it was recorded; -1 for none."""


class Emulated(GPU):
    """See the module. `seed` decides the orders in which recordings run."""

    def __init__(self, toolchain: Toolchain | None = None, seed: int = 0) -> None:
        self.torch, self.toolchain = torch.device("cpu"), toolchain or HostKernels()
        self.name = "emulated"
        self.draw = random.Random(seed)
        self.current = 0
        self.streams = itertools.count(1)
        self.tape: list[Operation] | None = None
        self.kept: list[torch.Tensor] = []
        """Memory of the recording that is being made, to which launches have addresses only."""
        self.pending: dict[int, list[int]] = {}
        self.launches = self.replays = 0
        self.model = device_model("h100")
        self.flags: Hashable = None
        self.refuses = ""
        """What a recording fails with, if it should."""

    # ---- work ---------------------------------------------------------------------------------------------------
    def kernel(self, address: int, pointers: ctypes.Array[Any], integers: ctypes.Array[Any]) -> None:
        held = type(pointers).from_buffer_copy(pointers)  # a launch copies its arguments

        def run() -> None:
            status = LAUNCH(address)(ctypes.addressof(held), ctypes.addressof(integers), None)
            assert status == 0

        self.issue(run)

    def call(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        if self.tape is None:
            self.launches += 1
            return function(*arguments, **keywords)
        result = self._results(function, arguments, keywords)

        def run() -> None:
            found = function(*arguments, **keywords)
            for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(found), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.issue(run)
        return result

    def _results(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """What a call will return: memory of the right layout, or an argument that it returns."""
        given = [t for t in pytree.tree_leaves((arguments, keywords)) if isinstance(t, torch.Tensor)]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            known = {id(t): mode.from_tensor(t) for t in given}
            fake = pytree.tree_map(lambda x: known.get(id(x), x), (list(arguments), dict(keywords)))
            result = function(*fake[0], **fake[1])
        real = {id(f): t for t in given for f in (known[id(t)],)}
        return pytree.tree_map(
            lambda x: (
                real[id(x)]
                if id(x) in real
                else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
                if isinstance(x, torch.Tensor)
                else x
            ),
            result,
        )

    def issue(self, run: Callable[[], None]) -> None:
        if self.tape is None:
            self.launches += 1
            run()
            return
        self.tape.append(Operation(run, self.current, self.pending.pop(self.current, [])))

    def empty(self, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        result = super().empty(dtype, sizes, strides)
        if self.tape is not None:
            self.kept.append(result)
        return result

    # ---- streams ------------------------------------------------------------------------------------------------
    def stream(self) -> Hashable:
        return self.current

    def new_stream(self) -> Hashable:
        return next(self.streams)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def event(self, timed: bool = False) -> Any:
        positions = [i for i, op in enumerate(self.tape or ()) if op.stream == self.current]
        return Event(max([*positions, *self.pending.get(self.current, ())], default=-1))

    def wait(self, event: Any) -> None:
        if self.tape is not None and event.after >= 0:
            self.pending.setdefault(self.current, []).append(event.after)

    def seconds(self, start: Any, end: Any) -> float:
        return 1e-6

    def keeps(self, tensor: torch.Tensor, stream: Hashable) -> None:
        pass

    def decide(self, tensor: torch.Tensor) -> bool:
        assert self.tape is None, "nothing was computed yet"
        return bool(tensor)

    # ---- recordings ---------------------------------------------------------------------------------------------
    def new_pool(self) -> Any:
        return object()

    def record(self, issue: Callable[[], None], pool: Any) -> Callable[[], None]:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.tape, self.pending, self.kept = [], {}, []
        try:
            issue()
            tape, kept = self.tape, self.kept
        finally:
            self.tape = None
        return lambda: self._replay(tape, kept)

    def _replay(self, tape: list[Operation], kept: list[torch.Tensor]) -> None:
        """Run in an order in which streams and events allow it. `kept` is what it runs on."""
        self.replays += 1
        last: dict[int, int] = {}
        needs: list[set[int]] = []
        for index, op in enumerate(tape):
            needs.append({*op.waits, *([last[op.stream]] if op.stream in last else [])})
            last[op.stream] = index
        with torch.no_grad():
            remaining = dict(enumerate(needs))
            while remaining:
                ready = [i for i, before in remaining.items() if not before & remaining.keys()]
                chosen = self.draw.choice(ready)
                del remaining[chosen]
                tape[chosen].run()

    # ---- what it is ---------------------------------------------------------------------------------------------
    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def settings(self) -> Hashable:
        return self.flags


@contextlib.contextmanager
def emulated(device: Emulated | None = None) -> Iterator[Emulated]:
    """Within it, tensors on the CPU count as lying on an emulated GPU."""
    chosen = device or Emulated()
    with device_override(lambda given: chosen if given.type == "cpu" else None):
        yield chosen
