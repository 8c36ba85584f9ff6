"""The model of a command: the result of a factory, or an ONNX file."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daceml_train.cli.failing import Failure
from daceml_train.errors import nearest


def add_model(parser: argparse.ArgumentParser, other: str = "") -> None:
    """Arguments that name a model and the number of its runs."""
    parser.add_argument(
        "model",
        metavar=f"FILE.py:FACTORY|FILE.onnx{other}",
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
    path, name = file_and_function(place)
    factory = _factory(path, name)
    needed = [p.name for p in inspect.signature(factory).parameters.values() if _required(p)]
    if needed:
        raise Failure(f"{name}() of {path} has the parameter {needed[0]!r}, and is called without arguments")
    return _checked(name, factory())


def _factory(path: str, name: str) -> Callable[[], Any]:
    """The function `name` of a Python file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise Failure(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    factory: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(factory):
        own = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == spec.name]
        raise Failure(f"{path} has no function {name!r}{nearest(name, own)}")
    return factory


def _required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic


def _checked(name: str, result: Any) -> tuple[Any, ...]:
    """What a factory returned. Raises `Failure` if it is no model with its inputs."""
    import torch

    if not isinstance(result, tuple) or len(result) not in (2, 4):
        raise Failure(f"{name}() must return (module, inputs) or (module, inputs, loss, optimizer)")
    if not isinstance(result[0], torch.nn.Module):
        given = result[0].__name__ if isinstance(result[0], type) else f"an object of type {type(result[0]).__name__}"
        raise Failure(f"{name}() must return a torch.nn.Module first, and returned {given}")
    return result


def file_and_function(place: str) -> tuple[str, str]:
    """The two that `FILE.py:FACTORY` names. Raises `Failure` where there is no such file, or no function is named."""
    path, _, name = place.rpartition(":")
    if not path:
        what = "names no function" if Path(place).is_file() else "names no file and function"
        raise Failure(f"{place!r} {what}; expected FILE.py:FACTORY")
    if not Path(path).is_file():
        raise Failure(f"there is no file {path}")
    return path, name


def check_given(options: argparse.Namespace) -> None:
    """Look at what a command was given before anything is imported. Raises `Failure` for a file that is missing."""
    model: str | None = getattr(options, "model", None)
    _check_inputs(options, model or "")
    if model is not None and model.endswith(".json") and not Path(model).is_file():
        raise Failure(f"there is no file {model}")
    if model is not None and model.endswith(".onnx"):
        if not Path(model).is_file():
            raise Failure(f"there is no ONNX file {model}")
    elif model is not None and ":" in model:
        file_and_function(model)
    for name in ("file", "a", "b", "pipeline"):
        path = getattr(options, name, None)
        if path is not None and Path(path).suffix in (".json", ".txt", ".py") and not Path(path).is_file():
            raise Failure(f"there is no file {path}", 2 if name in ("a", "b") else 1)


def _check_inputs(options: argparse.Namespace, model: str) -> None:
    """Raises `Failure` for inputs and sizes that no ONNX model takes."""
    named = [*getattr(options, "input", ()), *getattr(options, "size", ())]
    if named and not model.endswith(".onnx"):
        raise Failure(f"--input and --size are for ONNX models, and the inputs of {model} are those that it returns")
    for text in getattr(options, "input", ()):
        _, path = _input(text)
        if not Path(path).is_file():
            raise Failure(f"there is no file {path}")
    for text in getattr(options, "size", ()):
        name, _, number = text.partition("=")
        if not name or not (number.isascii() and number.isdecimal()):
            raise Failure(f"--size takes NAME=N, given {text!r}")


def _input(text: str) -> tuple[str, str]:
    """The name, which may be empty, and the file of `[NAME=]FILE.npy`; the file's path may have `=` in it."""
    name, equals, path = text.partition("=")
    return ("", text) if not equals or Path(text).is_file() else (name, path)


def onnx_model(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """The module of an ONNX file and its inputs, read or made up."""
    import daceml_train as dt
    from daceml_train.errors import DacemlError

    try:
        module: Any = dt.load_onnx(Path(options.model))
        from daceml_train.frontends.onnx.inputs import complete, from_files

        files = [_input(text) for text in options.input]
        sizes = [text.partition("=") for text in options.size]
        given = from_files(module, [(name, Path(file)) for name, file in files])
        return module, complete(module, given, {name: int(number) for name, _, number in sizes})
    except DacemlError as error:
        raise Failure(str(error)) from None


def called_with(place: str, options: argparse.Namespace | None = None) -> tuple[Any, tuple[Any, ...]]:
    """The model of a factory and its arguments: of a training step, its first input."""
    model, inputs, *training = made_by(place, options)
    return model, as_tuple(as_tuple(inputs)[0] if training else inputs)


def as_tuple(inputs: Any) -> tuple[Any, ...]:
    """The inputs of a factory, which may be one tensor."""
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
