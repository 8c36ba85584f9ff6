"""Gradients that are differentiated again, by programs: gradients as results of a graph that has gradients itself.

A graph of gradients takes the inputs, what the call has saved, and the cotangents. What a call saves is a result of the
call to autograd, so that the derivative of a gradient flows back through the call, and nothing is computed twice
(`ConnectedCalls`). Before it is known that most gradients are differentiated again, PyTorch computes them, so that a
single one compiles nothing. A graph that draws random numbers or updates buffers, which PyTorch cannot repeat, is
computed once more by a program, from the same seed and without its updates (`Gradients`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from daceml_train.autodiff.partition import partition
from daceml_train.driver.backward_pass import (
    CHANGED,
    Call,
    Unchanged,
    eager_gradients,
    filled,
    is_batched,
    plain,
    refusal,
    separate,
    version_of,
)
from daceml_train.driver.binding import apart, counted, laid_out, sizes_of
from daceml_train.driver.function import CompiledGraph, run_with_layout, without_history
from daceml_train.driver.goals import Differentiable, compile_differentiable, with_gradients
from daceml_train.driver.records import Record
from daceml_train.driver.settings import Settings
from daceml_train.errors import DacemlError, Unsupported, why
from daceml_train.graph.graph import Graph, Role
from daceml_train.lowering.device import Device
from daceml_train.passes.base import without_dead_code
from daceml_train.runtime.native_library import library

Compile = Callable[[Graph, Sequence[str], Sequence[int]], Differentiable]
"""Compiles a graph for gradients of its outputs at these positions by these inputs."""
Cotangents = Sequence[torch.Tensor | None]
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
        given = with_gradient(cotangents)
        return self._once(lambda: ConnectedCalls(self.graph, needed, given, reached, self._compile))

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


def with_gradient(cotangents: Cotangents) -> tuple[int, ...]:
    """Which cotangents require a gradient."""
    return tuple(k for k, c in enumerate(cotangents) if c is not None and c.requires_grad)


Reached = Sequence[frozenset[int]] | None
"""Per gradient, the positions of the inputs that get a gradient of it in PyTorch; None if that is not known."""


def reached_again(graph: CompiledGraph, call: Call, cotangents: Cotangents, needed: Sequence[int]) -> Reached:
    """What PyTorch's graph of the gradients says, which is run once for that, and leaves no trace.

    A derivative that is zero everywhere is a gradient of zeros for some operators (`relu`), and none for others
    (`dropout`); optimizers change a parameter with a gradient of zeros.
    """
    tensors = dict(zip(graph.names, call.tensors, strict=True))
    written = [(t, t.clone(), version_of(t)) for name in graph.captured.graph.writes for t in [tensors[name]]]
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            inputs, arguments = separate(graph, call)
            results = graph.owners(graph.eager(*arguments), inputs)
            pairs = [(i, c) for i, c in zip(graph.compiled.cotangents, cotangents, strict=True) if i in results]
            pairs = [(i, c) for i, c in pairs if c is not None]
            wanted = [inputs[i] for i in needed]
            found = torch.autograd.grad(
                [results[i] for i, _ in pairs], wanted, [c for _, c in pairs], create_graph=True, allow_unused=True
            )
            by = [i for i in graph.wanted if inputs[i].requires_grad]
            return [_reached(gradient, by, inputs) for gradient in found]
    except RuntimeError:  # PyTorch has no second derivative of this graph
        return None
    finally:
        with torch.no_grad():
            for tensor, value, version in written:
                tensor.copy_(value)
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _reached(gradient: torch.Tensor | None, by: Sequence[int], inputs: Sequence[torch.Tensor]) -> frozenset[int]:
    if gradient is None or not gradient.requires_grad:
        return frozenset()
    found = torch.autograd.grad(gradient.sum(), [inputs[i] for i in by], retain_graph=True, allow_unused=True)
    return frozenset(i for i, each in zip(by, found, strict=True) if each is not None)


class Gradients:
    """The gradients of a graph by the inputs at the positions `needed`, as a graph that is compiled with gradients.

    `given` are the cotangents that require a gradient. `halved` also divides the graph: its inputs are then what a call
    saves, too. Raises `DacemlError` if that cannot be compiled.
    """

    def __init__(
        self,
        graph: CompiledGraph,
        needed: Sequence[int],
        given: Sequence[int],
        reached: Reached,
        compile_graph: Compile,
        halved: bool = False,
    ) -> None:
        self.graph, captured, self.reached = graph, graph.captured.graph, reached
        self.elsewhere: set[int] = set()
        """Inputs that get their gradients by what the call has saved."""
        found = with_gradients(captured, [graph.names[i] for i in needed], sorted(graph.differentiable))
        if len(found.gradients) != len(needed):
            raise Unsupported("a gradient that is differentiated again, of results that do not depend on the input")
        self.needed = list(needed)
        self.call: Graph | None = None
        """The call, which saves what the gradients read, if the graph is divided."""
        results = len(captured.outputs)
        cotangents = dict(zip(list(found.graph.inputs)[len(captured.inputs) :], found.cotangents, strict=True))
        if halved:
            halves = partition(found.graph, results)
            self.call, joint, saved = halves.forward, halves.backward, list(halves.saved)
            self.call.kept = 0
        else:
            joint, saved = found.graph.copy(), []
            joint.outputs, joint.writes = joint.outputs[results:], {}
            joint = without_dead_code(joint)
        joint.name = f"{captured.name} gradients"
        read = {*joint.outputs, *(name for node in joint.nodes for name in node.inputs)}
        if updated := read.intersection(captured.writes):
            raise Unsupported(f"gradients of gradients that depend on {min(updated)}, which the graph updates")
        self.read = [i for i, name in enumerate(graph.names) if name in read]
        places = {name: len(graph.names) + k for k, name in enumerate(saved)}
        places |= {n: len(graph.names) + len(saved) + graph.compiled.cotangents.index(o) for n, o in cotangents.items()}
        for name in places:
            if name in joint.inputs:
                joint.inputs[name] = replace(joint.inputs[name], role=Role.input)
        self.places = [places[name] if name in places else graph.names.index(name) for name in joint.inputs]
        """The program's inputs among all inputs of the call, what it has saved, and the cotangents."""
        wanted = {graph.names[i] for i in graph.wanted} | {n for n in saved if joint.tensors[n].dtype.is_float}
        wanted.update(name for name, o in cotangents.items() if graph.compiled.cotangents.index(o) in given)
        self.compiled = compile_graph(joint, [n for n in joint.inputs if n in wanted], range(len(joint.outputs)))
        names = list(joint.inputs)
        self.gradients = [self.places[names.index(name)] for name in self.compiled.gradients]
        """The places of what the gradients have gradients by."""
        self.kept = [names.index(name) for name in self.compiled.kept]
        """Inputs of the program that its backward pass reads."""

    def __call__(
        self, call: Call, cotangents: Cotangents, saved: Sequence[torch.Tensor] = ()
    ) -> Sequence[torch.Tensor]:
        """The gradients. Raises `RuntimeError` if an input that is read has changed since the call."""
        if any(version_of(call.tensors[i]) != call.versions[i] for i in self.read):
            raise RuntimeError(CHANGED)
        given = [filled(self.graph, k, c, call.tensors) for k, c in enumerate(cotangents)]
        results: Sequence[torch.Tensor] = _Gradients.apply(self, call.arguments, *call.tensors, *saved, *given)  # type: ignore[no-untyped-call]
        return results

    def in_pytorch(self, call: Call, cotangents: Cotangents, outer: Cotangents) -> list[torch.Tensor | None]:
        """The derivative of the gradients, by the inputs and by the cotangents, as PyTorch computes it."""
        graph = self.graph
        if reason := refusal(graph):
            raise RuntimeError(reason)
        if any(version_of(t) != v for t, v in zip(call.tensors, call.versions, strict=True)):
            raise RuntimeError(CHANGED)
        create = torch.is_grad_enabled()
        with torch.enable_grad():
            tensors, arguments = separate(graph, call)
            given = [Unchanged.apply(c) if c is not None and c.requires_grad else c for c in cotangents]  # type: ignore[no-untyped-call]
            results = graph.owners(graph.eager(*arguments), tensors)
            used = [(results[i], c) for i, c in zip(graph.compiled.cotangents, given, strict=True) if i in results]
            wanted = [tensors[i] for i in self.needed]
            found = torch.autograd.grad(
                [r for r, _ in used], wanted, [c for _, c in used], create_graph=True, allow_unused=True
            )
        pairs = [(g, o) for g, o in zip(found, outer, strict=True) if g is not None and o is not None]
        pairs = [(g, o) for g, o in pairs if g.requires_grad]
        everything = dict(enumerate([*tensors, *given]))
        by = {i: t for i, t in everything.items() if t is not None and (i in graph.wanted or i >= len(tensors))}
        by = {i: t for i, t in by.items() if t.requires_grad}
        derivatives = torch.autograd.grad(
            [g for g, _ in pairs], [*by.values()], [o for _, o in pairs], create_graph=create, allow_unused=True
        )
        gradients: list[torch.Tensor | None] = [None] * len(everything)
        for position, derivative in zip(by, derivatives, strict=True):
            gradients[position] = derivative
        return gradients

    def agree(
        self, gradients: list[torch.Tensor | None], inputs: Sequence[torch.Tensor], cotangents: Cotangents
    ) -> None:
        """Make gradients by the graph's inputs None, or zeros, as in PyTorch."""
        if self.reached is None:
            return
        reached = frozenset[int]().union(*(r for r, c in zip(self.reached, cotangents, strict=True) if c is not None))
        for position in self.graph.wanted:
            if position not in reached:
                gradients[position] = None
            elif gradients[position] is None and position not in self.elsewhere:
                gradients[position] = torch.zeros_like(inputs[position])


