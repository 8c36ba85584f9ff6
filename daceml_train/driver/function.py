"""What a compiled graph is at run time: a callable that TorchDynamo's code calls, differentiable by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from daceml_train.driver.binding import SEED, input_tensors, results_of
from daceml_train.driver.compilation import Differentiable
from daceml_train.frontends.torch.capture import Captured
from daceml_train.runtime.executable import Executable
from daceml_train.runtime.executor import InputMismatch


def draw_seed() -> torch.Tensor:
    """A 0-d int64 seed from PyTorch's CPU generator."""
    return torch.empty((), dtype=torch.int64).random_()


def run_with_layout(executable: Executable, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run; an input in another memory layout than the program's is copied into that one first."""
    try:
        return executable(inputs)
    except InputMismatch:
        value = dict(zip(executable.program.symbols, executable.sizes_of(inputs), strict=True))
        laid_out = []
        for tensor, expected in zip(inputs, executable.program.inputs, strict=True):
            strides = tuple(int(s) if isinstance(s, int) else int(s.subs(value)) for s in expected.strides)
            if tensor.stride() != strides and not expected.mutable:
                copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
                tensor = copy.copy_(tensor.detach())
            laid_out.append(tensor)
        return executable(laid_out)


class CompiledGraph:
    """A captured graph as a function of its placeholders' values.

    `eager` is the same graph as PyTorch runs it, for the gradient of a gradient.
    """

    def __init__(self, captured: Captured, compiled: Differentiable, eager: Callable[..., Any]) -> None:
        self.captured, self.compiled, self.eager = captured, compiled, eager
        names = list(captured.graph.inputs)
        self.random = SEED in names
        self.kept = [names.index(name) for name in compiled.kept]
        self.written = [names.index(name) for name in captured.graph.writes]
        self.wanted = {names.index(name): k for k, name in enumerate(compiled.gradients)}
        self.differentiable = frozenset(compiled.cotangents)

    def __call__(self, *arguments: Any) -> Any:
        tensors = list(input_tensors(self.captured, arguments).values())
        if self.random:
            tensors.append(draw_seed())
        if self.written:
            tensors = self.apart(tensors)
        if self.compiled.backward is None or not torch.is_grad_enabled():
            results: Sequence[Any] = run_with_layout(self.compiled.forward, tensors)
        else:
            results = _Function.apply(self, arguments, *tensors)  # type: ignore[no-untyped-call]
        return results_of(self.captured, results, arguments)

    def apart(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the inputs that share memory with an input that is written; kernels assume there are none."""
        storages = {tensors[i].untyped_storage()._cdata for i in self.written}
        written = set(self.written)
        return [
            t.clone() if i not in written and t.untyped_storage()._cdata in storages else t
            for i, t in enumerate(tensors)
        ]


class _Function(torch.autograd.Function):
    """Forward and backward programs as one autograd node."""

    @staticmethod
    def forward(ctx: Any, graph: CompiledGraph, arguments: Sequence[Any], *tensors: torch.Tensor) -> Any:
        outputs = run_with_layout(graph.compiled.forward, tensors)
        results, saved = outputs[: graph.compiled.results], outputs[graph.compiled.results :]
        ctx.graph, ctx.arguments, ctx.inputs = graph, arguments, tensors
        ctx.versions = [t._version for t in tensors]
        ctx.save_for_backward(*(tensors[i] for i in graph.kept), *saved)
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in graph.differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        graph: CompiledGraph = ctx.graph
        given = [cotangents[i] for i in graph.compiled.cotangents]
        if torch.is_grad_enabled():
            return (None, None, *_eager_gradients(ctx, graph, given))
        assert graph.compiled.backward is not None
        found = run_with_layout(graph.compiled.backward, [*ctx.saved_tensors, *given])
        gradients: list[torch.Tensor | None] = [None] * len(ctx.inputs)
        for position, index in graph.wanted.items():
            gradients[position] = found[index]
        return (None, None, *gradients)


def _eager_gradients(ctx: Any, graph: CompiledGraph, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients with a graph of their own (`create_graph=True`): the captured graph runs again as PyTorch runs it."""
    if graph.random:
        raise RuntimeError(
            "a gradient of a gradient through dropout or other random operators is not available from a compiled "
            "graph: their numbers cannot be drawn again by PyTorch; run this module without daceml_train"
        )
    if graph.written:
        raise RuntimeError(
            "a gradient of a gradient through a graph that updates buffers (such as BatchNorm in training mode) is not "
            "available from a compiled graph; call eval(), or run this module without daceml_train"
        )
    if any(t._version != v for t, v in zip(ctx.inputs, ctx.versions, strict=True)):
        raise RuntimeError("an input of a compiled graph was modified in place before a gradient of its gradient")
    leaves = pytree.tree_leaves(graph.eager(*ctx.arguments))
    sources = zip(graph.captured.outputs, leaves, strict=True)
    results = {source.index: leaf for source, leaf in sources if source.kind == "graph"}
    outputs = zip(graph.compiled.cotangents, cotangents, strict=True)
    pairs = [(results[i], g) for i, g in outputs if results[i].requires_grad]
    wanted = [ctx.inputs[i] for i in graph.wanted]
    found = torch.autograd.grad(
        [r for r, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, allow_unused=True
    )
    gradients: list[torch.Tensor | None] = [None] * len(ctx.inputs)
    for position, gradient in zip(graph.wanted, found, strict=True):
        gradients[position] = gradient
    return gradients


__all__ = ["CompiledGraph", "draw_seed", "run_with_layout"]
