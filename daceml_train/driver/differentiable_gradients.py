"""The gradients of a compiled graph, as a program that has gradients by inputs, saved values, and cotangents.

The program draws no random numbers, whose seed is one of its inputs, and updates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from daceml_train.autodiff.partition import partition
from daceml_train.driver.backward_pass import (
    CHANGED,
    Call,
    Unchanged,
    filled,
    is_batched,
    plain,
    refusal,
    separate,
    version_of,
)
from daceml_train.driver.binding import apart
from daceml_train.driver.function import CompiledGraph, run_with_layout, without_history
from daceml_train.driver.goals import Differentiable, with_gradients
from daceml_train.errors import Unsupported
from daceml_train.graph.graph import Graph, Role
from daceml_train.passes.base import without_dead_code

Compile = Callable[[Graph, Sequence[str], Sequence[int]], Differentiable]
"""Compiles a graph for gradients of its outputs at these positions by these inputs."""
Cotangents = Sequence[torch.Tensor | None]


def with_gradient(cotangents: Cotangents) -> tuple[int, ...]:
    """Which cotangents require a gradient."""
    return tuple(k for k, c in enumerate(cotangents) if c is not None and c.requires_grad)


Reached = Sequence[Sequence[frozenset[int]]] | None
"""Per cotangent and gradient, the positions of the inputs that get a gradient of it in PyTorch; None if not known."""


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
            wanted = [inputs[i] for i in needed]
            by = [i for i in graph.wanted if inputs[i].requires_grad]
            reached = []
            for k, i in enumerate(graph.compiled.cotangents):
                given = filled(graph, k, cotangents[k], call.tensors)
                options = {"create_graph": True, "allow_unused": True}
                found = (
                    torch.autograd.grad(results[i], wanted, given, **options) if i in results else [None] * len(wanted)
                )
                reached.append([_reached(gradient, by, inputs) for gradient in found])
            return reached
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
        self.graph, captured, self.given, self.reached = graph, graph.captured.graph, frozenset(given), reached
        self.elsewhere: set[int] = set()
        """Inputs that get their gradients by what the call has saved."""
        found = with_gradients(captured, [graph.names[i] for i in needed], sorted(graph.differentiable))
        if graph.compiled.sparse:
            raise Unsupported("sparse gradients that are differentiated again")
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
        present = [k for k, c in enumerate(cotangents) if c is not None]
        tensors = [*call.tensors, *saved, *given]
        results: Sequence[torch.Tensor] = _Gradients.apply(self, call.arguments, present, *tensors)  # type: ignore[no-untyped-call]
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
        self,
        gradients: list[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
        present: Sequence[int],
        cotangents: Cotangents,
    ) -> None:
        """Make gradients by the graph's inputs None, or zeros, as in PyTorch, for the call's cotangents `present`."""
        if self.reached is None:
            return
        given = [g for g, c in enumerate(cotangents) if c is not None]
        reached = frozenset[int]().union(*(self.reached[k][g] for k in present for g in given))
        for position in self.graph.wanted:
            if position not in reached:
                gradients[position] = None
            elif gradients[position] is None and position not in self.elsewhere:
                gradients[position] = torch.zeros_like(inputs[position])


class _Gradients(torch.autograd.Function):
    """Gradients as a node of autograd."""

    @staticmethod
    def forward(
        ctx: Any, program: Gradients, arguments: Sequence[Any], present: Sequence[int], *inputs: torch.Tensor
    ) -> Any:
        compiled, given = program.compiled, [inputs[i] for i in program.places]
        outputs = run_with_layout(compiled.forward, given)
        saved = outputs[compiled.results :]
        results = apart(outputs[: compiled.results], saved)
        ctx.program, ctx.arguments, ctx.present = program, arguments, present
        ctx.inputs = [without_history(t) for t in inputs]
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
            program.agree(gradients, inputs, ctx.present, cotangents)
        return None, None, None, *gradients
