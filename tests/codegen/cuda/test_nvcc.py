"""What nvcc makes of the kernels: it takes them all, spills nothing, and reads and writes 16 bytes at a time.

No GPU is needed, only the compiler; without it these tests are skipped. Machine code is read where nvdisasm is there,
which the package nvidia-cuda-nvdisasm brings.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import daceml_train as dt
from benchmarks.gpu_code import FRAGMENT, machine_code, resources
from daceml_train.codegen.cuda import compile as compiling
from daceml_train.codegen.cuda.compile import compile_program, find_nvcc, find_tool, run_nvcc, text
from daceml_train.codegen.cuda.launch import CudaCode, whole_of
from daceml_train.errors import CompilerError
from daceml_train.runtime.gpu import toolchain
from tests.codegen import groups
from tests.codegen.cuda.running import code_of
from tests.codegen.test_families import case
from tests.driver.networks import PROBLEMS
from tests.runtime.emulation import Emulated, EmulatedCuda, emulated

pytestmark = pytest.mark.compiled

try:
    NVCC = find_nvcc()
except CompilerError as reason:
    NVCC = None
    needs_nvcc = pytest.mark.skip(reason=reason.message)
else:
    needs_nvcc = pytest.mark.skipif(False, reason="")
NVDISASM = find_tool("nvdisasm")
needs_nvdisasm = pytest.mark.skipif(
    NVCC is None or NVDISASM is None, reason="no nvcc or no nvdisasm: pip install nvidia-cuda-nvdisasm"
)


def compiled(codes: Sequence[CudaCode], folder: Path) -> tuple[str, str]:
    """What ptxas says, and the assembly that went into it. Its machine code lies in `kernels.cubin`."""
    source = folder / "kernels.cu"
    source.write_text(text(codes))
    options = ["-cubin", "-Xptxas=-v", "--keep", f"--keep-dir={folder}", str(source)]
    return run_nvcc(NVCC, [*options, "-o", str(folder / "kernels.cubin")]), (folder / "kernels.ptx").read_text()


def spills(message: str) -> dict[str, int]:
    """Kernel over rows -> bytes that do not fit into registers, where fragments are read 16 bytes at a time.

    Less than a fragment is none: ptxas 13 stores an index once, and loads it once, so that another block fits.
    """
    spilled = {name: size for name, (_, size) in resources(message).items() if "ILb1E" in name}
    return {name: size if size >= FRAGMENT else 0 for name, size in spilled.items()}


def memory_bound(dtype: torch.dtype) -> dict[str, CudaCode]:
    """The families whose time is that of their bytes, at the sizes of a transformer and a residual network."""
    r = torch.randn
    x, g, weight = r(64, 1024).to(dtype), r(64, 1024).to(dtype), r(1024).to(dtype)
    one = r(64, 1).to(dtype)
    image = r(4, 64, 6, 6).to(dtype).contiguous(memory_format=torch.channels_last)
    c = [r(64).to(dtype) for _ in range(3)]
    out = [torch.empty_like(image), *(torch.empty(64, dtype=dtype) for _ in range(3))]
    cases = [
        case("bias_gelu", groups.bias_gelu, x, weight),
        case("bias_gelu_backward", groups.bias_gelu_backward, g, x, weight),
        case("layer_norm", groups.layer_norm, x, weight, weight),
        case("layer_norm_backward", groups.layer_norm_backward, g, x, weight, one, one),
        case("softmax", groups.softmax, x),
        case("softmax_backward", groups.softmax_backward, g, x),
        case("batch_norm", groups.batch_norm(1), image, *c, outputs=out),
        case("cross_entropy", groups.cross_entropy, x, torch.randint(0, 1024, (64,))),
        case("adam", groups.adam, x, g, g, g, torch.tensor(3.0, dtype=dtype)),
    ]
    return {c.name: code_of(c) for c in cases}


@needs_nvcc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_bound_kernels(dtype, tmp_path):
    """No spills; all that is large is moved by 16-byte instructions, of which each kernel needs some."""
    codes = memory_bound(dtype)
    message, assembly = compiled([*codes.values()], tmp_path)
    assert spills(message) and not {k: b for k, b in spills(message).items() if b}
    functions = {m[1]: m[2] for m in re.finditer(r"\.entry (\w+)\((.*?)\n}", assembly, re.DOTALL)}
    for name, code in codes.items():
        wide = [body for f, body in functions.items() if code.key in f and "ILb1E" in f]
        assert wide, name
        loads, stores = (sum(len(re.findall(p, body)) for body in wide) for p in WIDE)
        assert loads and stores, f"{name}: {loads} wide loads, {stores} wide stores"
        narrow = sum(len(re.findall(r"st\.global\.(?:f32|b16|u16|u32)", body)) for body in wide)
        assert narrow <= 4 * len(wide), f"{name} stores element by element: {narrow}"  # values of a row, and totals


@needs_nvdisasm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_machine_code_of_memory_bound_kernels(dtype, tmp_path):
    """What is executed: 16 bytes per instruction, narrow ones for values of a row only, and no register goes to memory."""
    codes = memory_bound(dtype)
    compiled([*codes.values()], tmp_path)
    functions = machine_code(tmp_path / "kernels.cubin")
    for name, code in codes.items():
        wide = [body for f, body in functions.items() if code.key in f and "ILb1E" in f]
        assert wide, name
        for body in wide:
            assert not [i for i in body if re.match(r"(LDL|STL)\b", i)], f"{name} spills"
        loads, stores = (
            [len([i for i in body if re.match(rf"{kind}[.A-Z0-9]*\.128\b", i)]) for body in wide]
            for kind in ("LDG", "STG")
        )
        assert sum(loads) and sum(stores), f"{name}: {loads} and {stores} instructions of 16 bytes"
        narrow = [i for body in wide for i in body if i.startswith("STG") and ".128" not in i]
        assert len(narrow) <= 4 * len(wide), f"{name} stores element by element: {narrow[:5]}"


@needs_nvdisasm
def test_spills_and_narrow_accesses_would_be_seen(tmp_path):
    """The reader of machine code against code that spills, and that moves 4 bytes at a time."""
    source = tmp_path / "kernels.cu"
    values = " ".join(f"float v{i} = x[{32 * i} + threadIdx.x];" for i in range(64))
    summed = " ".join(f"x[{32 * i} + threadIdx.x] = v{i} * v{63 - i};" for i in range(64))
    source.write_text(f'extern "C" __global__ void spilling(float* x) {{ {values} __syncthreads(); {summed} }}')
    run_nvcc(NVCC, ["-cubin", "-maxrregcount=24", str(source), "-o", str(tmp_path / "kernels.cubin")])
    (body,) = machine_code(tmp_path / "kernels.cubin").values()
    assert any(i.startswith("STL") for i in body) and any(i.startswith("LDL") for i in body)
    assert not any(".128" in i for i in body if i.startswith(("LDG", "STG")))


WIDE = (r"ld\.global(?:\.nc)?\.v4", r"st\.global\.v4")


FEW = ("mlp", "pre_ln", "lstm")


class Collected(BaseException):
    """Ends compilation once the kernels are known."""


class Collecting(EmulatedCuda):
    """Takes the kernels of a program instead of compiling them."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: list[CudaCode] = []

    def addresses(self, codes, folder, jobs, progress):
        self.codes += [*{code.key: code for code in map(whole_of, codes)}.values()]
        raise Collected


