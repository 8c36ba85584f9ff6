"""Gradients that are differentiated again, by programs.

To autograd, what a call saves for its gradients is a result of the call, so that the derivative of a gradient flows
back through the call, and nothing is computed twice (`ConnectedCalls`). Before it is known that most gradients are
differentiated again, PyTorch computes them, so that a single one compiles nothing. A graph that draws random numbers or
updates buffers, which PyTorch cannot repeat, is computed once more by a program, from the same seed and without its
updates (`differentiable_gradients.Gradients`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from daceml_train.driver.backward_pass import (
    Call,
    eager_gradients,
    filled,
    is_batched,
    plain,
    refusal,
    version_of,
)
from daceml_train.driver.binding import apart, counted, laid_out, sizes_of
from daceml_train.driver.differentiable_gradients import (
    Compile,
    Cotangents,
    Gradients,
    reached_again,
    with_gradient,
)
from daceml_train.driver.function import CompiledGraph, run_with_layout, without_history
from daceml_train.driver.goals import Differentiable, compile_differentiable
from daceml_train.driver.records import Record
from daceml_train.driver.settings import Settings
from daceml_train.errors import DacemlError, Unsupported, why
from daceml_train.graph.graph import Graph
from daceml_train.lowering.device import Device
from daceml_train.runtime.native_library import library

T = TypeVar("T")

LIMIT = 8
"""Programs per graph: one for each selection of gradients that is differentiated again."""


class SecondDerivative:
    """Computes gradients of a compiled graph so that they have gradients; what it compiles is noted in `records`."""

    def __init__(self, graph: CompiledGraph, options: Settings, device: Device, records: list[Record]) -> None:
        self.graph, self._options, self._device, self._records = graph, options, device, records
        self._lock = threading.Lock()
        self._gradients: dict[tuple[tuple[int, ...], tuple[int, ...]], Gradients] = {}
        self.failed = ""
        """Why no program computes them; empty while that is open."""

    def __call__(self, call: Call, cotangents: Cotangents, needed: Sequence[int]) -> Sequence[torch.Tensor] | None:
        """The gradients by the inputs at the positions `needed`; None where PyTorch is to compute them.

        Raises `RuntimeError` where inputs have changed since.
        """
        if not refusal(self.graph) or self.graph.captured.once:
            return None
        key = tuple(needed), with_gradient(cotangents)
        found = self._gradients.get(key) or self._once(lambda: self._again(call, cotangents, key))
        return None if found is None else found(call, cotangents)

    def connected(self, call: Call, cotangents: Cotangents, needed: Sequence[int]) -> ConnectedCalls | None:
        """Calls whose gradients like these have gradients; None where they cannot be compiled."""
        reached = reached_again(self.graph, call, cotangents, needed)
        of = self.graph, needed, with_gradient(cotangents), reached, self._compile
        return self._once(lambda: ConnectedCalls(Gradients(*of, halved=True), self._compile))

    def _compile(self, graph: Graph, wrt: Sequence[str], outputs: Sequence[int]) -> Differentiable:
        compiled = compile_differentiable(graph, wrt, outputs, self._options, self._device)
        self._records += compiled.records
        return compiled

    def _again(self, call: Call, cotangents: Cotangents, key: tuple[tuple[int, ...], tuple[int, ...]]) -> Gradients:
        if len(self._gradients) == LIMIT:
            raise Unsupported(f"more than {LIMIT} selections of gradients that are differentiated again")
        reached = reached_again(self.graph, call, cotangents, key[0])
        self._gradients[key] = Gradients(self.graph, *key, reached, self._compile)
        return self._gradients[key]

    def _once(self, make: Callable[[], T]) -> T | None:
        with self._lock:
            if self.failed:
                return None
            try:
                return make()
            except DacemlError as error:
                self.failed = why(error)
                return None


class ConnectedCalls:
    """Calls of the graph of `gradients`, which is divided: what a call saves for them is a result of the call."""

    def __init__(self, gradients: Gradients, compile_graph: Compile) -> None:
        self.graph, self.gradients = gradients.graph, gradients
        graph, reached = gradients.graph, gradients.reached
        assert gradients.call is not None
        call, self.results = gradients.call, len(graph.captured.graph.outputs)
        floats = (k for k, name in enumerate(call.outputs) if call.tensors[name].dtype.is_float)
        self.outputs = [*sorted(graph.differentiable), *(k for k in floats if k >= self.results)]
        self.compiled = compile_graph(call, graph.compiled.gradients, self.outputs)
        self.kept = [graph.names.index(name) for name in self.compiled.kept]
        differentiated = {place - len(graph.names) + self.results for place in gradients.gradients}
        self.sources: dict[int, frozenset[int]] = {}
        """Per input, the results and what is saved through which gradients reach it."""
        for name, sources in zip(self.compiled.gradients, self.compiled.sources, strict=True):
            position, through = graph.names.index(name), {self.compiled.cotangents[k] for k in sources}
            own = {i for i in through if i < self.results}
            saved = through - own
            if saved & differentiated:
                gradients.elsewhere.add(position)
            if reached is not None and not any(position in each for of_one in reached for each in of_one):
                saved = set()
            self.sources[position] = frozenset(own | saved)

    def __call__(self, arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results."""
        results: Sequence[torch.Tensor] = _Connected.apply(self, arguments, *tensors)[: self.results]  # type: ignore[no-untyped-call]
        return results

    def backward(
        self, call: Call, saved: Sequence[torch.Tensor], rest: Sequence[torch.Tensor], cotangents: Cotangents
    ) -> list[torch.Tensor | None]:
        """The gradient of each input, from the cotangents of results and of the `rest`, by the program."""
        graph, compiled = self.graph, self.compiled
        given = []
        for i in compiled.cotangents:
            if (cotangent := cotangents[i]) is not None:
                given.append(plain(cotangent))
            elif i < self.results:
                given.append(filled(graph, graph.compiled.cotangents.index(i), None, call.tensors))
            else:
                given.append(torch.zeros_like(rest[i - self.results]))
        found = run_with_layout(compiled.backward, [*saved, *given]) if compiled.backward is not None else []
        gradients: list[torch.Tensor | None] = [None] * len(call.tensors)
        for name, gradient in zip(compiled.gradients, found, strict=True):
            position = graph.names.index(name)
            if any(cotangents[i] is not None for i in self.sources[position]):
                gradients[position] = gradient
        return gradients

    def differentiable(
        self, call: Call, rest: Sequence[torch.Tensor], cotangents: Cotangents, needed: Sequence[int]
    ) -> list[torch.Tensor | None]:
        """The gradient of each input with a gradient of its own, or of a batch of cotangents."""
        own = [cotangents[i] for i in self.graph.compiled.cotangents]
        own = [c if c is None else plain(c) for c in own]
        usual = torch.is_grad_enabled() and not any(c is not None and is_batched(c) for c in own)
        absent = {k for k, c in enumerate(own) if c is None}
        sources = self.graph.compiled.sources
        reached = [i for i in needed if not sources[self.graph.wanted[i]] <= absent]
        if not usual or reached != self.gradients.needed or not self.gradients.given.issuperset(with_gradient(own)):
            return eager_gradients(self.graph, call, own, create_graph=torch.is_grad_enabled())
        gradients: list[torch.Tensor | None] = [None] * len(call.tensors)
        for position, gradient in zip(reached, self.gradients(call, own, rest), strict=True):
            gradients[position] = gradient
        return gradients


