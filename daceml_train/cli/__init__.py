"""The command `daceml-train`: report on a model, apply and compare pipelines, manage cache and installation.

Exit status: 0 success, 1 something is wrong with the model or the installation, 2 wrong use of the command. For `diff`:
0 the same, 1 different, 2 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from daceml_train.cli import catalogue, debugging, doctor, reports, sessions, tuning
from daceml_train.cli.failing import Failure, in_call_of_model, in_file_of_user
from daceml_train.cli.models import check_given
from daceml_train.storage.folders import DUMP, writable_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = _parser().parse_args(arguments)
    fails = getattr(options, "fails", 1)
    try:
        with _written(options):
            check_given(options)
            status: int = options.run(options)
    except Failure as failure:
        print(f"daceml-train: {failure}", file=sys.stderr)
        return max(failure.status, fails)
    except Exception as error:
        found = in_file_of_user(error, getattr(options, "model", None) or "")
        found = found or in_call_of_model(error, getattr(options, "model", None) or "")
        if found is None:
            raise
        print(f"daceml-train: {found}", file=sys.stderr)
        return fails
    return status


@contextlib.contextmanager
def _written(options: argparse.Namespace) -> Iterator[None]:
    """Check where the command writes before it works, and dump what it compiles if that is asked for."""
    for path in (getattr(options, name, None) for name in ("output", "json", "html")):
        if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK)):
            raise Failure(f"{path} cannot be written", 2)
    for path in (getattr(options, name, None) for name in ("folder", "code")):
        if path is not None and (found := next(p for p in (path, *path.absolute().parents) if p.exists())).is_file():
            raise Failure(f"{found} is a file, and expected to be a folder", 2)
    if getattr(options, "dump", None) is None:
        yield
        return
    try:
        writable_folder(options.dump)
    except OSError as error:
        raise Failure(f"nothing can be dumped into {options.dump}: {error.strerror or error}", 2) from None
    before = os.environ.get(DUMP)
    os.environ[DUMP] = str(options.dump)
    try:
        yield
    finally:
        os.environ.pop(DUMP) if before is None else os.environ.update({DUMP: before})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="daceml-train", description="A training compiler for PyTorch models, built on DaCe."
    )
    parser.add_argument("--version", action="version", version=f"daceml_train {doctor.own_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for family in (reports, tuning, sessions, debugging, catalogue, doctor):
        family.add(commands)
    return parser
