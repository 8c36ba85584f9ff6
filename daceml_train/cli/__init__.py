"""The command `daceml-train`: report on a model, apply and compare pipelines, look after cache and installation.

Exit status: 0 well, 1 something is wrong with the model or the installation, 2 wrong use of the command. Of `diff`: 0
the same, 1 different, 2 anything else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from daceml_train.cli import catalogue, debugging, doctor, reports, sessions
from daceml_train.cli.failing import Failure


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except Failure as failure:
        print(f"daceml-train: {failure}", file=sys.stderr)
        return failure.status
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="daceml-train", description="A training compiler for PyTorch models, built on DaCe."
    )
    parser.add_argument("--version", action="version", version=f"daceml_train {version('daceml_train')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for family in (reports, sessions, debugging, catalogue, doctor):
        family.add(commands)
    return parser
