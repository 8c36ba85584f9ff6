"""Gradients that traced code computes itself, where TorchDynamo's graph would compute something else.

- `tensor.backward()` is traced as `autograd.grad` and assignments to `.grad` after the graph, where a whole step has
  gradients of its own.
- `autograd.grad(..., create_graph=True)` through an `autograd.Function`: a graph runs the function's backward on what
  forward has saved, as constants, so the derivative of the derivative lacks what flows through these. The same through
  a transformation of `torch.func`.
- `autograd.grad` in the backward of an `autograd.Function`, which computes once more what it differentiates: the graph
  of it runs without gradients, and fails.
- An `autograd.Function` in the backward of another one: it is traced as the operators of its forward, whose derivative
  is not the one that its backward says.

The graph breaks there, and PyTorch runs the call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import (
    AutogradFunctionVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    higher_order_ops,
)

from daceml_train.frontends.torch.traces import Traces, for_backend

_CREATE_GRAPH = 4
"""The position of this argument of `torch.autograd.grad`."""
_REASONS = {
    "autograd_function_apply": "an autograd.Function",
    **dict.fromkeys(("_unwrap_for_grad", "_remove_batch_dim", "_unpack_dual"), "torch.func"),
}
"""What a result may come from whose derivative a graph does not have, by the names of functions."""


@functools.cache
def _install() -> None:
    variable: Any = TensorVariable
    if (backward := getattr(variable, "method_backward", None)) is not None:  # else PyTorch breaks there itself

        def method_backward(self: Any, tx: Any, *given: Any, **more: Any) -> Any:
            if _is_ours(tx):
                _break("Tensor.backward() in traced code", "backward() in the forward pass adds to gradients.")
            return backward(self, tx, *given, **more)

        variable.method_backward = method_backward

    functions: Any = TorchInGraphFunctionVariable
    handlers = functions._get_handlers()
    if (handle := handlers.get(torch.autograd.grad)) is not None:

        def grad(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_ours(tx) and traces.backward:
                _break(
                    "autograd.grad in the backward of an autograd.Function",
                    "TorchDynamo's graph of it runs without gradients.",
                )
            create = args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else kwargs.get("create_graph")
            if _is_ours(tx) and _is_true(create) and (what := _between(args[:1] or [kwargs.get("outputs")])):
                why = "TorchDynamo's graph does not have its second derivative."
                _break(f"autograd.grad of {what}, with create_graph", why)
            return handle(self, tx, *args, **kwargs)

        handlers[torch.autograd.grad] = grad

    applied: Any = higher_order_ops.AutogradFunctionApplyVariable
    trace, apply = applied.trace_backward_graph, AutogradFunctionVariable.call_apply

    def trace_backward_graph(self: Any, *given: Any, **more: Any) -> Any:
        traces.backward += 1
        try:
            return trace(self, *given, **more)
        finally:
            traces.backward -= 1

    def call_apply(self: Any, tx: Any, *given: Any, **more: Any) -> Any:
        if _is_ours(tx) and traces.backward:
            _break(
                "an autograd.Function in the backward of another one",
                "TorchDynamo's graph does not have its derivative.",
            )
        return apply(self, tx, *given, **more)

    applied.trace_backward_graph = trace_backward_graph
    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]


def _is_ours(tx: Any) -> bool:
    return bool(traces.depth or for_backend(tx.output.compiler_fn))


def _is_true(argument: Any) -> bool:
    return argument is not None and argument.is_python_constant() and bool(argument.as_python_constant())


def _between(outputs: Sequence[Any]) -> str:
    """What traced tensors were computed by that a graph has no second derivative of; empty if there is nothing."""
    waiting: list[fx.Node] = []
    for output in outputs:
        waiting += [part.as_proxy().node for part in _parts(output)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (what := _REASONS.get(getattr(node.target, "__name__", ""))) is not None:
            return what
        waiting += (n for n in node.all_input_nodes if n not in seen)
        seen.update(node.all_input_nodes)
    return ""


def _parts(given: Any) -> list[TensorVariable]:
    """A traced tensor, or those in a traced tuple or list."""
    items = getattr(given, "items", None)
    return [part for part in (items if isinstance(items, list) else [given]) if isinstance(part, TensorVariable)]


def _break(what: str, why: str) -> None:
    unimplemented(gb_type=what, context="", explanation=why, hints=[*graph_break_hints.SUPPORTABLE])


class _GradientCalls(Traces):
    backward = 0
    """How many functions' backward this thread is tracing, one within another."""


traces = _GradientCalls(_install)
"""Traces that break at such a call."""
