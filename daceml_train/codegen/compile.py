"""Compile: C++ texts to shared libraries in a cache folder, several at a time, each exactly once.

A library is written under a temporary name and renamed: readers never see half of it, and processes that compile the
same kernel do not disturb one another. Its name holds the kernel's key and a hash of compiler, flags and processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from daceml_train.codegen.launch import KernelCode
from daceml_train.errors import CompilerError

FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fopenmp", "-w", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-freciprocal-math", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden",
    *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []),
)  # fmt: skip
"""None of them lets the compiler assume that numbers are finite, and none changes the mode of the processor.

Left to itself gcc takes vectors half as wide on Intel's processors, lest other programs run at a lower clock.
"""
HEADERS = Path(__file__).parent / "native"


def compiler_command(compiler: str | None = None) -> list[str]:
    """The C++ compiler: as given, else `$CXX`, else g++."""
    return shlex.split(compiler or os.environ.get("CXX") or "g++")


@functools.cache
def _machine() -> str:
    """A hash of the flags and of the processor, as far as `-march=native` looks at it."""
    processor = ""
    if (info := Path("/proc/cpuinfo")).exists():
        wanted = ("flags", "Features", "model name", "cpu family", "model")
        lines = info.read_text().split("\n\n")[0].splitlines()
        processor = "\n".join(line for line in lines if line.split("\t")[0].strip() in wanted)
    return hashlib.sha256("\n".join([*FLAGS, platform.machine(), processor]).encode()).hexdigest()[:12]


@functools.cache
def _toolchain(command: tuple[str, ...]) -> str:
    """A hash of the compiler and its version. Raises `CompilerError` if it cannot be asked."""
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise CompilerError(
            f"the C++ compiler {command[0]!r} cannot be started ({error.strerror}); install g++ or set CXX"
        ) from None
    except subprocess.CalledProcessError as error:
        raise CompilerError(f"{' '.join(command)} --version failed: {error.stderr.strip()}") from None
    return hashlib.sha256("\n".join([*command, version]).encode()).hexdigest()[:12]


def library_path(key: str, folder: Path, compiler: str | None = None) -> Path:
    """Where the library of a kernel lies.

    Without a compiler that works it is the newest one that any compiler made for this processor; `CompilerError` if
    there is none.
    """
    stem = f"kernel_{key}-{_machine()}"
    try:
        return folder / f"{stem}-{_toolchain(tuple(compiler_command(compiler)))}.so"
    except CompilerError:
        made = [path for path in folder.glob(f"{stem}-*.so") if intact(path)]
        if not made:
            raise
        return max(made, key=lambda path: path.stat().st_mtime)


def compile_kernels(
    codes: Sequence[KernelCode],
    folder: Path,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    compiler: str | None = None,
) -> dict[str, Path]:
    """Key -> library. Only missing libraries are made; `progress(done, total)` counts those.

    Raises `CompilerError` with the compiler's last lines; libraries that succeeded stay in the folder. Where something
    is raised, an interruption among that, what the compiler is at is finished, and nothing more is begun.
    """
    distinct = {code.key: code for code in codes}
    paths = {key: library_path(key, folder, compiler) for key in distinct}
    missing = [code for key, code in distinct.items() if not intact(paths[key])]
    if not missing:
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    done = 0
    pool = ThreadPoolExecutor(jobs or os.cpu_count() or 1)
    try:
        futures = []
        for code in missing:  # texts are made here, one after the other, while the compiler runs on the previous ones
            futures.append(pool.submit(build, code.source, paths[code.key], compiler))
        for future in futures:
            future.result()
            done += 1
            if progress is not None:
                progress(done, len(missing))
    finally:
        pool.shutdown(cancel_futures=True)
    return paths


def build(source: str, path: Path, compiler: str | None = None) -> None:
    """Compile one text to the library `path`, atomically."""
    with tempfile.TemporaryDirectory(prefix=".building-", dir=path.parent) as folder:
        text, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        text.write_text(source)
        command = [*compiler_command(compiler), *FLAGS, f"-I{HEADERS}", str(text), "-o", str(library)]
        try:
            run = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise CompilerError(f"the C++ compiler {command[0]!r} cannot be started ({error.strerror})") from None
        if run.returncode != 0 or not library.exists():
            tail = "\n".join(run.stderr.strip().splitlines()[-20:])
            raise CompilerError(f"{command[0]} failed on {path.stem} (exit {run.returncode}):\n{tail}")
        install(library, path)


_SEAL = b"daceml_train: whole\n"
"""Ends every library, before a checksum of the rest: damage is found without loading it."""
_DIGEST = 32


def install(library: Path, path: Path) -> None:
    """Seal a library that is complete, and move it to its place."""
    content = library.read_bytes()
    library.write_bytes(content + _SEAL + hashlib.sha256(content).digest())
    os.replace(library, path)


def intact(path: Path) -> bool:
    """Whether a library is there, whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, digest = content[: -_DIGEST - len(_SEAL)], content[-_DIGEST:]
    return content[:-_DIGEST].endswith(_SEAL) and hashlib.sha256(body).digest() == digest


def load(path: Path, key: str, entry: str = "kernel") -> int:
    """The address of the kernel's entry point. The library stays loaded for the life of the process."""
    try:
        library = ctypes.CDLL(str(path))
        address = ctypes.cast(getattr(library, f"{entry}_{key}"), ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        raise CompilerError(f"{path} is no library of kernel {key}: {error}") from None
    assert address is not None
    return address
