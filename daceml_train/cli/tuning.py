"""tune: measure the schedules of a model's tiled kernels."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from daceml_train.cli.failing import Failure, say
from daceml_train.cli.models import add_model, as_tuple, made_by


def add(commands: Any) -> None:
    """Register the command."""
    tune = commands.add_parser(
        "tune",
        help="measure the schedules of a model's kernels",
        description="Compile a model, measure candidates for the loop nests of its tiled kernels, keep the fastest in "
        "the cache, and show all. A candidate that differs from the operators is dropped.",
    )
    add_model(tune)
    tune.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the schedules there: .html, .json, or text"
    )
    tune.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> int:
    import daceml_train as dt
    from daceml_train.errors import DacemlError
    from daceml_train.progress import counted_bar

    results = made_by(options.model, options)
    say("capturing and compiling")
    try:
        if len(results) == 2:
            module, inputs = results
            compiled: Any = dt.optimize(module)
        else:
            module, inputs, loss, optimizer = results
            compiled = dt.training_step(module, loss, optimizer)
        compiled(*as_tuple(inputs))
        with counted_bar("measuring schedules") as progress:
            found = dt.tune(compiled, progress)
    except DacemlError as error:
        raise Failure(str(error)) from error
    print(found)
    if options.output is not None:
        found.save(options.output)
        say(f"written to {options.output}")
    return 0
