"""Capture-only trace: what a call does as a graph of operators, without running it."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

from daceml_train.driver.binding import input_tensors
from daceml_train.errors import Invalid, Unsupported
from daceml_train.frontends.torch.capture.capture import Captured, capture
from daceml_train.frontends.torch.capture.rng_draws import Randomness
from daceml_train.frontends.torch.dynamo.tracing import describe, reason, traced, tracing
from daceml_train.ops.operator import Origin
from daceml_train.tensor import same


class DependsOnPython(Unsupported):
    """A step is not one program because of Python objects; it may still follow paths."""


class CaptureDone(Exception):
    """Carries what Dynamo captured out of its compiled code, so that nothing runs.

    `sources` say where Dynamo found the arguments. `guards` and `code` are those of a capture that an earlier process
    has made; `code` repeats what the user's code assigned, and is None if it assigned nothing.
    """

    def __init__(
        self,
        captured: Captured,
        arguments: Sequence[Any],
        sources: Sequence[Any] = (),
        guards: Any = None,
        code: types.CodeType | None = None,
    ) -> None:
        self.captured, self.arguments, self.sources, self.guards, self.code = captured, arguments, sources, guards, code
        super().__init__("captured")

    def guarded(self, function: Any, scope: dict[str, Any]) -> tuple[Any, types.CodeType | None]:
        """The guards of the capture, and the code that TorchDynamo generated for it.

        `function` was traced with the local variables `scope`.
        """
        if self.guards is not None:
            return self.guards, self.code
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
        found = next((entry for entry in entries if entry.guard_manager.check(scope)), None)
        if found is None:
            raise DependsOnPython("the step depends on something that its own capture changed")
        return found.guard_manager, found.code

    def with_graph(self, captured: Captured) -> CaptureDone:
        """The same call, whose graph has become another one."""
        return CaptureDone(captured, self.arguments, self.sources, self.guards, self.code)


@dataclass(frozen=True)
class CapturedCall:
    """A captured call: its graph, and the tensor for each graph input but the seed and random numbers."""

    captured: Captured
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def of(captured: Captured, arguments: Sequence[Any]) -> CapturedCall:
        """The metadata of the placeholders' values."""
        return CapturedCall(captured, input_tensors(captured, arguments))


def inside_module(captured: Captured, root: str) -> Captured:
    """The same, with module paths and names of inputs as they are inside the module that is called `root` there."""

    def inner(path: str) -> str:
        return path[len(root) + 1 :] if path == root or path.startswith(f"{root}.") else path

    def at(origin: Origin) -> Origin:
        return replace(origin, module=inner(origin.module)) if origin.module else origin

    graph = captured.graph.copy()
    graph.nodes = [replace(node, origin=at(node.origin)) for node in graph.nodes]
    graph.inputs = {name: replace(entry, path=inner(entry.path)) for name, entry in graph.inputs.items()}
    return replace(captured, graph=graph, fallbacks=tuple((name, at(origin)) for name, origin in captured.fallbacks))


def loss_first(captured: Captured) -> Captured:
    """The same with the loss as the graph's first output: the only one that carries a gradient.

    What the user's code keeps (`self.state = h.detach()`) are further results. Raises `Unsupported` where one of those
    carries a gradient, too, or where the loss is a part of one: the graph's output is then the whole of their memory,
    whose gradient is another one. So it is where the loss is a part of a parameter, which is no output of the graph.
    """
    pairs = zip(captured.outputs, captured.detached, strict=True)
    found = [o for o, detached in pairs if o.kind == "graph" and not detached]
    losses = {o.index for o in found}
    if not losses:
        raise Unsupported("the loss is a view of a parameter or of an argument, or carries no gradient")
    if len(losses) > 1:
        raise Unsupported("the model or the loss keeps tensors that carry a gradient in Python objects")
    whole = captured.graph.tensors[captured.graph.outputs[found[0].index]]
    if found[0].view is None and not same(whole.size, 1):
        raise Unsupported("the loss is no single number")
    if len(captured.outputs) < 2:
        return captured
    if any(o.view is not None for o in found):
        raise Unsupported("the loss shares memory with a tensor that the model or the loss keeps in a Python object")
    graph = captured.graph.copy()
    order = sorted(range(len(graph.outputs)), key=lambda i: i not in losses)
    graph.outputs = [graph.outputs[i] for i in order]
    outputs = tuple(replace(o, index=order.index(o.index)) if o.kind == "graph" else o for o in captured.outputs)
    return replace(captured, graph=graph, outputs=outputs)


def loss_graph(captured: Captured) -> Captured:
    """The loss of a model that is called `model`, as a step computes it."""
    return loss_first(inside_module(captured, "model"))


@contextlib.contextmanager
def as_refusal(model: torch.nn.Module, arguments: Sequence[Any]) -> Iterator[None]:
    """Raise `Invalid` where an operator does not take the sizes or types that it is given, as PyTorch would."""
    try:
        yield
    except TorchRuntimeError as error:
        message = f"{type(model).__name__} cannot be called with {describe(arguments)}: {reason(error)}"
        raise Invalid(message) from error


def _check_signature(model: torch.nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise `Invalid` for inputs that the module does not take."""
    try:
        inspect.signature(model.forward).bind(*inputs, **keywords)
    except TypeError as error:
        advice = "targets are for a loss, loss=" if inputs else "pass the model's inputs"
        count = len(inputs) + len(keywords)
        message = f"{type(model).__name__} does not take {count} input{'s' * (count != 1)}: {error}"
        raise Invalid(message, advice=advice) from None
    except ValueError:  # it has no signature that can be read
        return


def capture_call(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    randomness: Randomness = "seeded",
    keywords: Mapping[str, Any] | None = None,
    dynamic: bool = False,
) -> CapturedCall:
    """What `model(*inputs, **keywords)` computes, as one graph; for all sizes if `dynamic`.

    Raises `Unsupported` where it is not exactly one graph.
    """

    def backend(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        captured = capture(module, examples, randomness)

        def stop(*arguments: Any) -> Any:
            raise CaptureDone(captured, arguments)

        return stop

    _check_signature(model, inputs, keywords or {})
    options = {"dynamic": dynamic, "fullgraph": True}
    try:
        with tracing(), torch.enable_grad(), as_refusal(model, inputs):
            traced(type(model).forward, model, backend, **options)(*inputs, **(keywords or {}))
    except CaptureDone as stop:
        return CapturedCall.of(stop.captured, stop.arguments)
    except TorchDynamoException as error:
        raise Unsupported(
            f"the model is not one graph: {reason(error)}", advice="`daceml-train explain` lists what breaks it"
        ) from error
    raise Unsupported(f"{type(model).__name__}.forward computes nothing that can be captured")
