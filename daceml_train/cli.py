"""The command `daceml-train`: report on a model, look after the cache, check the installation.

Exit status: 0 well, 1 something is wrong with the model or the installation, 2 wrong use of the command.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

TOLERANCE = 1e-5
"""Difference of losses that `doctor` allows."""


class Failure(Exception):
    """Ends the command with status 1 and this sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except Failure as failure:
        print(f"daceml-train: {failure}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="daceml-train", description="A training compiler for PyTorch models, built on DaCe."
    )
    parser.add_argument("--version", action="version", version=f"daceml_train {version('daceml_train')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    report = commands.add_parser(
        "report",
        help="what compilation does to a model",
        description="Compile and run one training step or forward pass of a model, and show what was compiled.",
    )
    report.add_argument(
        "model",
        metavar="FILE.py:FACTORY",
        help="a function without arguments that returns (module, inputs) or (module, inputs, loss, optimizer); inputs "
        "is a tensor or a tuple of what the module is called with; with a loss, of the step's inputs and targets",
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="write the report there too, as JSON")
    report.set_defaults(run=_report)

    explain = commands.add_parser(
        "explain",
        help="what of a model is not compiled, and what to change",
        description="List the graphs of a model, what breaks them and what falls back, with the line in your source.",
    )
    explain.add_argument("model", metavar="FILE.py:FACTORY", help="as for report")
    explain.set_defaults(run=_explain)

    bisect = commands.add_parser(
        "bisect",
        help="which operator or pass makes a wrong number",
        description="Compare every stage of compilation with PyTorch in float64; write a script that shows the first "
        "difference. Exit status 1 if there is one.",
    )
    bisect.add_argument("model", metavar="FILE.py:FACTORY", help="as for report; loss and optimizer are not used")
    bisect.add_argument("--folder", type=Path, default=Path("bisect"), help="for the script (default: bisect)")
    bisect.add_argument("--pipeline", type=Path, metavar="FILE", help="a pipeline as JSON or text")
    bisect.set_defaults(run=_bisect)

    cache = commands.add_parser(
        "cache", help="compiled programs on disk", description="Show or remove what was compiled."
    )
    cache.add_argument("action", choices=("show", "clear"), help="show: folder and sizes; clear: remove everything")
    cache.add_argument("--folder", type=Path, help="default: $DACEML_TRAIN_CACHE or the user's cache folder")
    cache.set_defaults(run=_cache)

    passes = commands.add_parser(
        "passes",
        help="the transformations there are",
        description="List all passes by level, or explain one: its picture, its bytes, its options.",
    )
    passes.add_argument("name", nargs="?", metavar="PASS", help="the pass to explain")
    passes.set_defaults(run=_passes)

    doctor = commands.add_parser(
        "doctor",
        help="check the installation",
        description="Check Python, PyTorch, the compiler and the cache folder; train two layers and compare.",
    )
    doctor.set_defaults(run=_doctor)
    return parser


# ---- report ---------------------------------------------------------------------------------------------------------
def _report(options: argparse.Namespace) -> int:
    import daceml_train as dt
    from daceml_train.progress import compilation_bar

    made = _made(options.model)
    with compilation_bar() as shown:
        if len(made) == 2:
            model, inputs = made
            compiled: Any = dt.optimize(model, **shown)
        else:
            model, inputs, loss, optimizer = made
            compiled = dt.training_step(model, loss, optimizer, **shown)
        compiled(*_tuple(inputs))
    report = dt.report(compiled)
    print(report)
    if options.json is not None:
        options.json.write_text(report.to_json() + "\n", encoding="utf-8")
    return 0


def _made(place: str) -> tuple[Any, ...]:
    """What the factory named by `FILE.py:FACTORY` returns."""
    path, _, name = place.rpartition(":")
    if not path or not Path(path).is_file():
        raise Failure(f"{place!r} names no file and function; expected FILE.py:FACTORY")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise Failure(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise Failure(f"{path} has no function {name!r}")
    made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 4):
        raise Failure(f"{name}() must return (module, inputs) or (module, inputs, loss, optimizer)")
    return made


