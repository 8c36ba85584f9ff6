"""Steps and modules that run a changed SDFG: `from_sdfg`, the way back from `step.sdfg` and `module.sdfg`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from daceml_train.driver.capture_only import capture_call
from daceml_train.driver.goals import WholeStep
from daceml_train.driver.module import Backend, optimized, original, state_of
from daceml_train.driver.options import Options
from daceml_train.driver.sdfg_programs import (
    Source,
    check_signature,
    check_source,
    compile_given,
    read_sdfg,
    sdfg_of,
)
from daceml_train.driver.settings import Settings
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import DacemlError, Invalid, Unsupported
from daceml_train.frontends.torch.capture.capture import Captured, capture
from daceml_train.frontends.torch.dynamo.tracing import reason
from daceml_train.graph.graph import Graph
from daceml_train.lowering.device import Device
from daceml_train.runtime.arenas import new_arena
from daceml_train.training.joint import Trained, joint_graph


class GivenStep(TrainingStep):
    """A training step that runs a given graph. It runs as one program, or raises an error: never in pieces."""

    keeps_state = False
    whole_batches = False

    def __init__(self, step: TrainingStep, given: Graph, source: Source) -> None:
        own = (_sized(step.options, given), step.keep_gradients, step.clipping, step.scaler, step.schedule)
        super().__init__(step.model, step.loss, step.optimizer, *own)
        self.given, self.source = given, source
        self._replaced: dict[int, tuple[Captured, Captured]] = {}

    def sdfg(self, inputs: Any, *targets: Any, extent: str = "") -> Any:
        """The SDFG that this step runs, to be changed further. Its extent is that of the one that was given."""
        if extent not in ("", self.source.extent):
            raise Invalid(f"this step is from an SDFG of a {self.source.extent}, which tells nothing of a {extent}")
        captured = self.seen(inputs, *targets).captured.graph
        check_source(self.source, self.given, captured)
        return sdfg_of(self.given, self.source.extent, captured, self)

    def _compiled(
        self, captured: Captured, trained: Sequence[Trained], kept: Sequence[str], device: Device, further: int = 0
    ) -> WholeStep:
        if self.source.extent == "loss":
            return super()._compiled(self._with_given(captured), trained, kept, device, further)
        gradients = self._gradients()
        key = (id(captured), tuple(trained), tuple(kept), gradients)
        if key not in self._steps:
            check_source(self.source, self.given, captured.graph)
            if any(t.first for t in trained):
                raise Invalid(
                    "the SDFG is of a step that finds the optimizer's state, which the first step makes",
                    advice="run the unchanged step once before",
                )
            forward = self.options.pipeline.run(captured.graph, ("forward",))
            like = joint_graph(forward, trained, kept, gradients, further)
            arena = self.arenas.setdefault(device, new_arena(device))
            step = compile_given(self.given, like, self.options, arena, device)
            self._steps[key] = captured, step  # `captured` is held so that its id stays its own
            self.records += step.records
        return self._steps[key][1]

    def _with_given(self, captured: Captured) -> Captured:
        if id(captured) not in self._replaced:
            self._replaced[id(captured)] = captured, _replaced(captured, self.given, self.source)
        return self._replaced[id(captured)][1]

    def _break(self, key: Any, error: BaseException, ours: bool = False) -> None:
        if isinstance(error, DacemlError):
            raise error
        raise Unsupported(f"a step from an SDFG is one program, {reason(error, ours)}") from error

    def _run_in_pieces(self, key: Any, inputs: Any, targets: Sequence[Any]) -> torch.Tensor:
        raise Unsupported(
            "a step from an SDFG is one program, this call cannot be: the optimizer has hooks, or an argument lies in "
            "memory that the step writes"
        )


class GivenBackend(Backend):
    """A TorchDynamo backend that compiles a given graph in place of the one captured, or raises an error."""

    alone = True

    def __init__(self, options: Settings, given: Graph, source: Source) -> None:
        super().__init__(_sized(options, given))
        self.given, self.source = given, source

    def __call__(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return self.compile(module, examples)

    def break_off(self, reason: str) -> None:
        raise Unsupported(f"a module from an SDFG runs as that: {reason}")

    def capture(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Captured:
        return _replaced(capture(module, examples, self.options.randomness), self.given, self.source)

    def eager(self, module: torch.fx.GraphModule) -> Callable[..., Any]:
        def refuse(*arguments: Any) -> Any:
            raise Unsupported(
                "a module from an SDFG has no gradient of a gradient, none of a batch of cotangents, and writes no "
                "memory that an argument shares"
            )

        return refuse

    def sdfg(self, captured: Captured, owner: object) -> Any:
        check_source(self.source, self.given, captured.graph)
        return sdfg_of(self.given, "module", captured.graph, owner)


def _sized(options: Settings, given: Graph) -> Settings:
    """The options, by which sizes are captured as a given graph has them."""
    return dataclasses.replace(options, dynamic=bool(given.symbols))


def _replaced(captured: Captured, given: Graph, source: Source) -> Captured:
    """What was captured, with a given graph for its own. Raises `Invalid` where the given one cannot be called so."""
    check_source(source, given, captured.graph)
    check_signature(given, captured.graph)
    return dataclasses.replace(captured, graph=given)


def to_sdfg(subject: TrainingStep | torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
    """What a training step or a module computes on these arguments, as an SDFG of library nodes, one per operator.

    Change it with DaCe's API or transformations, then hand it to `from_sdfg`. A module that is not from `optimize` is
    taken as if it were.
    """
    if isinstance(subject, TrainingStep):
        return subject.sdfg(*arguments, **keywords)
    if not isinstance(subject, torch.nn.Module):
        raise Invalid(f"to_sdfg takes a training step or a module, given {type(subject).__name__}")
    state = state_of(subject)
    settings = Options().settings() if state is None else state.options
    backend = Backend(settings) if state is None else state.backend
    seen = capture_call(original(subject), arguments, settings.randomness, keywords, settings.dynamic is True)
    return backend.sdfg(seen.captured, subject)


def from_sdfg(sdfg: Any, of: TrainingStep | torch.nn.Module | None = None) -> Any:
    """A training step or a module that runs `sdfg` in place of what it was made from.

    The model, the optimizer, parameters, state and options are those of `of`: the step or module that the SDFG was made
    from, or, for an SDFG from a file, one like it. What the SDFG says is what runs: where it cannot, an error says why,
    also at a call whose arguments capture another graph than the SDFG was made from. Raises `Invalid` for an SDFG that
    holds anything but operators.
    """
    given, source = read_sdfg(sdfg)
    owner = source.owner if of is None else of
    if owner is None:
        raise Invalid(f"what SDFG {sdfg.name!r} was made from is not in this process", advice="from_sdfg(sdfg, step)")
    kind = "a module" if source.extent == "module" else "a training step"
    if source.extent == "module" and isinstance(owner, torch.nn.Module):
        state = state_of(owner)
        settings = Options().settings() if state is None else state.options
        backend = GivenBackend(settings, given, source)
        return optimized(owner, backend.options, backend)
    if source.extent != "module" and isinstance(owner, TrainingStep) and type(owner) in (TrainingStep, GivenStep):
        return GivenStep(owner, given, source)
    raise Invalid(f"SDFG {sdfg.name!r} is one of {kind}, given {type(owner).__name__}")


__all__ = ["GivenBackend", "GivenStep", "from_sdfg", "to_sdfg"]
