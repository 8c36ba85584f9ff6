"""explain: the graphs of a model, what breaks them, what falls back, with the user's line and what to change.

A model that calls itself over data has no graphs: what is told of it is what was recorded, and runs level by level.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._dynamo.exc import TorchDynamoException

from daceml_train.driver.checking import check_module
from daceml_train.driver.module import optimized, original, state_of
from daceml_train.driver.recursion import recursion_of
from daceml_train.driver.settings import Settings
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import DacemlError, Invalid
from daceml_train.frontends.torch.capture.capture import capture
from daceml_train.frontends.torch.dynamo.graph_breaks import DECIDED, explained
from daceml_train.frontends.torch.dynamo.tracing import reason, traced, tracing
from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Match
from daceml_train.transformations.pipelines import TRAINING

_ADVICE = (
    (
        (
            "generic_jump",
            DECIDED,
            "data-dependent",
            "data dependent",
            "jump on",
            "Tensor.item",
            ".item()",
            "_local_scalar_dense",
        ),
        "a Python decision on a tensor's value ends the graph: use torch.where, or decide outside of the model",
    ),
    (
        ("print", "logging", "warnings.warn"),
        "move the message out of forward, or guard it by `if not torch.compiler.is_compiling()`",
    ),
    (("numpy", "from_numpy"), "compute with torch instead of NumPy inside forward"),
    (("generator", "yield"), "return a list or tuple instead of yielding"),
    (("hook",), "remove the hook, or run this module outside of the compiled one"),
    (
        ("size depends on data", "dynamic shape", "nonzero", "unique"),
        "the result's size depends on values: use a mask and a fixed size where that is possible",
    ),
)
"""A phrase in a reason -> what to change."""
_OTHERWISE = "move this call out of forward, or let it run in PyTorch: the rest is compiled around it"
_FALLBACK = (
    "it runs in PyTorch, forward and backward, and does not fuse; an operator of your own would: "
    "docs/guide/writing-an-operator.md"
)

_LEVELS = (
    "it runs in PyTorch, and the rest level by level; dt.report of the compiled model has the time of each program"
)
_NEAR = "it is compiled; written as the pass expects it, it would be faster"


@dataclass(frozen=True)
class Note:
    """One thing that is not compiled, `kind` is `break`, `fallback` or `refused`, or a `near miss` of a pass."""

    kind: str
    what: str
    where: str
    advice: str
    count: int = 1


@dataclass
class Explanation:
    """The result of TorchDynamo and the frontend for a model; `str()` is a table."""

    name: str
    graphs: list[int] = field(default_factory=list)
    """Operators of each graph; 0 for one that runs in PyTorch."""
    notes: list[Note] = field(default_factory=list)
    levels: str = ""
    """What a recursion runs as, if the model is one."""

    @property
    def whole(self) -> bool:
        """Whether the model is one graph, or levels of a recursion, without fallbacks."""
        return (len(self.graphs) == 1 or bool(self.levels)) and len(self.of("near miss")) == len(self.notes)

    def of(self, kind: str) -> list[Note]:
        """The notes of one kind."""
        return [note for note in self.notes if note.kind == kind]

    def __rich__(self) -> Table:
        count = len(self.graphs)
        operators = f"{sum(self.graphs)} operators in {count} graph{'s' if count != 1 else ''}"
        title = f"{self.name}: {self.levels or operators}"
        table = Table("", "what", "where", "what to change", title=title, title_justify="left")
        if len(self.of("near miss")) == len(self.notes):
            table.add_row("", "everything is compiled", "", "")
        for note in self.notes:
            times = f" x {note.count}" if note.count > 1 else ""
            table.add_row(note.kind, note.what + times, note.where, note.advice)
        return table

    def __str__(self) -> str:
        console = Console(width=120, file=None, force_terminal=False)
        with console.capture() as captured:
            console.print(self, markup=False)
        return captured.get().rstrip()


def explain(model: torch.nn.Module, *inputs: Any, **keywords: Any) -> Explanation:
    """How `model` is captured on these inputs; it runs once, on a copy, in PyTorch.

    A model that calls itself over data is compiled and runs once on a copy, with the options of `model`.
    """
    if isinstance(model, TrainingStep):
        name = type(model.model).__name__
        advice = "dt.report(step) says what the step runs; dt.debug.explain(step.model, *inputs) what its model is"
        raise Invalid(f"explain takes a module, given a training step of {name}", advice=advice)
    check_module("explain", model)
    state = state_of(model)
    model = copy.deepcopy(original(model))
    explanation = Explanation(type(model).__name__)
    if _by_levels(explanation, model, state.options if state else Settings(), inputs, keywords):
        return explanation
    found: dict[tuple[str, str, str], tuple[str, int]] = {}

    def note(kind: str, what: str, where: str, advice: str) -> None:
        _, count = found.get((kind, what, where), ("", 0))
        found[kind, what, where] = advice, count + 1

    def backend(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        ended = getattr(gm, "compile_subgraph_reason", None)
        if ended is not None and getattr(ended, "graph_break", False):
            note("break", _sentence(str(ended.reason)), _line(ended.user_stack), _advice(str(ended.reason)))
        try:
            captured = capture(gm, examples)
        except DacemlError as error:
            explanation.graphs.append(0)
            note("refused", error.message, error.where, error.advice or _advice(error.message))
        else:
            explanation.graphs.append(len(captured.graph.nodes))
            for operator, origin in captured.fallbacks:
                note("fallback", operator, str(origin), _FALLBACK)
            for name, sentence, where in near_misses(captured.graph):
                note("near miss", f"{name}: {sentence}", where, _NEAR)
        return gm.forward

    torch._dynamo.reset()
    try:
        with tracing():
            traced(type(model).forward, model, backend)(*inputs, **keywords)
    except TorchDynamoException as error:
        note("refused", _sentence(reason(error)), "", _advice(str(error)))
        model(*inputs, **keywords)  # where that fails too, the model is at fault, and PyTorch says so
    if not explanation.graphs and not found:
        note("refused", f"TorchDynamo finds nothing that it can compile in {explanation.name}.forward", "", _OTHERWISE)
    explanation.notes = [Note(*key, advice, count) for key, (advice, count) in found.items()]
    return explanation


def _by_levels(
    explanation: Explanation, model: torch.nn.Module, options: Settings, inputs: Sequence[Any], keywords: dict[str, Any]
) -> bool:
    """Whether the model is a recursion, of which the explanation then tells what runs."""
    if recursion_of(model, type(model).forward, arguments=(*inputs, *keywords.values())) is None:
        return False
    random = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are the notes
        compiled: Any = optimized(copy.deepcopy(model), options)
        compiled(*inputs, **keywords)
    state = state_of(compiled)
    recursion = state.recursions.get("forward") if state else None
    if state is None or recursion is None or not recursion.serves:
        torch.random.set_rng_state(random)
        return False
    programs = len(recursion.structures.programs.programs)
    kinds = len(recursion.structures.cells)
    runs = f"in {programs} program{'s' * (programs != 1)}" if programs else "in PyTorch"
    explanation.levels = (
        f"a recursion that PyTorch runs call by call: {recursion.refused}"
        if recursion.refused
        else f"a recursion, recorded and run level by level: {kinds} kind{'s' * (kinds != 1)} of cells {runs}"
    )
    for reason_ in dict.fromkeys(state.backend.breaks):
        explanation.notes.append(Note("fallback", reason_, "", _LEVELS))
    return True


def near_misses(graph: Graph) -> Iterator[tuple[str, str, str]]:
    """Pass, sentence and line of each place that a pass on the forward graph almost recognizes."""
    for transformation in TRAINING.level("forward"):
        for candidate in transformation.matches(graph):
            if isinstance(candidate, Match) and candidate.near_miss:
                yield transformation.name, candidate.near_miss, str(candidate.root.origin)
        graph = transformation.run(graph)


def _sentence(text: str) -> str:
    return explained(text) or text.strip().splitlines()[0]


def _line(stack: Sequence[Any] | None) -> str:
    frames = list(stack or ())
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _advice(text: str) -> str:
    return next((advice for marks, advice in _ADVICE if any(mark in text for mark in marks)), _OTHERWISE)
