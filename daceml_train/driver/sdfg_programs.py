"""Programs from SDFGs of operators: what such an SDFG was made from, and the goal of a graph that is given whole."""

from __future__ import annotations

import hashlib
import json
import uuid
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from daceml_train.driver.compile import Compilation, Goal, Part, compile_graph
from daceml_train.driver.goals import WholeStep
from daceml_train.driver.inference import without_detach
from daceml_train.driver.settings import Settings
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph, Input
from daceml_train.graph.text import canonical_text
from daceml_train.lowering.device import Device
from daceml_train.passes.base import without_dead_code
from daceml_train.runtime.arenas import AnyArena
from daceml_train.training.joint import Joint, StepInterface

Extent = Literal["step", "loss", "module"]
"""What an SDFG holds: a whole step; its forward pass up to the loss; or the forward pass of a module."""

_OWNERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""Token -> the step or module whose SDFGs carry it."""
_KEPT: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""SDFG -> the step or module that it was made from, which lives as long as the SDFG. Copies have the token."""
_TOKENS: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Source:
    """What an SDFG was made from: its extent, the hash of the captured graph, and the token of the step or module."""

    extent: Extent
    graph: str
    token: str

    @property
    def owner(self) -> Any:
        """The step or module, if it is of this process and still there; else None."""
        return _OWNERS.get(self.token)


def fingerprint(captured: Graph) -> str:
    """A hash of a captured graph, the same with and without gradients."""
    return hashlib.sha256(canonical_text(without_detach(captured)).encode()).hexdigest()


def sdfg_of(graph: Graph, extent: Extent, captured: Graph, owner: object) -> Any:
    """The SDFG of a graph that stands for (a part of) what `owner` runs, as `captured` on some arguments."""
    from daceml_train.sdfg.convert import note_source, to_sdfg  # brings DaCe in, which nothing else needs

    token = _TOKENS.setdefault(owner, uuid.uuid4().hex)
    sdfg = to_sdfg(graph)
    _OWNERS[token] = _KEPT[sdfg] = owner
    note_source(sdfg, json.dumps(asdict(Source(extent, fingerprint(captured), token))))
    return sdfg


def read_sdfg(sdfg: Any) -> tuple[Graph, Source]:
    """The graph of an SDFG as it is now, and what it was made from. Raises `Invalid` for other SDFGs."""
    from daceml_train.sdfg.convert import from_sdfg, source_of

    if not hasattr(sdfg, "global_code"):
        raise Invalid(f"from_sdfg takes an SDFG, given {type(sdfg).__name__}")
    if not (line := source_of(sdfg)):
        raise Invalid(
            f"SDFG {sdfg.name!r} is not one of a training step or a module",
            advice="step.sdfg(...), module.sdfg(...) and daceml_train.to_sdfg make such SDFGs",
        )
    return from_sdfg(sdfg), Source(**json.loads(line))


def check_source(source: Source, given: Graph, captured: Graph) -> None:
    """Raise `Invalid` unless what is called now is what the SDFG was made from."""
    if fingerprint(captured) == source.graph:
        return
    changed = [
        f"{entry.path or name} is {entry.tensor}, in the SDFG {given.inputs[name].tensor}"
        for name, entry in captured.inputs.items()
        if name in given.inputs and given.inputs[name].tensor != entry.tensor
    ]
    what = "; ".join(changed) or "the model, its mode or its arguments are others"
    raise Invalid(
        f"SDFG {given.name!r} was made from another graph than this call captures: {what}",
        advice="make an SDFG for these arguments; with dynamic=True, one is for all sizes",
    )


def check_signature(given: Graph, expected: Graph) -> None:
    """Raise `Invalid` where a changed graph cannot be called as the unchanged one: other inputs, results or writes."""
    inputs = _inputs(given.inputs), _inputs(expected.inputs)
    if list(inputs[0].items()) != list(inputs[1].items()):
        names = sorted(n for n in inputs[0].keys() | inputs[1].keys() if inputs[0].get(n) != inputs[1].get(n))
        raise Invalid(f"SDFG {given.name!r} has other inputs than the step: {', '.join(names) or 'another order'}")
    if set(given.writes) != set(expected.writes):
        names = sorted({*given.writes} ^ {*expected.writes})
        raise Invalid(f"SDFG {given.name!r} updates other arrays than the step: {', '.join(names)}")
    pairs = zip(given.outputs, expected.outputs, strict=False)
    unlike = [(a, given.tensors[a], expected.tensors[b]) for a, b in pairs]
    unlike = [(a, x, y) for a, x, y in unlike if (x.shape, x.dtype) != (y.shape, y.dtype)]
    if len(given.outputs) != len(expected.outputs) or unlike:
        counts = f"{len(given.outputs)} results, expected {len(expected.outputs)}"
        what = "; ".join(f"{name} is {x}, expected {y}" for name, x, y in unlike) or counts
        raise Invalid(f"SDFG {given.name!r} has other results than the step: {what}")


def _inputs(inputs: Mapping[str, Input]) -> dict[str, Any]:
    return {name: (entry.tensor, entry.role) for name, entry in inputs.items()}


@dataclass
class GivenGoal(Goal):
    """A graph that is given whole, with gradients and update: it is compiled as it is."""

    called: StepInterface
    from_capture = False

    @property
    def description(self) -> str:
        return f"given {self.called}"

    def divide(self, compilation: Compilation) -> Iterator[Part]:
        yield Part(without_dead_code(compilation.graph), compilation.record)

    def interface(self) -> StepInterface:
        return self.called


def compile_given(graph: Graph, like: Joint, options: Settings, arena: AnyArena | None, device: Device) -> WholeStep:
    """Compile a whole step that is given as a graph, which is called as `like` is.

    Steps with the same `arena` must not run at the same time. Raises `Invalid` where it cannot be called so.
    """
    check_signature(graph, like.graph)
    result = compile_graph(graph, GivenGoal(like.interface), options, device, arena)
    return WholeStep(executable=result.executables[0], records=result.records, **vars(result.interface))
