"""Compile: C++ texts to shared libraries in a cache folder, several at a time, each exactly once.

A library is written under a temporary name and renamed, so readers never see a partial file. Processes that need the
same kernel share the work: one compiles it, the others compile what is left, and wait. Its name contains the kernel's
key and a hash of compiler, flags and processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from daceml_train import processor
from daceml_train.codegen.compiler import compiler_command, failure, run
from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.errors import CompilerError
from daceml_train.storage.files import sealed, unsealed
from daceml_train.storage.folders import locked, to_write, usable
from daceml_train.storage.interruption import workers
from daceml_train.storage.remote import fetch, store
from daceml_train.storage.turns import Turn, build_once, turn

FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-w",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-freciprocal-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-fno-thread-jumps",
    "-fvisibility=hidden",
    *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []),
)
"""The compiler flags. None of them assumes that numbers are finite, and none changes the mode of the processor.

Signs of zeros are kept: otherwise gcc turns `x * (condition ? 1 : 0)` into a select, which is 0 where x is NaN.

Nothing unwinds through a kernel; tables for that take 7 % of the compiler's time. Jumps that follow from earlier ones
are not threaded: that makes masks of chained selections, and a clamp takes 8 vector operations instead of 4.

By default gcc uses vectors of half the width on Intel processors, to avoid a lower clock rate for other programs.
"""
HEADERS = Path(__file__).parents[1] / "library" / "native"


@functools.cache
def _machine() -> str:
    """A hash of the flags and of the processor's properties that `-march=native` uses."""
    return hashlib.sha256("\n".join([*FLAGS, processor.properties()]).encode()).hexdigest()[:12]


@functools.cache
def _toolchain(command: tuple[str, ...]) -> str:
    """A hash of the compiler and its version. Raises `CompilerError` if it cannot be run."""
    try:
        asked = run([*command, "--version"])
    except OSError as error:
        raise CompilerError(
            f"the C++ compiler {command[0]!r} cannot be started ({error.strerror}); install g++ or set CXX"
        ) from None
    if asked.returncode != 0:
        raise CompilerError(f"{' '.join(command)} --version failed: {asked.stderr.strip()}")
    return hashlib.sha256("\n".join([*command, asked.stdout]).encode()).hexdigest()[:12]


def compiler_version() -> str:
    """A hash of the compiler and its version; empty where it cannot be run."""
    try:
        return _toolchain(tuple(compiler_command()))
    except CompilerError:
        return ""


def library_path(key: str, folder: Path, compiler: str | None = None) -> Path:
    """The path of a kernel's library.

    Without a working compiler, the newest library that any compiler produced for this processor; `CompilerError` if
    there is none.
    """
    stem = f"kernel_{key}-{_machine()}"
    try:
        return folder / f"{stem}-{_toolchain(tuple(compiler_command(compiler)))}.so"
    except CompilerError:
        results = [path for path in folder.glob(f"{stem}-*.so") if intact(path)]
        if not results:
            raise
        return max(results, key=lambda path: path.stat().st_mtime)


def compile_kernels(
    codes: Sequence[KernelCode],
    folder: Path,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    compiler: str | None = None,
) -> dict[str, Path]:
    """Key -> library. Only missing libraries are compiled; `progress(done, total)` counts those.

    Raises `CompilerError` with the compiler's last lines; libraries that succeeded remain in the folder. Running
    compilations finish then, and no others start; Ctrl-C, and whatever else interrupts this function, ends them.
    """
    distinct = {code.key: code for code in codes}
    folder = usable(folder)
    paths = {key: library_path(key, folder, compiler) for key in distinct}
    missing = [code for key, code in distinct.items() if not intact(paths[key])]
    if not missing:
        return paths
    target = to_write(folder)
    paths |= {code.key: target / paths[code.key].name for code in missing}
    done = 0
    with workers(jobs) as pool:
        there = list(pool.map(lambda code: fetch(paths[code.key]) and intact(paths[code.key]), missing))
        missing = [code for code, fetched in zip(missing, there, strict=True) if not fetched]  # no text is generated
        futures, waiting = [], []
        for code in missing:  # texts are generated here sequentially, while the compiler processes the previous ones
            futures.append(pool.submit(_build_unless_busy, code.source, paths[code.key], compiler))
        for code, future in zip(missing, futures, strict=True):
            if not future.result():  # another process is at it: wait once nothing else is left to do
                waiting.append(pool.submit(_wait_or_build, code.source, paths[code.key], compiler))
                continue
            done += 1
            if progress is not None:
                progress(done, len(missing))
        for future in waiting:
            future.result()
            done += 1
            if progress is not None:
                progress(done, len(missing))
    return paths


def _build_unless_busy(source: str, path: Path, compiler: str | None) -> bool:
    """Compile a text unless another process is compiling it; whether the library is there."""
    with turn(path, wait=False) as state:
        if state is not Turn.BUSY and not intact(path):
            build(source, path, compiler)
            store(path)
        return state is not Turn.BUSY


def _wait_or_build(source: str, path: Path, compiler: str | None) -> bool:
    def made() -> bool:
        build(source, path, compiler)
        return True

    return build_once(path, lambda: intact(path) or None, made)


def build(source: str, path: Path, compiler: str | None = None) -> None:
    """Compile one text to the library `path`, atomically."""
    try:
        with locked(path.parent) as folder:
            text, library = folder / "kernel.cpp", folder / "kernel.so"
            text.write_text(source)
            _run([*compiler_command(compiler), *FLAGS, f"-I{HEADERS}", str(text), "-o", str(library)], path.stem)
            install(library, path)
    except OSError as error:
        raise CompilerError(f"{path} cannot be written: {error}") from None


def _run(command: list[str], stem: str) -> None:
    try:
        result = run(command)
    except OSError as error:
        raise CompilerError(f"the C++ compiler {command[0]!r} cannot be started ({error.strerror})") from None
    if result.returncode != 0 or not Path(command[-1]).exists():
        raise failure(result, f"{command[0]} on {stem}")


def install(library: Path, path: Path) -> None:
    """Seal a complete library under its final name, and move it there."""
    content = library.read_bytes()
    library.write_bytes(sealed(content, path.name))
    library.chmod(0o700)
    os.replace(library, path)


def intact(path: Path) -> bool:
    """Whether a library exists, is undamaged, belongs to this kernel, and was written by a trusted user."""
    return unsealed(path) is not None


def load(path: Path, key: str, entry: str = "kernel") -> int:
    """The address of the kernel's entry point. The library stays loaded for the life of the process."""
    try:
        library = ctypes.CDLL(str(path))
        address = ctypes.cast(getattr(library, f"{entry}_{key}"), ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        raise CompilerError(f"{path} is not a library of kernel {key}: {error}") from None
    assert address is not None
    return address
