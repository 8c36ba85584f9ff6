"""Launches of a training step that only copy, and their bytes; nothing is executed.

    python -m benchmarks.copies [NETWORK...] [--small] [--target cpu|cuda] [--precision float32|bfloat16] [--show N]

A copy is a launch that computes nothing: a new value that is written back to its parameter or state, an operand in
another layout, an output. For `cuda` the program is the one that a GPU would run; none is needed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch._dynamo

import daceml_train as dt
from benchmarks.networks import TWELVE
from benchmarks.networks.network import Network
from daceml_train.driver import compile as compiling
from daceml_train.lowering.cost import Cost
from daceml_train.lowering.device import Device
from daceml_train.runtime.gpu.toolchain import CudaToolchain
from daceml_train.runtime.placement import device_override

PROCESSORS = 132
"""Multiprocessors of the device for which `cuda` programs are lowered: those of an H100."""


@dataclass(frozen=True)
class Copies:
    """The launches and bytes of a step, and how many of them are copies."""

    launches: int
    bytes: int
    copies: int
    copied: int
    largest: tuple[str, ...] = ()

    def __str__(self) -> str:
        share = 100 * self.copied / max(1, self.bytes)
        return (
            f"{self.launches:5} launches, {self.copies:4} of them copies; "
            f"{self.bytes / 1e6:8.1f} MB, {self.copied / 1e6:7.2f} MB of them copied ({share:4.1f} %)"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copies", description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(TWELVE)} (default: all)")
    parser.add_argument("--small", action="store_true", help="the networks' small sizes")
    parser.add_argument("--target", choices=("cpu", "cuda"), action="append", help="default: both")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), action="append", help="default: both")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="name the N largest copies")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.networks if name not in TWELVE]:
        parser.error(f"no network is called {unknown[0]!r}; known: {', '.join(TWELVE)}")
    warnings.simplefilter("ignore")
    for name in options.networks or TWELVE:
        for precision in options.precision or ("float32", "bfloat16"):
            for target in options.target or ("cpu", "cuda"):
                found = copies(TWELVE[name], target, precision == "bfloat16", options.small, options.show)
                print(f"{name:16} {precision:8} {target:4} {found}", flush=True)
                for line in found.largest:
                    print(f"    {line}", flush=True)
    return 0


class _Lowered(BaseException):
    """Ends a step once its program is lowered; not an `Exception`, which would make the step run in PyTorch."""

    def __init__(self, compiled: compiling.Compiled) -> None:
        super().__init__()
        self.compiled = compiled


def copies(network: Network, target: str, autocast: bool = False, small: bool = False, show: int = 0) -> Copies:
    """The copies of a network's second step, whose optimizer has its state."""
    torch._dynamo.reset()
    problem = network.build(small=small)
    for parameter in problem.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    problem.optimizer.step()
    problem.optimizer.zero_grad(set_to_none=True)
    if autocast:
        problem = problem.autocast()
    with _stopped(target), TemporaryDirectory() as folder:
        step = dt.training_step(problem.model, problem.loss, problem.optimizer, cache=folder)
        try:
            step(problem.inputs, problem.targets)
        except _Lowered as lowered:
            if step.breaks or any(program.name != "training_step" for program in lowered.compiled.programs):
                raise RuntimeError(f"the step is not one program: {step.breaks}") from None
            return counted(lowered.compiled, show)
    raise RuntimeError(f"the step was not compiled: {step.breaks}")


@contextmanager
def _stopped(target: str) -> Iterator[None]:
    """Within it, compilation ends after lowering, for a device of this kind."""

    def stop(compiled: Any, *rest: Any) -> Any:
        raise _Lowered(compiled)

    before = compiling.generate
    with ExitStack() as stack:
        if target == "cuda":
            stack.enter_context(device_override(lambda given: _Lowering()))
        compiling.generate = stop
        try:
            yield
        finally:
            compiling.generate = before


class _Lowering(Device):
    """A GPU for which programs are lowered only."""

    target, name, torch = "cuda", "none", torch.device("cpu")

    def __init__(self) -> None:
        self.toolchain = CudaToolchain((9, 0), PROCESSORS)


def counted(compiled: compiling.Compiled, show: int = 0) -> Copies:
    """The copies of a compiled step."""
    costs = [cost for record in compiled.records for cost in record.costs]
    moved = sorted((c for c in costs if c.operators == "copy"), key=lambda c: -_bytes(c))
    largest = tuple(f"{_bytes(c) / 1e6:8.3f} MB  {c.source}" for c in moved[:show])
    return Copies(len(costs), sum(map(_bytes, costs)), len(moved), sum(map(_bytes, moved)), largest)


def _bytes(cost: Cost) -> int:
    return int(cost.bytes)


if __name__ == "__main__":
    sys.exit(main())
