"""explain, bisect: what is not compiled, and what departs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from daceml_train.cli.failing import say
from daceml_train.cli.models import called_with


def add(commands: Any) -> None:
    """Make the commands known."""
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


def _explain(options: argparse.Namespace) -> int:
    from rich.console import Console

    from daceml_train.debug import explain

    model, inputs = called_with(options.model)
    say("capturing")
    told = explain(model, *inputs)
    say("")
    Console().print(told)
    return 0


def _bisect(options: argparse.Namespace) -> int:
    from daceml_train.debug import bisect
    from daceml_train.transformations.pipelines import TRAINING

    model, inputs = called_with(options.model)
    say("comparing every stage with PyTorch in float64")
    found = bisect(model, *inputs, pipeline=options.pipeline or TRAINING, folder=options.folder)
    say("")
    print(found)
    return 1 if found else 0
