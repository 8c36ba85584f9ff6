"""replay, diff: a saved session applied to a model, and the differences of two pipelines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from daceml_train.cli.failing import Failure, say, write
from daceml_train.cli.models import add_inputs, as_tuple, made_by
from daceml_train.errors import nearest

_MODEL = (
    "as for report: a function that returns (module, inputs) or (module, inputs, loss, optimizer), or an ONNX model"
)


def add(commands: Any) -> None:
    """Register the commands."""
    replay = commands.add_parser(
        "replay",
        help="apply a saved session or pipeline to a model, and check it",
        description="Apply the passes of a file that Session.save or a pipeline wrote to a model's training graph, and "
        "list what did not match, and why. Exit status 1 if something did not match or is wrong.",
    )
    replay.add_argument("file", type=Path, metavar="FILE.json|.txt|.py", help="read as data; nothing in it is run")
    replay.add_argument("model", metavar="MODEL.py:FACTORY|FILE.onnx", help=_MODEL)
    add_inputs(replay)
    replay.add_argument("--verify", action="store_true", help="compile, and compare with PyTorch and float64")
    replay.add_argument("--measure", action="store_true", help="time it beside the default pipeline and PyTorch")
    replay.add_argument("--runs", type=int, default=20, metavar="N", help="runs to measure (default: %(default)s)")
    replay.add_argument("-o", "--output", type=Path, metavar="FILE", help="write what was applied: .json, .txt or .py")
    replay.set_defaults(run=_replay, fails=2)  # 1: not all matched, or something is wrong

    diff = commands.add_parser(
        "diff",
        help="two pipelines or sessions on one model, or two reports, side by side",
        description="Of two pipelines or saved sessions: bytes, memory, operations, kernels and, if measured, time of "
        "a model under both, the passes that only one of them has, and the modules where the bytes differ. Of two "
        "reports: their differences except for times. Exit status 0 if they are the same, 1 if they differ, 2 if "
        "they cannot be compared.",
    )
    pipeline = "a file with a pipeline, saved session, or report as JSON; or the name of a pipeline: "
    pipeline += "training, inference, mixed_precision, none"
    diff.add_argument("a", help=pipeline)
    diff.add_argument("b", help="the same")
    diff.add_argument("model", nargs="?", metavar="MODEL.py:FACTORY|FILE.onnx", help=f"{_MODEL}; not for reports")
    add_inputs(diff)
    diff.add_argument("--measure", action="store_true", help="compile both and run them in turn")
    diff.add_argument("--runs", type=int, default=20, metavar="N", help="runs to measure (default: %(default)s)")
    diff.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    diff.add_argument("--html", type=Path, metavar="FILE", help="of two reports: write a page with both side by side")
    diff.set_defaults(run=_diff)


def session_of(options: argparse.Namespace) -> Any:
    """A session of the model that was named."""
    from daceml_train.exploration import Session

    module, inputs, *training = made_by(options.model, options)
    loss, optimizer = training or (None, None)
    say("capturing")
    return Session(module, *as_tuple(inputs), loss=loss, optimizer=optimizer, progress=_compiling)


def _compiling(done: int, of: int) -> None:
    say(f"kernels: {done} of {of}")


def _replay(options: argparse.Namespace) -> int:
    from daceml_train.errors import DacemlError
    from daceml_train.transformations import catalog

    try:
        catalog.load()
        pipeline = pipeline_named(str(options.file))  # report an unreadable file before a model is captured
        session = session_of(options)
        say(f"applying {len(pipeline)} passes")
        replayed = session.replay(pipeline)
        say("")
        print(replayed)
        well = not replayed.missed
        if options.verify:
            say("verifying")
            verified = session.verify()
            say("")
            print(verified)
            well = well and bool(verified)
        if options.measure:
            say("measuring")
            measured = session.measure(options.runs)
            say("")
            print(measured)
        if options.output is not None:
            print(f"written to {session.save(options.output)}")
    except DacemlError as error:
        raise Failure(str(error)) from error
    return 0 if well else 1


def _diff(options: argparse.Namespace) -> int:
    from daceml_train.errors import DacemlError

    try:
        told = _compared(options)
    except DacemlError as error:
        raise Failure(str(error), status=2) from error
    except Failure as failure:
        raise Failure(str(failure), status=2) from failure
    say("")
    print(f"a: {options.a}\nb: {options.b}\n{told}")
    if options.json is not None:
        write(options.json, json.dumps(told.as_dict(), indent=1) + "\n")
    if options.html is not None:
        from daceml_train.reporting.difference import read
        from daceml_train.reporting.difference_page import document

        a, b = Path(options.a), Path(options.b)
        names = (a.stem, b.stem) if a.stem != b.stem else (str(a), str(b))
        write(options.html, document(read(a), read(b), names, told))
        print(f"written to {options.html}")
    return 0 if told.same else 1


def _compared(options: argparse.Namespace) -> Any:
    """A `Difference` of two reports, or a `Comparison` of two pipelines on a model."""
    from daceml_train.exploration import compare
    from daceml_train.reporting.difference import difference, is_report

    reports = [is_report(Path(name)) for name in (options.a, options.b)]
    if all(reports):
        return difference(Path(options.a), Path(options.b))
    if any(reports):
        one, other = (options.a, options.b) if reports[0] else (options.b, options.a)
        raise Failure(f"a report is compared with a report: {one} is one, and {other} is not")
    if options.html is not None:
        raise Failure("--html is for two reports: write them with `daceml-train report MODEL --json FILE`")
    a, b = pipeline_named(options.a), pipeline_named(options.b)
    if options.model is None:
        raise Failure("pipelines are compared on a model: name one, as MODEL.py:FACTORY")
    if options.runs < 1:
        raise Failure("--runs must be at least 1")
    return compare(a, b, session_of(options), measure=options.measure, repeats=options.runs)


def pipeline_named(name: str) -> Any:
    """A pipeline that comes with the package, or that of a file."""
    from daceml_train.passes.pipeline import Pipeline
    from daceml_train.transformations.pipelines import NAMED

    if name in NAMED:
        return NAMED[name]
    if not Path(name).is_file():
        raise Failure(f"{name} is neither a pipeline's file nor one of {', '.join(NAMED)}{nearest(name, NAMED)}")
    return Pipeline.of(Path(name))
