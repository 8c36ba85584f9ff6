"""The model of a command: the result of a factory, or an ONNX file."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from daceml_train.cli.failing import Failure


def add_model(parser: argparse.ArgumentParser) -> None:
    """Arguments that name a model and the number of its runs."""
    parser.add_argument(
        "model",
        metavar="FILE.py:FACTORY|FILE.onnx",
        help="a function without arguments that returns (module, inputs) or (module, inputs, loss, optimizer); inputs "
        "is a tensor or a tuple of what the module is called with; with a loss, of the step's inputs and targets. Or "
        "an ONNX model",
    )
    add_inputs(parser)
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="steps to measure (default: %(default)s)")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Options for the inputs of an ONNX model."""
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
    parser.add_argument(
        "--dump",
        type=Path,
        metavar="FOLDER",
        help="write every stage there: the graph after each pass, SDFG, plan and C++",
    )


def made_by(place: str, options: argparse.Namespace | None = None) -> tuple[Any, ...]:
    """What the factory named by `FILE.py:FACTORY` returns; of an ONNX model, the module and its inputs."""
    if options is not None and place.endswith(".onnx"):
        return onnx_model(options)
    path, _, name = place.rpartition(":")
    if not path or not Path(path).is_file():
        raise Failure(f"{place!r} names no file and function; expected FILE.py:FACTORY")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise Failure(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise Failure(f"{path} has no function {name!r}")
    result = factory()
    if not isinstance(result, tuple) or len(result) not in (2, 4):
        raise Failure(f"{name}() must return (module, inputs) or (module, inputs, loss, optimizer)")
    return result


def onnx_model(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
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


def called_with(place: str) -> tuple[Any, tuple[Any, ...]]:
    """The model of a factory and its arguments: of a training step, its first input."""
    model, inputs, *training = made_by(place)
    return model, as_tuple(as_tuple(inputs)[0] if training else inputs)


def as_tuple(inputs: Any) -> tuple[Any, ...]:
    """The inputs of a factory, which may be one tensor."""
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