@needs_nvcc
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.wide) for n in PROBLEMS])
def test_training_steps_of_networks(name, tmp_path):
    """Forward, loss, backward and update: nvcc takes every kernel, and none spills."""
    model, (x, *targets) = PROBLEMS[name].build()
    model = copy.deepcopy(model)
    toolchain = Collecting()
    with emulated(Emulated(toolchain)):
        step = dt.training_step(model, PROBLEMS[name].loss, torch.optim.AdamW(model.parameters(), lr=1e-3))
        with pytest.raises(Collected):
            step(x, *targets)
    assert len(toolchain.codes) >= 3
    message, _ = compiled(toolchain.codes, tmp_path)
    assert spills(message) and not {k: b for k, b in spills(message).items() if b}


@needs_nvcc
def test_the_library_is_made_once(tmp_path, monkeypatch):
    code = code_of(case("gelu", groups.bias_gelu, torch.randn(4, 64), torch.randn(64)))
    path = compile_program([code, code], tmp_path)
    monkeypatch.setattr(compiling, "run_nvcc", lambda *_: pytest.fail("compiled again"))
    assert compile_program([code], tmp_path) == path and [*tmp_path.iterdir()] == [path]
    assert f"launch_{code.key}".encode() in path.read_bytes()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(pytest.fail.Exception):
        compile_program([code], tmp_path)


@needs_nvcc
def test_many_kernels_are_several_files(tmp_path, monkeypatch):
    """Compiled at the same time; variants of a kernel that differ in the number of blocks alone are one text."""
    monkeypatch.setattr(toolchain, "TOGETHER", 1)
    tools, messages = toolchain.CudaToolchain((9, 0), 132), []
    first = code_of(case("gelu", groups.bias_gelu, torch.randn(512, 64), torch.randn(64)))
    others = tools.variants(first)
    assert others[0] is first and others[0].key == others[1].key and others[0].rows != others[1].rows
    codes = [first, others[1], code_of(case("softmax", groups.softmax, torch.randn(4, 64)))]
    results = tools.addresses(codes, tmp_path, 2, lambda done, count: messages.append((done, count)))
    assert len(results) == len({path for _, path in results.values()}) == len([*tmp_path.iterdir()]) == 2
    assert all(address for address, _ in results.values()) and messages == [(0, 2), (1, 2), (2, 2)]
    monkeypatch.setattr(compiling, "run_nvcc", lambda *_: pytest.fail("compiled again"))
    assert tools.addresses(codes, tmp_path, 2, None) == results


def test_a_missing_nvcc_is_named(monkeypatch):
    monkeypatch.setattr(compiling, "_candidates", lambda tool: iter([Path("/no/such/nvcc")]))
    with pytest.raises(
        CompilerError, match=r"no nvcc was found.*CUDA toolkit.*CUDA_HOME.*pip install nvidia-cuda-nvcc"
    ):
        find_nvcc()


def test_nvcc_is_found_in_its_places(monkeypatch, tmp_path):
    for place in ("toolkit/bin", "site/nvidia/cu13/bin"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "nvcc").write_text("#!/bin/sh\n")
        (tmp_path / place / "nvcc").chmod(0o755)
    for variable in ("NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert find_nvcc() == tmp_path / "toolkit/bin/nvcc"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site/nvidia/__init__.py").write_text("")
    compiling.importlib.invalidate_caches()
    assert tmp_path / "site/nvidia/cu13/bin/nvcc" in [*compiling._candidates()]
