"""doctor: whether the installation works."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from daceml_train.cli.failing import Failure
from daceml_train.internals import refusal

TOLERANCE = 1e-5
"""Difference of losses that `doctor` allows."""


def add(commands: Any) -> None:
    """Register the command."""
    doctor = commands.add_parser(
        "doctor",
        help="check the installation",
        description="Check Python, PyTorch, the compiler and the cache folder; train two layers and compare.",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    """Run all checks, also after one that fails."""
    well = True
    for check in (_python, _versions, _compiler, _folder, _executor, plugins, _training, _gpu):
        try:
            for line in check():
                print(f"ok    {line}")
        except Exception as error:  # a check may fail in any way; the next ones are still informative
            well = False
            print(f"WRONG {error}")
    return 0 if well else 1


def _python() -> Iterator[str]:
    yield f"Python {platform.python_version()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _versions() -> Iterator[str]:
    from packaging.requirements import Requirement

    for text in _requirements():
        wanted = Requirement(text)
        if wanted.marker is not None:
            continue
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            raise Failure(f"{wanted.name} is not installed, {wanted.name}{wanted.specifier} is needed") from None
        if not wanted.specifier.contains(found, prereleases=True):
            raise Failure(f"{wanted.name} {found} is installed, {wanted.specifier} is needed")
        yield f"{wanted.name} {found}"
    if refused := refusal():
        raise Failure(refused)


def _requirements() -> list[str]:
    """What this package needs, from its installation or, in a source tree on the path, from the project file."""
    try:
        return requires("daceml_train") or []
    except PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        if not project.is_file():
            raise Failure("daceml_train is not installed, and no pyproject.toml says what it needs") from None
        needed: list[str] = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
        return needed


def _compiler() -> Iterator[str]:
    from daceml_train.codegen.compiler import compiler_command

    command = compiler_command()
    try:
        output = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Failure(f"the C++ compiler {command[0]!r} does not run ({error}); install g++ or set CXX") from None
    yield f"compiler: {output.splitlines()[0]}"


def _folder() -> Iterator[str]:
    from daceml_train.storage.folders import cache_folder, make
    from daceml_train.storage.remote import remote_cache
    from daceml_train.storage.trust import distrust

    folder = make(cache_folder())
    if not os.access(folder, os.W_OK):
        raise Failure(f"the cache folder {folder} cannot be written; name another in DACEML_TRAIN_CACHE")
    if reason := distrust(folder):
        raise Failure(f"the cache folder {folder} is not used: {reason}; name another in DACEML_TRAIN_CACHE")
    yield f"cache folder: {folder}"
    remote = remote_cache()
    if remote is not None:
        try:
            there = remote.files.exists(remote.folder)
        except Exception as error:  # file systems raise errors of their own libraries
            raise Failure(f"the remote cache {remote.url} cannot be reached ({error})") from None
        yield f"remote cache: {remote.url}{'' if there else ', which is empty'}"


def _executor() -> Iterator[str]:
    from daceml_train.runtime.native_library import library

    library()
    yield "native executor: built and loaded"


def plugins() -> Iterator[str]:
    """The installed plugins. Raises `Failure` for one that does not load."""
    from daceml_train.plugins import GROUPS, load_plugins
    from daceml_train.transformations import catalog

    catalog.load()
    failures = []
    for plugin in load_plugins(*GROUPS):
        label = f"plugin {plugin.name} ({plugin.target}) of {plugin.package}"
        if plugin.failure:
            failures.append(f"{label} does not load: {plugin.failure}")
        else:
            yield label
    if failures:
        raise Failure("; ".join(failures))


def _gpu() -> Iterator[str]:
    """A kernel is compiled for a GPU; where there is one, two layers are trained on it."""
    import tempfile

    import torch

    from daceml_train.codegen.cuda.compile import architecture, nvcc_version, run_nvcc, target
    from daceml_train.errors import CompilerError
    from daceml_train.runtime.gpu.toolchain import suitable_nvcc

    device = torch.cuda.is_available()
    try:
        nvcc = suitable_nvcc()
    except CompilerError as error:
        if device:
            raise Failure(str(error)) from None
        yield f"no CUDA device; programs for one cannot be compiled: {error}"
        return
    arch = target(nvcc, architecture(*torch.cuda.get_device_capability())) if device else "sm_90"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text('#include "kernel.cuh"\nextern "C" __global__ void probe(float* x) { *x += 1; }\n')
        run_nvcc(nvcc, ["-ptx", str(source), "-o", str(source.with_suffix(".ptx"))], arch)
    major, minor = nvcc_version(nvcc)
    yield f"nvcc {major}.{minor} ({nvcc}) compiles for {arch}"
    if device:
        yield from _training("cuda")


def own_version() -> str:
    """The version of this source tree, which need not be installed."""
    import daceml_train as dt

    return dt.__version__


def _training(device: str = "cpu") -> Iterator[str]:
    """Two layers, three steps of Adam, against the same in eager execution."""
    import copy

    import torch
    from torch import nn

    import daceml_train as dt

    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    model = copy.deepcopy(eager)
    x, y = torch.randn(8, 16, device=device), torch.randint(0, 4, (8,), device=device)
    theirs, ours = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (eager, model))
    step = dt.training_step(model, nn.functional.cross_entropy, ours)
    for _ in range(3):
        theirs.zero_grad()
        loss = nn.functional.cross_entropy(eager(x), y)
        loss.backward()
        theirs.step()
        own = step(x, y)
        if not abs(float(own) - float(loss.detach())) <= TOLERANCE:
            raise Failure(f"a compiled step returns loss {float(own)}, eager execution {float(loss.detach())}")
    if step.breaks:
        raise Failure(f"two layers do not compile to one program: {step.breaks[0]}")
    yield f"two layers trained for three steps on {device}: the losses are eager execution's"