class _Gradients(torch.autograd.Function):
    """Gradients as a node of autograd."""

    @staticmethod
    def forward(ctx: Any, program: Gradients, arguments: Sequence[Any], *inputs: torch.Tensor) -> Any:
        compiled, given = program.compiled, [inputs[i] for i in program.places]
        outputs = run_with_layout(compiled.forward, given)
        saved = outputs[compiled.results :]
        results = apart(outputs[: compiled.results], saved)
        ctx.program, ctx.arguments, ctx.inputs = program, arguments, [without_history(t) for t in inputs]
        ctx.versions, ctx.like = [version_of(t) for t in inputs], [(r.shape, r.dtype, r.device) for r in results]
        ctx.save_for_backward(*(given[i] for i in program.kept), *saved)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        program: Gradients = ctx.program
        compiled, saved, inputs = program.compiled, ctx.saved_tensors, ctx.inputs
        gradients: list[torch.Tensor | None] = [None] * len(inputs)
        if torch.is_grad_enabled() or any(c is not None and is_batched(c) for c in cotangents):
            count, given = len(program.graph.names), len(program.graph.compiled.cotangents)
            call = Call(ctx.arguments, inputs[:count], ctx.versions[:count])
            derivatives = program.in_pytorch(call, inputs[len(inputs) - given :], cotangents)
            gradients[:count], gradients[len(inputs) - given :] = derivatives[:count], derivatives[count:]
        elif compiled.backward is not None:
            dense = [
                torch.zeros(shape, dtype=dtype, device=device) if c is None else plain(c)
                for c, (shape, dtype, device) in zip(cotangents, ctx.like, strict=True)
            ]
            found = run_with_layout(compiled.backward, [*saved, *(dense[i] for i in compiled.cotangents)])
            absent = {k for k, i in enumerate(compiled.cotangents) if cotangents[i] is None}
            for position, gradient, sources in zip(program.gradients, found, compiled.sources, strict=True):
                if not sources <= absent:
                    gradients[position] = gradient
            program.agree(gradients, inputs, cotangents)
        return None, None, *gradients


