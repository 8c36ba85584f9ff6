"""report, trace, simulate, links, roofline, run: the behavior of a compiled model."""

from __future__ import annotations

import argparse
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daceml_train.cli.failing import Failure, say, write
from daceml_train.cli.models import add_inputs, add_model, as_tuple, made_by, onnx_model


def add(commands: Any) -> None:
    """Register the commands."""
    report = commands.add_parser(
        "report",
        help="what compilation does to a model",
        description="Compile and run one training step or forward pass of a model, measure it, and show bytes, "
        "operations, memory and time, level by level and kernel by kernel.",
    )
    add_model(report)
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the report there: .html, .json, or text"
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="write it there, too, as JSON")
    report.add_argument("--no-eager", action="store_true", help="do not run PyTorch's own step to count its bytes")
    report.add_argument(
        "--device",
        metavar="NAME",
        help="predict the time on a GPU that is not there (a100, h100, h200, l4, rtx4090, b200) instead of measuring "
        "here, beside that of eager PyTorch",
    )
    report.add_argument("--tf32", action="store_true", help="with --device: float32 matmuls multiply in TF32")
    report.set_defaults(run=_report)

    run = commands.add_parser(
        "run",
        help="run an ONNX model",
        description="Compile an ONNX model, run it once, and print its results. Inputs that are not given are made up.",
    )
    run.add_argument("model", metavar="FILE.onnx")
    add_inputs(run)
    run.add_argument("-o", "--output", type=Path, metavar="FILE.npz", help="write the results there, too")
    run.set_defaults(run=_run)

    trace = commands.add_parser(
        "trace",
        help="a step's launches as a timeline",
        description="Measure each kernel and call of a step; write events for chrome://tracing or Perfetto.",
    )
    add_model(trace)
    trace.add_argument("-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="%(default)s")
    trace.set_defaults(run=_trace)

    simulate = commands.add_parser(
        "simulate",
        help="a step on many cores",
        description="The time of a step on a processor with many cores, from the seconds of its launches on one "
        "thread: in order on all cores, in order on the best number each, and side by side.",
    )
    add_model(simulate, "|REPORT.json")
    simulate.add_argument("--cores", type=int, default=68, metavar="N", help="%(default)s")
    simulate.add_argument("--fork", type=float, metavar="SECONDS", help="to start a team of threads")
    simulate.add_argument("--join", type=float, metavar="SECONDS", help="per doubling of the threads of a team")
    simulate.add_argument("--slow", type=float, metavar="TIMES", help="times as slow as the measured core")
    simulate.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report there, which can be simulated again"
    )
    simulate.set_defaults(run=_simulate)

    links = commands.add_parser(
        "links",
        help="what a message between processes costs",
        description="Measure sums over several processes and fit latency and bandwidth, for report(ranks=, link=). "
        "Under torchrun, the processes are those of the job; otherwise, they are started on this machine.",
    )
    links.add_argument("--ranks", type=int, default=2, help="processes to start, %(default)s")
    links.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    links.set_defaults(run=_links)

    roofline = commands.add_parser(
        "roofline",
        help="this machine's bandwidth and peak",
        description="Copy bandwidth and peak rate of float32 matmuls, measured once per machine and thread count.",
    )
    roofline.add_argument("--again", action="store_true", help="measure again")
    roofline.set_defaults(run=_roofline)


def _report(options: argparse.Namespace) -> int:
    if options.device is not None:
        return _predicted(options)
    if options.tf32:
        raise Failure("--tf32 is about a GPU that is not there: name it, --device NAME", 2)
    report = _measured(options, eager=not options.no_eager)
    print(report)
    for path in (options.output, options.json):
        if path is not None:
            report.save(path) if path is options.output else write(path, report.to_json() + "\n")
            say(f"written to {path}")
    return 0


def _predicted(options: argparse.Namespace) -> int:
    """The prediction for a device that is not there."""
    from daceml_train.analysis.device_model import device_model
    from daceml_train.errors import DacemlError
    from daceml_train.frontends.torch.capture.eager_operations import prepared, with_foreach
    from daceml_train.reporting.prediction import predict

    def eager(watch: Callable[[Callable[[], object]], Any]) -> Any:
        results = made_by(options.model, options)
        if len(results) == 4:
            with_foreach(results[3])
        return watch(_eager(results))

    try:
        model = device_model(options.device)
        results = made_by(options.model, options)
        if len(results) == 4:
            prepared(results[3])
        _, run = _compiled(results, None)
        say("capturing and lowering")
        print(predict(run, model, None if options.no_eager else eager, options.tf32))
    except DacemlError as error:
        raise Failure(str(error)) from error
    return 0


def _trace(options: argparse.Namespace) -> int:
    events = _measured(options, eager=False).trace()
    if len(events["traceEvents"]) < 2:
        raise Failure("nothing was compiled, so there is nothing to show; `daceml-train report` says why")
    write(options.output, json.dumps(events))
    print(f"{options.output}: open it in chrome://tracing or https://ui.perfetto.dev")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    import torch

    from daceml_train.errors import DacemlError
    from daceml_train.reporting.cores import MANY_CORES, Processor, programs_of, read, simulate, together

    if options.cores < 1:
        raise Failure("--cores must be at least 1", 2)
    costs = {name: getattr(options, name) for name in ("fork", "join", "slow")}
    costs = {name: getattr(MANY_CORES, name) if value is None else value for name, value in costs.items()}
    if min(costs.values()) < 0:
        raise Failure("--fork, --join and --slow must not be negative", 2)
    try:
        if options.model.endswith(".json"):
            programs = read(Path(options.model))
        else:
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                report = _measured(options, eager=False)
            finally:
                torch.set_num_threads(before)
            if options.json is not None:
                write(options.json, report.to_json() + "\n")
            if not report.functions:
                raise Failure("nothing was compiled, so there is nothing to simulate; `daceml-train report` says why")
            programs = programs_of(report.functions[-1].launches)
    except DacemlError as error:
        raise Failure(str(error)) from error
    processor = Processor(options.cores, **costs)
    print("\n".join(together(simulate(rows, processor) for rows in programs).lines(processor)))
    return 0


