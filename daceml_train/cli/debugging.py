"""explain, bisect: what is not compiled, what becomes of an operator, and which stage deviates."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from daceml_train.cli.failing import Failure, say
from daceml_train.cli.models import add_inputs, called_with
from daceml_train.cli.sessions import pipeline_named, session_of

TRAINING = "training"
"""The pipeline unless one is named."""


def add(commands: Any) -> None:
    """Register the commands."""
    explain = commands.add_parser(
        "explain",
        help="what of a model is not compiled, and what to change; or what becomes of one operator",
        description="List the graphs of a model, what breaks them and what falls back, with the line in your source. "
        "With --node: an operator of its training graph, with its module and source line, what it reads and writes, "
        "the passes that change it, the bytes that it moves after each level, and the kernels that run it.",
    )
    explain.add_argument("model", metavar="FILE.py:FACTORY|FILE.onnx", help="as for report")
    add_inputs(explain)
    explain.add_argument(
        "--node",
        metavar="NAME",
        help="an operator: an array that it produces, or its kind, module or line if that is unique",
    )
    explain.add_argument(
        "--pipeline",
        default=TRAINING,
        metavar="FILE",
        help="for --node: a pipeline's file, or training, inference, mixed_precision",
    )
    explain.add_argument("--code", type=Path, metavar="FOLDER", help="for --node: write the C++ of its kernels there")
    explain.set_defaults(run=_explain)

    bisect = commands.add_parser(
        "bisect",
        help="which operator or pass produces a wrong number",
        description="Compare every stage of compilation with PyTorch in float64; write a script that shows the first "
        "difference. Exit status 1 if there is one.",
    )
    bisect.add_argument("model", metavar="FILE.py:FACTORY", help="as for report; loss and optimizer are not used")
    bisect.add_argument("--folder", type=Path, default=Path("bisect"), help="for the script (default: bisect)")
    bisect.add_argument(
        "--pipeline", default=TRAINING, metavar="FILE", help="a pipeline's file, or training, inference, none"
    )
    bisect.set_defaults(run=_bisect, fails=2)  # 1: something deviates


def _explain(options: argparse.Namespace) -> int:
    if options.node is not None:
        return _explain_node(options)
    if options.code is not None or options.pipeline != TRAINING:
        raise Failure("--pipeline and --code are about an operator: name it, --node NAME", 2)
    from rich.console import Console

    from daceml_train.debug import explain

    model, inputs = called_with(options.model, options)
    say("capturing")
    explanation = explain(model, *inputs)
    say("")
    Console().print(explanation)
    return 0


def _explain_node(options: argparse.Namespace) -> int:
    from daceml_train.errors import DacemlError
    from daceml_train.exploration.session.lineage import lineage

    try:
        pipeline = pipeline_named(options.pipeline)
        session = session_of(options)
        if len(pipeline):
            say(f"applying {len(pipeline)} passes")
            session.apply(pipeline)
        found = lineage(session, options.node)
    except DacemlError as error:
        raise Failure(str(error)) from error
    say("")
    print(found)
    if options.code is not None:
        try:
            written = found.write(options.code)
        except OSError as error:
            raise Failure(f"nothing can be written into {options.code}: {error.strerror or error}", 2) from None
        for path in written:
            print(f"written: {path}")
    return 0


def _bisect(options: argparse.Namespace) -> int:
    from daceml_train.debug import bisect

    pipeline = pipeline_named(options.pipeline)
    model, inputs = called_with(options.model)
    say("comparing every stage with PyTorch in float64")
    found = bisect(model, *inputs, pipeline=pipeline, folder=options.folder)
    say("")
    print(found)
    return 1 if found else 0