def _tuple(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


# ---- debugging ------------------------------------------------------------------------------------------------------
def _explain(options: argparse.Namespace) -> int:
    from rich.console import Console

    from daceml_train.debug import explain

    model, inputs = _call(options.model)
    Console().print(explain(model, *inputs))
    return 0


def _bisect(options: argparse.Namespace) -> int:
    from daceml_train.debug import bisect
    from daceml_train.transformations.pipelines import TRAINING

    model, inputs = _call(options.model)
    found = bisect(model, *inputs, pipeline=options.pipeline or TRAINING, folder=options.folder)
    print(found)
    return 1 if found else 0


def _call(place: str) -> tuple[Any, tuple[Any, ...]]:
    """The model that a factory makes, and what it is called with: of a training step, its first input."""
    model, inputs, *training = _made(place)
    return model, _tuple(_tuple(inputs)[0] if training else inputs)


# ---- passes ---------------------------------------------------------------------------------------------------------
def _passes(options: argparse.Namespace) -> int:
    from daceml_train.errors import Invalid
    from daceml_train.passes.base import LEVELS
    from daceml_train.passes.registry import find
    from daceml_train.transformations import catalog

    known = catalog.passes()
    if options.name is not None:
        try:
            print(find(options.name).describe())
        except Invalid as error:
            raise Failure(str(error)) from None
        return 0
    for level in LEVELS:
        print(level)
        for name, kind in known.items():
            if kind.level == level:
                print(f"  {name:28} {' '.join(kind.describe().summary.split())}")
    return 0


# ---- cache ----------------------------------------------------------------------------------------------------------
def _cache(options: argparse.Namespace) -> int:
    from daceml_train.reporting import bytes_text
    from daceml_train.runtime.cache import Cache, default_folder

    folder = options.folder or default_folder()
    if options.action == "clear":
        print(f"{bytes_text(Cache(folder).clear())} removed from {folder}")
        return 0
    print(folder)
    for kind in ("programs", "kernels", "native"):
        files = [f for f in (folder / kind).rglob("*") if f.is_file()]
        print(f"  {kind:9} {len(files):6}  {bytes_text(sum(f.stat().st_size for f in files)):>9}")
    return 0


# ---- doctor ---------------------------------------------------------------------------------------------------------
def _doctor(options: argparse.Namespace) -> int:
    """Run all checks, also behind one that fails."""
    well = True
    for check in (_python, _versions, _compiler, _folder, _executor, _plugins, _training):
        try:
            for line in check():
                print(f"ok    {line}")
        except Exception as error:  # a check may fail in any way; the next ones still tell something
            well = False
            print(f"WRONG {error}")
    return 0 if well else 1


def _python() -> Iterator[str]:
    yield f"Python {platform.python_version()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _versions() -> Iterator[str]:
    from packaging.requirements import Requirement

    for text in requires("daceml_train") or ():
        wanted = Requirement(text)
        if wanted.marker is not None:
            continue
        found = version(wanted.name)
        if not wanted.specifier.contains(found, prereleases=True):
            raise Failure(f"{wanted.name} {found} is installed, {wanted.specifier} is needed")
        yield f"{wanted.name} {found}"


def _compiler() -> Iterator[str]:
    from daceml_train.codegen.compile import compiler_command

    command = compiler_command()
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Failure(f"the C++ compiler {command[0]!r} does not run ({error}); install g++ or set CXX") from None
    yield f"compiler: {said.splitlines()[0]}"


def _folder() -> Iterator[str]:
    from daceml_train.runtime.cache import default_folder

    folder = default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise Failure(f"the cache folder {folder} cannot be written; name another in DACEML_TRAIN_CACHE")
    yield f"cache folder: {folder}"


def _executor() -> Iterator[str]:
    from daceml_train.runtime.executor import library

    library()
    yield "native executor: built and loaded"


def _plugins() -> Iterator[str]:
    from daceml_train.plugins import GROUPS, load_plugins
    from daceml_train.transformations import catalog

    catalog.load()
    failures = []
    for plugin in load_plugins(*GROUPS):
        told = f"plugin {plugin.name} ({plugin.target}) of {plugin.package}"
        if plugin.failure:
            failures.append(f"{told} does not load: {plugin.failure}")
        else:
            yield told
    if failures:
        raise Failure("; ".join(failures))


def _training() -> Iterator[str]:
    """Two layers, three steps of Adam, against the same in eager execution."""
    import copy

    import torch
    from torch import nn

    import daceml_train as dt

    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model = copy.deepcopy(eager)
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    theirs, ours = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (eager, model))
    step = dt.training_step(model, nn.functional.cross_entropy, ours)
    for _ in range(3):
        theirs.zero_grad()
        loss = nn.functional.cross_entropy(eager(x), y)
        loss.backward()
        theirs.step()
        own = step(x, y)
        if not abs(float(own) - float(loss.detach())) <= TOLERANCE:
            raise Failure(f"a compiled step gives loss {float(own)}, eager execution {float(loss.detach())}")
    if step.breaks:
        raise Failure(f"two layers do not compile to one program: {step.breaks[0]}")
    yield "two layers trained for three steps: the losses are eager execution's"

