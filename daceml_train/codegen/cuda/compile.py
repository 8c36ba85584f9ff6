"""Compile: the kernels of a program as one CUDA file, by nvcc called directly, into the cache folder.

A library is named by its kernels, the architecture, and compiler with flags; it is written under another name, sealed
and renamed, as the CPU's are. It contains the CUDA runtime (static if the toolkit has it) and no code of the package.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from daceml_train.codegen.compiler import failure, run
from daceml_train.codegen.cpu.compile import install, intact
from daceml_train.codegen.cpu.compile import load as load_entry
from daceml_train.codegen.cuda.launch import CudaCode
from daceml_train.errors import CompilerError
from daceml_train.storage.folders import locked, to_write, usable
from daceml_train.storage.turns import build_once

HEADERS = Path(__file__).parent / "native"
FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-diag-suppress=177,186", "-Xcompiler=-fvisibility=hidden,-w")
"""Arithmetic is IEEE's: no approximate functions, no flush to zero; products and sums may contract."""
DEFAULT_ARCHITECTURE = "sm_90"
ADVICE = (
    "install NVIDIA's CUDA toolkit and put its nvcc on PATH or its folder into CUDA_HOME, or install it with "
    "`pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl`"
)


def _candidates(tool: str = "nvcc") -> Iterator[Path]:
    if given := os.environ.get(tool.upper()):
        yield Path(given)
    if found := shutil.which(tool):
        yield Path(found)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(variable):
            yield Path(folder) / "bin" / tool
    yield Path("/usr/local/cuda/bin") / tool
    package = importlib.util.find_spec("nvidia")
    for place in (package.submodule_search_locations or ()) if package else ():
        yield from sorted(Path(place).glob(f"cu*/bin/{tool}"), reverse=True)  # cu13/, cuda_nvcc/


def find_tool(tool: str) -> Path | None:
    """A program of the CUDA toolkit, searched in the same places as nvcc."""
    return next((path for path in _candidates(tool) if path.is_file() and os.access(path, os.X_OK)), None)


def find_nvcc(newest: int | None = None) -> Path:
    """The compiler: from $NVCC, PATH, $CUDA_HOME or $CUDA_PATH, /usr/local/cuda, or the packages from PyPI.

    The first whose major version is at most `newest`, if given: libraries contain the runtime of the toolkit that built
    them, which needs a driver of at least that major version. Raises `CompilerError` with a hint what to install.
    """
    newer: list[str] = []
    for path in _candidates("nvcc"):
        if not (path.is_file() and os.access(path, os.X_OK)):
            continue
        major = nvcc_version(path)[0] if newest else 0
        if not newest or major <= newest:
            return path
        newer.append(f"{path} is of CUDA {major}")
        if str(path) == os.environ.get("NVCC"):
            break
    if newer:
        raise CompilerError(
            f"PyTorch and its driver run programs up to CUDA {newest}, and {', '.join(dict.fromkeys(newer))}; install "
            f"NVIDIA's CUDA toolkit {newest} and name its nvcc in NVCC"
        )
    raise CompilerError(f"no nvcc was found, which compiles the kernels for the GPU; {ADVICE}")


@functools.cache
def nvcc_version(nvcc: Path) -> tuple[int, int]:
    """Major and minor version; zeros if the compiler does not say."""
    messages = re.search(r"release (\d+)\.(\d+)", _version_text(nvcc))
    return (int(messages[1]), int(messages[2])) if messages else (0, 0)


@functools.cache
def target(nvcc: Path, arch: str) -> str:
    """The architecture that nvcc compiles for: `arch`, or for a device newer than nvcc the PTX of its newest one.

    The driver compiles PTX for the device when the library is loaded.
    """
    asked = run([str(nvcc), "--list-gpu-code"]).stdout.split()
    known = sorted((int(m[1]), name) for name in asked if (m := re.fullmatch(r"sm_(\d+)", name)))
    if not known or arch in asked:
        return arch
    number = int(re.sub(r"\D", "", arch))
    older = [name for n, name in known if n < number]
    if not older:
        raise CompilerError(f"{nvcc} compiles for {known[0][1]} and newer, the device is {arch}; {ADVICE}")
    return older[-1].replace("sm_", "compute_")


@functools.cache
def _version_text(nvcc: Path) -> str:
    try:
        asked = run([str(nvcc), "--version"])
    except OSError as error:
        raise CompilerError(f"{nvcc} cannot be started ({error}); {ADVICE}") from None
    if asked.returncode != 0:
        raise CompilerError(f"{nvcc} --version failed (exit {asked.returncode}); {ADVICE}")
    return asked.stdout