class ConnectedCalls:
    """Calls of a graph whose gradients by the inputs at the positions `needed` have gradients."""

    def __init__(
        self,
        graph: CompiledGraph,
        needed: Sequence[int],
        given: Sequence[int],
        reached: Reached,
        compile_graph: Compile,
    ) -> None:
        self.graph = graph
        self.gradients = Gradients(graph, needed, given, reached, compile_graph, halved=True)
        assert self.gradients.call is not None
        call, self.results = self.gradients.call, len(graph.captured.graph.outputs)
        floats = (k for k, name in enumerate(call.outputs) if call.tensors[name].dtype.is_float)
        self.outputs = [*sorted(graph.differentiable), *(k for k in floats if k >= self.results)]
        self.compiled = compile_graph(call, graph.compiled.gradients, self.outputs)
        self.kept = [graph.names.index(name) for name in self.compiled.kept]
        self.given = given
        differentiated = {place - len(graph.names) + self.results for place in self.gradients.gradients}
        self.sources: dict[int, frozenset[int]] = {}
        """Per input, the results and what is saved through which gradients reach it."""
        for name, sources in zip(self.compiled.gradients, self.compiled.sources, strict=True):
            position, through = graph.names.index(name), {self.compiled.cotangents[k] for k in sources}
            own = {i for i in through if i < self.results}
            saved = through - own
            if saved & differentiated:
                self.gradients.elsewhere.add(position)
            if reached is not None and not any(position in each for each in reached):
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
        if not usual or reached != self.gradients.needed or not {*with_gradient(own)} <= {*self.given}:
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
            raise RuntimeError("a third derivative by programs")  # PyTorch's has no part of what is saved
        else:
            needed = [i for i in graph.wanted if library().backward_needs(i)]
            gradients = calls.differentiable(call, rest, cotangents, needed)
        if not torch.is_grad_enabled() and not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None  # as saved tensors are freed
        return None, None, *gradients
