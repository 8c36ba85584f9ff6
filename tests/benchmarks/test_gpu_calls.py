"""What runs only where there is a GPU calls what exists: tests and measurements are imported and type-checked."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import daceml_train as dt

ROOT = Path(__file__).parents[2]
PACKAGES = ("tests.gpu", "benchmarks.gpu")
MODULES = ("tests.runtime.gpu.test_cuda", "tests.runtime.gpu.cuda_stubs", "tests.runtime.emulation", "scripts.gpu")
OPTIONS = ("--explicit-package-bases", "--ignore-missing-imports", "--check-untyped-defs", "--follow-imports=silent")


def _modules() -> list[str]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package.replace(".", "/")).glob("*.py"))]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files if path.stem != "__main__"]


@pytest.mark.parametrize("module", _modules())
def test_imports(module: str) -> None:
    importlib.import_module(module)


@pytest.mark.parametrize("module", _modules())
def test_calls_of_the_package(module: str) -> None:
    """mypy does not see the public names, which are imported at first use."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="dt"), attr=name), args=args, keywords=keywords):
                starred = any(isinstance(a, ast.Starred) for a in args)
                given = {k.arg: None for k in keywords if k.arg is not None}
                try:
                    inspect.signature(getattr(dt, name)).bind_partial(*([] if starred else args), **given)
                except TypeError as error:
                    pytest.fail(f"{path.name}:{node.lineno}: {name}: {error}")


@pytest.mark.slow
@pytest.mark.compiled
def test_calls_fit_their_signatures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--config-file", os.devnull, *OPTIONS]
    command += [word for name in PACKAGES for word in ("-p", name)]
    command += [word for name in MODULES for word in ("-m", name)]
    environment = {"MYPY_CACHE_DIR": str(tmp_path), **os.environ}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout
