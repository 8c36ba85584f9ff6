"""Way: as PyTorch runs a program or with its lines for daceml_train, and what the program recorded."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.bound_step import BoundStep
from daceml_train.driver.function import CompiledGraph
from daceml_train.driver.module import Backend
from daceml_train.driver.step import TrainingStep

CHANGED = "# changed"
"""Ends each line of a program that differs from the same program without daceml_train."""


@dataclass
class Way:
    """One of two runs of a program: `ours` has the lines that end with `CHANGED`."""

    ours: bool
    seen: dict[str, Any] = field(default_factory=dict)
    """What is compared, by name."""
    loose: bool = False
    """Whether the program computes in bfloat16, which fused kernels round less often."""
    folder: str = ""
    """An empty one for the program's files."""
    said: list[str] = field(default_factory=list)
    """Why something ran as PyTorch runs it."""
    ran: int = 0
    """Programs that ran: forward passes of modules, and whole steps."""

    def optimize(self, model: nn.Module, **options: Any) -> nn.Module:
        """`dt.optimize(model)`, or the model itself."""
        return dt.optimize(model, **options) if self.ours else model

    def note(self, name: str, value: Any) -> None:
        """Keep something that is compared: a tensor, a number, or what is equal or not."""
        number = sum(known.split(" #")[0] == name for known in self.seen)
        self.seen[f"{name} #{number}"] = value.detach().clone() if isinstance(value, Tensor) else value

    def parameters(self, model: nn.Module) -> None:
        """Keep all that a model has in its state."""
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor):
                self.note(name, value)

    def surprises(self) -> list[str]:
        """Why something ran as PyTorch runs it, and that nothing was compiled at all."""
        found = list(dict.fromkeys(" ".join(reason.split()) for reason in self.said))
        return found or ([] if self.ran else ["no compiled program ran"])

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count the programs that run and note every reason, also of copies that a library makes of a module."""
        run, step, stop, pieces = CompiledGraph.forward, BoundStep.run, Backend.break_off, TrainingStep._break

        def ran(graph: Any, *arguments: Any, **keywords: Any) -> Any:
            self.ran += 1
            return run(graph, *arguments, **keywords)

        def stepped(bound: Any, *arguments: Any, **keywords: Any) -> Any:
            self.ran += 1
            return step(bound, *arguments, **keywords)

        def stopped(backend: Any, reason: str) -> None:
            self.said.append(reason)
            stop(backend, reason)

        def broken(training: Any, *arguments: Any, **keywords: Any) -> None:
            pieces(training, *arguments, **keywords)
            self.said.append(training.breaks[-1])

        CompiledGraph.forward, BoundStep.run, Backend.break_off = ran, stepped, stopped  # type: ignore[method-assign]
        TrainingStep._break = broken  # type: ignore[method-assign]
        try:
            yield
        finally:
            CompiledGraph.forward, BoundStep.run, Backend.break_off = run, step, stop  # type: ignore[method-assign]
            TrainingStep._break = pieces  # type: ignore[method-assign]


Program = Callable[[Way], None]


def changed_lines(program: Program) -> int:
    """The lines that a user changes: those that are marked, and the import."""
    return 1 + sum(
        line.rstrip().endswith(CHANGED) for line in inspect.getsource(getattr(program, "func", program)).splitlines()
    )


def vision() -> Any:
    """torchvision; where its binary is that of another build of PyTorch, without the operators of that binary."""
    try:
        import torchvision
    except RuntimeError:  # operator torchvision::nms does not exist: Python registers rules for such while it is loaded
        declared = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        DECLARED.append(declared)
        import torchvision
    return torchvision


DECLARED: list[Any] = []
"""Libraries of operators live as long as their object."""


def quiet() -> None:
    """Neither the clients' notes nor ours: what ours say is in `Way.surprises`."""
    warnings.simplefilter("ignore")


__all__ = ["Program", "Way", "changed_lines", "quiet", "vision"]