def _roofline(options: argparse.Namespace) -> int:
    from daceml_train.reporting.numbers import counted
    from daceml_train.runtime.roofline import machine
    from daceml_train.storage.folders import cache_folder

    say("measuring bandwidth and peak")
    found = machine(cache_folder(), again=options.again)
    say("")
    print(f"{found.processor}, {counted(found.threads, 'thread')}")
    print(f"  copy bandwidth  {found.bandwidth / 1e9:8.1f} GB/s")
    print(f"  peak            {found.peak / 1e9:8.1f} GFLOP/s")
    print(f"  memory bounds what does less than {found.balance:.1f} operations per byte")
    return 0


def _links(options: argparse.Namespace) -> int:
    from daceml_train.runtime.links import of_job, of_machine

    if options.ranks < 2:
        raise Failure("--ranks must be at least 2", 2)
    found = of_job() if "RANK" in os.environ and "WORLD_SIZE" in os.environ else of_machine(options.ranks)
    if found is None:  # another rank of the job prints
        return 0
    link, ranks, points = found
    print(f"{ranks} processes: {link.alpha * 1e6:.1f} us per message, {link.bandwidth / 1e9:.3f} GB/s")
    for size, seconds in points:
        print(
            f"  sum of {size:>10} bytes  {seconds * 1e6:10.1f} us, fitted {link.all_reduce(size, ranks) * 1e6:10.1f} us"
        )
    print(f"dt.report(step, ranks=..., link=dt.Link(alpha={link.alpha:.3g}, bandwidth={link.bandwidth:.4g}))")
    if options.json is not None:
        figures = {"ranks": ranks, "alpha": link.alpha, "bandwidth": link.bandwidth, "points": points}
        write(options.json, json.dumps(figures) + "\n")
    return 0


def _measured(options: argparse.Namespace, eager: bool) -> Any:
    """The report of the model that was named, with measured times."""
    import daceml_train as dt
    from daceml_train.errors import DacemlError

    if options.runs < 1:
        raise Failure("--runs must be at least 1")
    results, again = made_by(options.model, options), made_by(options.model, options) if eager else None
    done = [0]

    def progress(kernels: int, of: int) -> None:
        say(f"kernels: {kernels} of {of}")

    compiled, run = _compiled(results, progress)
    say("capturing and compiling")

    def counted() -> None:
        run()
        done[0] += 1
        say(f"step {done[0]} of {options.runs + 1}")

    try:
        return dt.report(compiled, counted, eager=_eager(again) if again is not None else None, runs=options.runs)
    except DacemlError as error:
        raise Failure(str(error)) from error


def _compiled(
    results: tuple[Any, ...], progress: Callable[[int, int], None] | None
) -> tuple[Any, Callable[[], object]]:
    """The optimized module or training step of what a factory returned, and a call; a module runs without gradients."""
    import daceml_train as dt

    if len(results) == 2:
        module, inputs = results
        compiled: Any = dt.optimize(module, progress=progress)
        return compiled, _inference(compiled, inputs)
    else:
        module, inputs, loss, optimizer = results
        compiled = dt.training_step(module, loss, optimizer, progress=progress)
    return compiled, lambda: compiled(*as_tuple(inputs))


def _inference(module: Any, inputs: Any) -> Callable[[], object]:
    import torch

    return torch.no_grad()(lambda: module(*as_tuple(inputs)))


def _eager(results: tuple[Any, ...]) -> Callable[[], object]:
    """The same in PyTorch, run once already."""
    from daceml_train.driver.checking import loss_of

    say("counting what PyTorch moves")
    if len(results) == 2:
        module, inputs = results
        run = _inference(module, inputs)
    else:
        module, inputs, loss, optimizer = results

        def run() -> None:
            given, *targets = as_tuple(inputs)
            optimizer.zero_grad()
            if isinstance(given, dict):
                output = module(**given)
            else:
                output = module(*as_tuple(given))
            try:
                value = loss(output, *targets) if loss is not None else loss_of(output)
            except TypeError as error:  # of a call of the loss
                raise Failure(f"the loss is called with the output and {len(targets)} targets: {error}") from error
            value.backward()
            optimizer.step()

    run()
    return run


def _run(options: argparse.Namespace) -> int:
    import numpy as np
    import torch

    import daceml_train as dt

    if not options.model.endswith(".onnx"):
        raise Failure(f"run takes an ONNX model, FILE.onnx, given {options.model}")
    module, inputs = onnx_model(options)
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
        path = options.output if options.output.suffix == ".npz" else Path(f"{options.output}.npz")  # as NumPy does
        try:
            with zipfile.ZipFile(path, "w") as archive:  # np.savez has parameters whose names results may have
                for name, value in results.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, _array(value))
        except OSError as error:
            raise Failure(f"{path} cannot be written: {error.strerror or error}", 2) from None
        say(f"written to {path}")
    return 0


def _array(value: Any) -> Any:
    """A result in NumPy, which has no bfloat16."""
    return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