class _Connected(torch.autograd.Function):
    """A call as a node of autograd, whose results include what is saved for the gradients."""

    @staticmethod
    def forward(ctx: Any, calls: ConnectedCalls, arguments: Sequence[Any], *tensors: torch.Tensor) -> Any:
        graph, compiled = calls.graph, calls.compiled
        with counted(tensors, graph.changes):
            outputs = run_with_layout(compiled.forward, tensors)
        rest, own = outputs[calls.results : compiled.results], outputs[compiled.results :]
        sizes = sizes_of(graph.captured, dict(zip(graph.names, tensors, strict=True)))
        results = apart(laid_out(graph.captured, outputs[: calls.results], sizes), [*rest, *own])
        rest = [t.detach() for t in rest]  # which may be results
        given = [without_history(a) for a in arguments], [without_history(t) for t in tensors]
        ctx.calls, ctx.call = calls, Call(*given, [version_of(t) for t in tensors])
        kept = ((i, tensors[i]) for i in calls.kept)
        copied = (t.clone() if i in graph.copied and not t.requires_grad else t for i, t in kept)
        ctx.save_for_backward(*copied, *own, *rest)
        ctx.set_materialize_grads(False)
        everything = [*results, *rest]
        ctx.mark_non_differentiable(*(t for k, t in enumerate(everything) if k not in calls.outputs))
        return tuple(everything)

    @staticmethod
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        calls: ConnectedCalls = ctx.calls
        graph, call, saved = calls.graph, ctx.call, ctx.saved_tensors
        count = calls.compiled.results - calls.results
        rest = saved[len(saved) - count :]
        batch = any(c is not None and is_batched(c) for c in cotangents)
        if not torch.is_grad_enabled() and not batch:
            gradients = calls.backward(call, saved[: len(saved) - count], rest, cotangents)
        elif any(c is not None for c in cotangents[calls.results :]):
            raise RuntimeError("a derivative by what a compiled graph has saved is differentiated again")
        else:
            needed = [i for i in graph.wanted if library().backward_needs(i)]
            gradients = calls.differentiable(call, rest, cotangents, needed)
        if not torch.is_grad_enabled() and not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None  # as saved tensors are freed
        return None, None, *gradients
