"""Run CUDA kernels in the emulator, and compare them with their NumPy meaning."""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from daceml_train.codegen.cuda.compile import HEADERS, text
from daceml_train.codegen.cuda.launch import CudaCode, CudaPart, generate
from daceml_train.storage.folders import cache_folder
from tests.codegen.running import Case, layout, number

EMULATOR = Path(__file__).parent / "native"
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def emulated(codes: Sequence[CudaCode], barriers: bool = True) -> ctypes.CDLL:
    """The library of kernels as programs of the CPU, from the cache."""
    content = text(codes) if barriers else f"#define WITHOUT_BARRIERS\n{text(codes)}"
    version = [content, *(p.read_text() for p in sorted([*HEADERS.glob("*.cuh"), *EMULATOR.glob("*.h")]))]
    path = cache_folder() / "emulated" / f"{hashlib.sha256(chr(0).join(version).encode()).hexdigest()[:24]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        result = path.with_suffix(f".{os.getpid()}")
        source = result.with_suffix(f".{os.getpid()}.cpp")
        source.write_text(content)
        command = ["g++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", "-DVM_EMULATOR", "-fvisibility=hidden"]
        run = subprocess.run(
            [*command, f"-I{HEADERS}", f"-I{EMULATOR}", str(source), "-o", str(result)], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr[:4000]
        result.rename(path)
        source.unlink()
    return ctypes.CDLL(str(path))


def code_of(case: Case) -> CudaCode:
    return generate(case.kernel, [*map(layout, case.inputs)], [*map(layout, case.outputs)])


def run(
    case: Case,
    code: CudaCode,
    library: ctypes.CDLL,
    blocks: int = 0,
    symbols: dict[str, int] | None = None,
    parts: Sequence[CudaPart] = (),
) -> None:
    """One launch, or some of its parts. Scratch holds rubbish before."""
    known = {"blocks": 1, **(symbols or {})}
    known["blocks"] = blocks or min(6, code.blocks(lambda size: number(size, **known), 2))
    integers = (ctypes.c_int64 * len(code.integers))(*(number(i, **known) for i in code.integers))
    scratch = [torch.full((number(s, **known) + 64,), 255, dtype=torch.uint8) for s in code.scratch]
    updated = {i for i, _ in case.kernel.updates}
    memory = [*case.inputs, *(x for i, x in enumerate(case.outputs) if i not in updated), *scratch]
    for part in parts or (code,):
        touched = part.positions if isinstance(part, CudaPart) else range(len(memory))
        pointers = (ctypes.c_void_p * max(1, len(touched)))(*(memory[p].data_ptr() for p in touched))
        launch = FUNCTION(ctypes.cast(getattr(library, f"launch_{part.key}"), ctypes.c_void_p).value)
        assert launch(pointers, integers, None) == 0, f"{case.name}: threads wait for one another"
    for x in scratch:
        assert (x[-64:] == 255).all(), f"{case.name} writes beyond its scratch"


def check(cases: Sequence[Case], blocks: int = 0, apart: bool = False) -> None:
    """Run all cases, and report every one that is wrong. `apart`: the parts of a kernel that has them, one by one."""
    codes = [code_of(c) for c in cases]
    library = emulated(codes)
    wrong: list[str] = []
    for case, code in zip(cases, codes, strict=True):
        run(case, code, library, blocks, parts=code.parts if apart else ())
        error = case.worst()
        if not error <= case.tolerance:
            wrong.append(f"{case.name}: {error:.3g} with {code.plan.geometry} {code.plan.loops.mode}")
    assert not wrong, "\n".join(wrong)