@functools.cache
def _toolchain(nvcc: Path) -> str:
    """A hash of nvcc's version and the flags."""
    return hashlib.sha256("\n".join([_version_text(nvcc), *FLAGS]).encode()).hexdigest()[:12]


def architecture(major: int, minor: int) -> str:
    """The architecture of a device under nvcc's name, from its compute capability."""
    return f"sm_{major}{minor}"


def text(codes: Sequence[CudaCode]) -> str:
    """One CUDA file with every kernel once."""
    distinct = {code.key: code for code in codes}
    return "\n".join(['#include "kernel.cuh"\n', *(distinct[key].source for key in sorted(distinct))])


def library_path(codes: Sequence[CudaCode], folder: Path, arch: str, nvcc: Path) -> Path:
    """The path of the library of a program's kernels."""
    keys = hashlib.sha256("\n".join(sorted({code.key for code in codes})).encode()).hexdigest()[:20]
    return folder / f"cuda_{keys}-{arch}-{_toolchain(nvcc)}.so"


def compiled(
    codes: Sequence[CudaCode], folder: Path, arch: str = DEFAULT_ARCHITECTURE, nvcc: Path | None = None
) -> bool:
    """Whether the folder has the library of a program's kernels."""
    return intact(library_path(codes, usable(folder), arch, nvcc or find_nvcc()))


def compile_program(
    codes: Sequence[CudaCode], folder: Path, arch: str = DEFAULT_ARCHITECTURE, nvcc: Path | None = None
) -> Path:
    """The library of a program's kernels, compiled unless the folder contains it.

    Raises `CompilerError` with nvcc's last lines, or with what to install.
    """
    nvcc = nvcc or find_nvcc()
    path = library_path(codes, usable(folder), arch, nvcc)
    if intact(path):
        return path
    path = to_write(folder) / path.name
    build_once(path, lambda: intact(path) or None, lambda: _build(codes, path, arch, nvcc))
    return path


def _build(codes: Sequence[CudaCode], path: Path, arch: str, nvcc: Path) -> bool:
    try:
        with locked(path.parent) as place:
            source, library = place / "kernels.cu", place / "kernels.so"
            source.write_text(text(codes))
            options = ["-shared", "-Xcompiler=-fPIC", f"-split-compile={os.cpu_count() or 1}", *_runtime(nvcc)]
            run_nvcc(nvcc, [*options, str(source), "-o", str(library)], arch)
            install(library, path)
            return True
    except OSError as error:
        raise CompilerError(f"{path} cannot be written: {error}") from None


def run_nvcc(nvcc: Path, options: Sequence[str], arch: str = DEFAULT_ARCHITECTURE) -> str:
    """Call nvcc with the package's flags; returns its output. Raises `CompilerError` with its last lines."""
    command = [str(nvcc), *FLAGS, f"-arch={target(nvcc, arch)}", f"-I{HEADERS}", *options]
    try:
        result = run(command)
    except OSError as error:
        raise CompilerError(f"{nvcc} cannot be started ({error.strerror}); {ADVICE}") from None
    if result.returncode != 0:
        raise failure(result, "nvcc")
    return result.stdout + result.stderr


@functools.cache
def _runtime(nvcc: Path) -> tuple[str, ...]:
    """How to link the CUDA runtime: static as nvcc does it, else the shared one that packages from PyPI bring."""
    message = run([str(nvcc), "-dryrun", "-x", "cu", os.devnull]).stderr
    top = [line.split("TOP=", 1)[1].strip() for line in message.splitlines() if "TOP=" in line]
    root = Path(top[0]).resolve() if top else nvcc.resolve().parent.parent
    places = [place for place in (root / "lib64", root / "lib", *root.glob("targets/*/lib")) if place.is_dir()]
    for place in places:
        if (place / "libcudart_static.a").exists():
            return "-cudart=static", f"-L{place}"
    around = [*places, *root.parent.glob("*/lib")]
    shared = next((found for place in around for found in sorted(place.glob("libcudart.so*"))), None)
    if shared is None:
        return ()
    return "-cudart=none", f"-Xlinker={shared}", f"-Xlinker=-rpath={shared.parent}"


def load(path: Path, key: str) -> int:
    """The address of `launch_<key>`. The library stays loaded for the life of the process."""
    return load_entry(path, key, "launch")
