"""Compiles this package's C++ sources against the installed PyTorch, once per version, compiler and source text."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

import torch

from daceml_train import logs
from daceml_train.codegen.compiler import compiler_command, run
from daceml_train.errors import CompilerError, DacemlError
from daceml_train.storage.files import replace, sealed, unsealed
from daceml_train.storage.folders import cache_folder, locked, to_write, usable
from daceml_train.storage.turns import build_once


def build(source: Path, directory: Path, *, compiler: str | None = None) -> Path:
    """The shared library built from `source` and the files beside it, from `directory` if it is there and intact.

    `compiler` is a program, with or without arguments; by default `$CXX`, or g++. Any number of processes may build
    into one directory at once. If the compiler is missing or fails, a library that another compiler built from the same
    sources is used; if there is none, CompilerError is raised, and `directory` contains no new library.
    """
    command = compiler_command(compiler)
    directory = usable(directory)
    stem = f"{source.stem}-{_key(source)}"
    try:
        version = _output([*command, "--version"])
    except CompilerError:
        built = [path for path in directory.glob(f"{stem}-*.so") if is_intact(path)]
        if not built:
            raise
        return max(built, key=lambda path: path.stat().st_mtime)
    path = directory / f"{stem}-{hashlib.sha256(f'{shlex.join(command)}{version}'.encode()).hexdigest()[:12]}.so"
    if not is_intact(path):
        path = to_write(directory) / path.name
        build_once(path, lambda: is_intact(path) or None, lambda: _compile(source, command, path))
    return path


def is_intact(path: Path) -> bool:
    """Whether a library exists, is complete, has its own name, and was written by nobody else."""
    return unsealed(path) is not None


def _compile_flags() -> list[str]:
    headers = Path(torch.__file__).parent / "include"  # as `cpp_extension.include_paths`, which imports setuptools
    folders = (headers, headers / "torch" / "csrc" / "api" / "include")
    includes = [flag for folder in folders for flag in ("-isystem", str(folder))]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # One header per operator: the alternative, all of them, costs 50 s.
    return [
        "-O2",
        "-fopenmp",
        "-std=c++20",
        "-fPIC",
        "-fvisibility=hidden",
        abi,
        "-DAT_PER_OPERATOR_HEADERS",
        *includes,
    ]


def _link_flags() -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    return [
        "-shared",
        "-fopenmp",
        f"-L{libraries}",
        "-lc10",
        "-ltorch_cpu",
        "-ltorch_python",
        f"-Wl,-rpath,{libraries}",
    ]


def _key(source: Path) -> str:
    """A hash of what determines the library besides the compiler: sources, flags, PyTorch's version."""
    parts = [torch.__version__, *_compile_flags(), *_link_flags()]
    for file in [*sorted(source.parent.glob("*.h")), source]:
        parts += [file.name, file.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile(source: Path, compiler: list[str], path: Path) -> bool:
    """Compiles next to `path` under a temporary name, and renames: a reader never sees a partial library."""
    try:
        with locked(path.parent) as folder:
            logs.event(logs.KERNELS, f"the native executor is built, once per version of PyTorch: {path.name}")
            library = folder / path.name
            _output([*compiler, *_compile_flags(), str(source), *_link_flags(), "-o", str(library)])
            replace(path, sealed(library.read_bytes(), path.name), 0o700)
            return True
    except OSError as error:
        raise CompilerError(f"{path} cannot be written: {error}") from None


def _output(command: list[str]) -> str:
    """The output of a compiler command. Raises CompilerError with its diagnostics."""
    try:
        finished = run(command)
    except OSError as error:
        raise CompilerError(
            f"the C++ compiler {command[0]!r} cannot be started ({error}); install g++ 11 or newer, or name one in $CXX"
        ) from error
    if finished.returncode != 0:
        output = f"{' '.join(command)}\n{finished.stderr[-8000:]}"
        raise CompilerError(f"the C++ compiler failed with status {finished.returncode}:\n{output}")
    return finished.stdout


def executor(directory: Path | None = None) -> Path:
    """The executor's library, built if necessary; by default in the cache. Raises CompilerError."""
    return build(Path(__file__).parent / "native" / "executor.cpp", directory or cache_folder() / "native")


if __name__ == "__main__":  # `make setup` builds it ahead of the first use
    try:
        print(executor())
    except DacemlError as error:
        raise SystemExit(str(error)) from None
