"""Run kernels as nvcc compiled them: its host code launches, its PTX is interpreted."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from daceml_train.codegen.cuda.compile import FLAGS, HEADERS, find_nvcc, text
from daceml_train.codegen.cuda.launch import CudaCode
from daceml_train.storage.folders import cache_folder
from tests.codegen.cuda.ptx.machine import Machine
from tests.codegen.cuda.ptx.memory import FILLER, GAP, Arena, Fault
from tests.codegen.cuda.ptx.program import Entry, entries
from tests.codegen.cuda.running import code_of
from tests.codegen.running import Case, number

SHIM = Path(__file__).parent / "shim.cpp"
ARCHITECTURE = "compute_80"
LAUNCHED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
)
Change = Callable[[str], str]


@dataclass
class Library:
    """Compiled kernels, and what was found since `findings` was cleared."""

    path: Path
    entries: dict[str, Entry]
    arena: Arena | None = None
    findings: list[str] = field(default_factory=list)
    launches: int = 0

    def __post_init__(self) -> None:
        self.host = ctypes.CDLL(str(self.path))
        self._callback = LAUNCHED(self._launch)
        self.host.on_launch(self._callback)

    def _launch(self, name: bytes, blocks: int, threads: int, arguments: ctypes.Array[ctypes.c_void_p]) -> int:
        entry = self.entries[name.decode()]
        values = [
            np.frombuffer(ctypes.string_at(arguments[i], dtype.itemsize), dtype)[0]
            for i, (_, dtype) in enumerate(entry.parameters)
        ]
        assert self.arena is not None
        self.launches += 1
        try:
            self.findings += Machine(entry, self.arena, blocks, threads, values).run()
        except Fault as fault:
            self.findings.append(str(fault))
            return 77
        return 0


def library(codes: Sequence[CudaCode], change: Change | None = None) -> Library:
    """Kernels compiled by nvcc; `change` edits the header that they include."""
    source, header = text(codes), (HEADERS / "kernel.cuh").read_text()
    if change is not None:
        changed = change(header)
        assert changed != header, "the header no longer has what is to be changed"
        header = changed
    contents = [source, header, SHIM.read_text(), *(p.read_text() for p in sorted(HEADERS.glob("math.cuh")))]
    key = hashlib.sha256("\0".join(contents).encode()).hexdigest()[:24]
    folder = cache_folder() / "ptx" / key
    if not (folder / "kernels.so").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.cuh").write_text(header)
        (folder / "kernels.cu").write_text(source)
        _compile(folder)
    return Library(folder / "kernels.so", entries((folder / "kernels.ptx").read_text()))


def _compile(folder: Path) -> None:
    nvcc = [str(find_nvcc()), *FLAGS, f"-I{folder}", f"-I{HEADERS}", str(folder / "kernels.cu")]
    shared = ["-shared", "-cudart=none", "-Xcompiler=-fPIC", "-gencode", f"arch={ARCHITECTURE},code={ARCHITECTURE}"]
    result = folder / "made.so"
    for command in (
        ["g++", "-O1", "-fPIC", "-c", str(SHIM), "-o", str(folder / "shim.o")],
        [*nvcc, f"-arch={ARCHITECTURE}", "-ptx", "-o", str(folder / "kernels.ptx")],
        [*nvcc, *shared, str(folder / "shim.o"), "-o", str(result)],
    ):
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[:4000]
    result.rename(folder / "kernels.so")


def run(case: Case, code: CudaCode, compiled: Library, shift: int = 0) -> list[str]:
    """One launch of a case, whose results it receives; what was found. `shift` elements misalign all arrays."""
    known = {"blocks": 1}
    known["blocks"] = min(5, code.blocks(lambda size: number(size, **known), 2))
    integers = (ctypes.c_int64 * len(code.integers))(*(number(i, **known) for i in code.integers))
    updated = {i for i, _ in case.kernel.updates}
    arrays = [*case.inputs, *(x for i, x in enumerate(case.outputs) if i not in updated)]
    scratch = [np.full(number(s, **known), FILLER, np.uint8) for s in code.scratch]
    contents = [memory_of(x) for x in arrays]
    arena = Arena(sum(len(x) + 512 + GAP for x in [*contents, *scratch]) + 4096)
    compiled.arena, compiled.findings = arena, []
    places = [arena.allocate(m, shift * x.element_size()) for m, x in zip(contents, arrays, strict=True)]
    places += [arena.allocate(s) for s in scratch]
    pointers = (ctypes.c_void_p * max(1, len(places)))(*places)
    function = getattr(compiled.host, f"launch_{code.key}")
    error = function(pointers, integers, None)
    for content, place in zip(contents, places[: len(contents)], strict=True):
        content[:] = arena.content(place, len(content))
    return [*compiled.findings, *([f"error {error}"] if error else [])]


def memory_of(x: torch.Tensor) -> np.ndarray:
    """The bytes from an array's first to its last element, which are its memory."""
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    size = reach * x.element_size()
    return np.frombuffer((ctypes.c_char * size).from_address(x.data_ptr()), np.uint8) if size else np.zeros(0, np.uint8)


def check(cases: Sequence[Case], shift: int = 0) -> None:
    """Run all cases, and report every one that is wrong or suspicious."""
    codes = [code_of(c) for c in cases]
    compiled, wrong = library(codes), []
    for case, code in zip(cases, codes, strict=True):
        findings = run(case, code, compiled, shift)
        if findings or not (error := case.worst()) <= case.tolerance:
            wrong.append(f"{case.name}: {'; '.join(findings) or f'{error:.3g}'} ({code.plan.loops.mode})")
    assert compiled.launches >= len(cases) and not wrong, "\n".join(wrong)


def found(case: Case, change: Change | None = None, shift: int = 0) -> list[str]:
    """What is found in a case's kernels with a changed header."""
    code = code_of(case)
    return run(case, code, library([code], change), shift)
