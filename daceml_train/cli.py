"""The command `daceml-train`: report on a model, look after the cache, check the installation.

Exit status: 0 well, 1 something is wrong with the model or the installation, 2 wrong use of the command.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
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
        description="Compile and run one training step or forward pass of a model, measure it, and show bytes, "
        "operations, memory and time, level by level and kernel by kernel.",
    )
    _add_model(report)
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the report there: .html, .json, or text"
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="write it there, too, as JSON")
    report.add_argument("--no-eager", action="store_true", help="do not run PyTorch's own step to count its bytes")
    report.set_defaults(run=_report)

    run = commands.add_parser(
        "run",
        help="run an ONNX model",
        description="Compile an ONNX model, run it once, and print its results. Inputs that are not given are made up.",
    )
    run.add_argument("model", metavar="FILE.onnx")
    _add_inputs(run)
    run.add_argument("-o", "--output", type=Path, metavar="FILE.npz", help="write the results there, too")
    run.set_defaults(run=_run)

    trace = commands.add_parser(
        "trace",
        help="a step's launches as a timeline",
        description="Measure each kernel and call of a step; write events for chrome://tracing or Perfetto.",
    )
    _add_model(trace)
    trace.add_argument("-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="%(default)s")
    trace.set_defaults(run=_trace)

    roofline = commands.add_parser(
        "roofline",
        help="this machine's bandwidth and peak",
        description="Copy bandwidth and peak rate of float32 products, measured once per machine and thread count.",
    )
    roofline.add_argument("--again", action="store_true", help="measure anew")
    roofline.set_defaults(run=_roofline)

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
def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="FILE.py:FACTORY|FILE.onnx",
        help="a function without arguments that returns (module, inputs) or (module, inputs, loss, optimizer); inputs "
        "is a tensor or a tuple of what the module is called with; with a loss, of the step's inputs and targets. Or "
        "an ONNX model",
    )
    _add_inputs(parser)
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="steps to measure (default: %(default)s)")


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]FILE.npy",
        help="an input of an ONNX model; may be repeated. Others are made up",
    )
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="a symbolic extent of an ONNX model (default 1)"
    )


def _report(options: argparse.Namespace) -> int:
    report = _measured(options, eager=not options.no_eager)
    print(report)
    for path in (options.output, options.json):
        if path is not None:
            report.save(path) if path is options.output else path.write_text(report.to_json() + "\n", encoding="utf-8")
            _say(f"written to {path}")
    return 0


def _trace(options: argparse.Namespace) -> int:
    events = _measured(options, eager=False).trace()
    if len(events["traceEvents"]) < 2:
        raise Failure("nothing was compiled, so there is nothing to show; `daceml-train report` says why")
    options.output.write_text(json.dumps(events), encoding="utf-8")
    print(f"{options.output}: open it in chrome://tracing or https://ui.perfetto.dev")
    return 0


def _roofline(options: argparse.Namespace) -> int:
    from daceml_train.runtime.cache import default_folder
    from daceml_train.runtime.roofline import machine

    found = machine(default_folder(), again=options.again)
    print(f"{found.processor}, {found.threads} threads")
    print(f"  copy bandwidth  {found.bandwidth / 1e9:8.1f} GB/s")
    print(f"  peak            {found.peak / 1e9:8.1f} GFLOP/s")
    print(f"  memory bounds what does less than {found.balance:.1f} operations per byte")
    return 0


def _measured(options: argparse.Namespace, eager: bool) -> Any:
    """The report of the model that was named, with measured times."""
    import daceml_train as dt
    from daceml_train.errors import DacemlError

    if options.runs < 1:
        raise Failure("--runs must be at least 1")
    made, again = _made(options.model, options), _made(options.model, options) if eager else None
    done = [0]

    def progress(kernels: int, of: int) -> None:
        _say(f"kernels: {kernels} of {of}")

    if len(made) == 2:
        module, inputs = made
        compiled: Any = dt.optimize(module, progress=progress)
        run: Callable[[], object] = lambda: compiled(*_tuple(inputs))  # noqa: E731
    else:
        module, inputs, loss, optimizer = made
        compiled = dt.training_step(module, loss, optimizer, progress=progress)
        run = lambda: compiled(*_tuple(inputs))  # noqa: E731
    _say("capturing and compiling")

    def counted() -> None:
        run()
        done[0] += 1
        _say(f"step {done[0]} of {options.runs + 1}")

    try:
        return dt.report(compiled, counted, eager=_eager(again) if again is not None else None, runs=options.runs)
    except DacemlError as error:
        raise Failure(str(error)) from error


def _eager(made: tuple[Any, ...]) -> Callable[[], object]:
    """The same in PyTorch, run once already."""
    _say("counting what PyTorch moves")
    if len(made) == 2:
        module, inputs = made
        run: Callable[[], object] = lambda: module(*_tuple(inputs))  # noqa: E731
    else:
        module, inputs, loss, optimizer = made

        def run() -> None:
            given, *targets = _tuple(inputs)
            optimizer.zero_grad()
            if isinstance(given, dict):
                output = module(**given)
            else:
                output = module(*_tuple(given))
            value = loss(output, *targets) if loss is not None else output.loss
            value.backward()
            optimizer.step()

    run()
    return run


def _say(text: str) -> None:
    """Progress, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="" if text[-1] != "." else "\n", file=sys.stderr, flush=True)


def _onnx(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """The module of an ONNX file and its inputs, read or made up."""
    import daceml_train as dt
    from daceml_train.errors import DacemlError

    try:
        module: Any = dt.load_onnx(Path(options.model))
        from daceml_train.frontends.onnx.inputs import complete, from_files

        files = [text.rpartition("=") for text in options.input]
        sizes = [text.partition("=") for text in options.size]
        if bad := next((text for text in options.size if not text.partition("=")[2].isdigit()), ""):
            raise Failure(f"--size takes NAME=N, given {bad!r}")
        given = from_files(module, {name: Path(file) for name, _, file in files})
        return module, complete(module, given, {name: int(number) for name, _, number in sizes})
    except DacemlError as error:
        raise Failure(str(error)) from None


def _run(options: argparse.Namespace) -> int:
    import numpy as np
    import torch

    import daceml_train as dt

    module, inputs = _onnx(options)
    compiled = dt.optimize(module.eval())
    with torch.inference_mode():
        try:
            result = compiled(*inputs)
        except (dt.Invalid, dt.Unsupported) as error:
            raise Failure(str(error)) from None
    results = dict(zip(module.output_names, result if isinstance(result, tuple) else (result,), strict=True))
    for name, value in results.items():
        print(f"{name}: {str(value.dtype).removeprefix('torch.')} {list(value.shape)}")
        print(value)
    if options.output is not None:
        np.savez(options.output, **{name: value.numpy() for name, value in results.items()})
        _say(f"written to {options.output}")
    return 0


def _made(place: str, options: argparse.Namespace | None = None) -> tuple[Any, ...]:
    """What the factory named by `FILE.py:FACTORY` returns; of an ONNX model, the module and its inputs."""
    if options is not None and place.endswith(".onnx"):
        return _onnx(options)
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
