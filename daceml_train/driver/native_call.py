"""Calls of a compiled graph without Python: the forward program, and a node of autograd with the backward program.

Python runs the first calls, after which layouts, libraries and threads are settled, and each call that is not as usual:
other sizes, a measurement, forward-mode differentiation, compiled autograd, a subclass of tensors, memory that is
written and shared; in the backward pass a gradient of a gradient, or a result that the loss does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch._dynamo
from torch._dynamo import compiled_autograd

from daceml_train.driver.backward_pass import Compiled
from daceml_train.driver.prepacked import Prepared
from daceml_train.graph.node import SEED
from daceml_train.lowering.device import CPU
from daceml_train.runtime.bound_plan import BoundPlan
from daceml_train.runtime.executable import Executable
from daceml_train.runtime.executor import Plan
from daceml_train.runtime.native_library import library

CHANGES = 16
"""How often a function may be given other plans: beyond that, sizes change from call to call."""

SIZES_CHANGE = "sizes change from call to call"
"""Why each call needs Python from there on, but for those of the last sizes."""

Strides = tuple[tuple[int, ...] | None, ...]

_ATTRIBUTE, _SEED = -1, -2
"""What stands for the position of an argument."""


class NativeCall:
    """The native function of a compiled graph, which calls `python` until it has plans, and where it must.

    Random numbers of eager execution are drawn before, and are its first arguments.
    """

    def __init__(self, graph: Compiled, python: Callable[..., Any], backward: Callable[..., Any]) -> None:
        probe = torch.empty((), device="cpu")
        captured, compiled = graph.captured, graph.compiled
        sources = {source.name: source for source in captured.inputs}
        drawn = list(captured.draws)
        positions: list[int | None] = []
        attributes: list[Any] = []
        numbers: list[int] = []
        for i, name in enumerate(graph.names):
            if name in captured.draws:
                attributes.append(None)
                positions.append(drawn.index(name))
                continue
            source = sources.get(name)
            attribute = source is not None and source.kind == "attribute"
            attributes.append(source.value if attribute and source is not None else None)
            numbers += [i] if source is not None and source.kind == "number" else []
            place = None if source is None or source.position is None else len(drawn) + source.position
            positions.append(_SEED if source is None else _ATTRIBUTE if attribute else place)
        differentiable = sorted(graph.differentiable)
        description = (
            python,
            backward,
            torch.Tensor,
            torch.nn.Parameter,
            int,
            probe,
            probe._cdata,
            tuple(positions),
            tuple(attributes),
            tuple(numbers),
            compiled.results if compiled.backward is not None else len(captured.graph.outputs),
            tuple(source.index for source in captured.outputs),
            tuple(differentiable),
            tuple(graph.kept),
            tuple(graph.names.index(name) for name in captured.graph.writes),
            tuple(differentiable.index(i) for i in compiled.cotangents),
            tuple(number for pair in graph.wanted.items() for number in pair),
            tuple(number for pair in graph.changes for number in pair),
            vars(compiled_autograd),
            "compiled_autograd_enabled",
            True,
        )
        self.function: Any = library().compiled_call_create(description)
        self._given: tuple[Any, ...] = ()
        self._changes, self._records = 0, compiled.records[:1]

    @property
    def runs(self) -> int:
        """How many calls ran without Python."""
        return int(library().compiled_call_runs(self.function))

    def use(
        self,
        forward: BoundPlan | None,
        backward: BoundPlan | None,
        copied: Strides = (),
        prepared: Prepared | None = None,
    ) -> None:
        """Run these plans from here on, if nothing is measured or searched any more; None: Python runs the program.

        `copied`: per result, the strides of its copy, if it is copied; `prepared`: what the forward program takes
        instead of all inputs.
        """
        seen = None if prepared is None else prepared.seen
        given = forward, backward, library().compiled_calls_epoch(), seen, copied
        if forward is None or given == self._given:
            return
        if self._changes >= CHANGES:
            for record in self._records:
                record.needs_python = SIZES_CHANGE
            return
        if any(plan is not None and not _is_settled(plan) for plan in (forward, backward)):
            return
        self._changes += given[:2] != self._given[:2]
        self._given = given
        both = forward, backward
        outputs = [() if plan is None else tuple(plan.outputs) for plan in both]
        told = *map(_told, both), *map(_failed, both)
        rest = (*outputs, *told, forward.threads, given, copied, *(((), 0, (), ()) if prepared is None else prepared))
        library().compiled_call_programs(self.function, _handle(forward), _handle(backward), rest)


def native_call(graph: Compiled, python: Callable[..., Any], backward: Callable[..., Any]) -> NativeCall | None:
    """The native function of a compiled graph; None for a graph whose calls need Python."""
    forward = graph.compiled.forward
    if not isinstance(forward, Executable) or forward.device is not CPU or needs_python(graph):  # or a test's
        return None
    found = NativeCall(graph, python, backward)
    return found if found.function is not None else None


def needs_python(graph: Compiled) -> str:
    """Why each call of a graph on a CPU needs Python; empty where none does."""
    captured = graph.captured
    if graph.copied:
        names = ", ".join(captured.graph.inputs[graph.names[i]].path or graph.names[i] for i in sorted(graph.copied))
        return f"{names} may change before the backward pass, for which a copy is kept"
    if graph.compiled.sparse:
        return "a gradient is sparse"
    if captured.selection is not None:
        return "sizes depend on the values of arguments"
    if captured.draws and (captured.graph.writes or not all(draw.settled for draw in captured.draws.values())):
        return "PyTorch draws random numbers of sizes that change, or beside changes in place"
    if SEED in graph.names and graph.names.index(SEED) not in graph.kept and _differentiates_arguments(graph):
        return "a gradient that is differentiated again would need its random numbers"
    if graph.only_in_pytorch:
        return graph.only_in_pytorch
    if not captured.flat or not captured.outputs:
        return "the results are not a flat tuple"
    for source, detached in zip(captured.outputs, captured.detached, strict=True):
        if source.kind != "graph":
            return "a result is a size, a constant, or an argument"
        if source.view is not None:
            return "a result is a view"
        if source.version:
            return "a result was changed in place"
        if detached and source.index in graph.differentiable:
            return "a result is returned with and without its gradient"
    return ""


def _differentiates_arguments(graph: Compiled) -> bool:
    return any(s.kind == "tensor" and graph.names.index(s.name) in graph.wanted for s in graph.captured.inputs)


def _is_settled(bound: BoundPlan) -> bool:
    """Whether a plan runs as it is from here on, and hands over each output as it is."""
    searched = bound.launch_threads is None or bound.launch_threads.done
    positions = [position for position, *_ in bound.outputs]
    views = [position for position, *layout in bound.outputs if layout]
    return bound.timing is None and searched and all(positions.count(position) == 1 for position in views)


def _handle(bound: BoundPlan | None) -> Any:
    return bound.plan._handle if bound is not None and isinstance(bound.plan, Plan) else None


def _told(bound: BoundPlan | None) -> Callable[[float], Any] | None:
    """What is told the seconds of a run; TorchDynamo is at work where it is called."""
    if bound is None or bound.contention is None:
        return None
    return cast("Callable[[float], Any]", torch._dynamo.disable(bound.contention.add))


def _failed(bound: BoundPlan | None) -> Callable[[int], Any] | None:
    """What raises the error of a run, in the thread of that run, given its status."""
    return None if bound is None else cast("Callable[[int], Any]", torch._dynamo.disable(bound.fail))


__all__ = ["NativeCall", "native_call", "needs_python"]
