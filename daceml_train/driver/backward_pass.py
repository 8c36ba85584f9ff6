"""The backward pass of a compiled graph: its program, or PyTorch where a program does not serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from daceml_train.analysis.reachability import ancestors
from daceml_train.driver.binding import sizes_of
from daceml_train.driver.goals import Differentiable
from daceml_train.frontends.torch.capture.capture import Captured
from daceml_train.graph.graph import Role
from daceml_train.runtime.gpu.cuda_graph_pair import Ticket
from daceml_train.runtime.torch_types import torch_dtype
from daceml_train.tensor import evaluate
from daceml_train.training.sparse_gradients import assembled


class Compiled(Protocol):
    """The interface of `driver.function.CompiledGraph` that its backward pass and its native calls use."""

    captured: Captured
    compiled: Differentiable
    names: list[str]
    """The inputs."""
    wanted: dict[int, int]
    """Inputs that have gradients, and which output of the backward program each is."""
    kept: list[int]
    """Inputs that the backward program reads."""
    copied: set[int]
    changes: list[tuple[int, int]]
    differentiable: frozenset[int]
    written: list[int]
    eager: Callable[..., Any]
    note: Callable[[str], None] | None
    second: Second | None
    only_in_pytorch: str
    """Why PyTorch runs calls of the user's own leaves; see the function of this name."""

    def differentiated_again(
        self, call: Call, cotangents: Sequence[torch.Tensor | None], needed: Sequence[int]
    ) -> None:
        """Note that gradients by the inputs `needed` are differentiated again."""

    def owners(self, results: Any, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Graph output -> its value in a call of `eager`, for outputs through which gradients flow."""

    def backward(self, tensors: Sequence[torch.Tensor], ticket: Ticket | None) -> list[torch.Tensor]:
        """Run the backward program."""


class Call(NamedTuple):
    """A call of the forward program: its arguments, the tensors that they are, and their versions afterwards."""

    arguments: Sequence[Any]
    tensors: Sequence[torch.Tensor]
    versions: Sequence[int]
    ticket: Ticket | None = None


class Second(Protocol):
    """Computes gradients that have gradients; see `driver.second_derivative`."""

    failed: str
    """Why no program does; empty while that is open."""

    def __call__(
        self, call: Call, cotangents: Sequence[torch.Tensor | None], needed: Sequence[int]
    ) -> Sequence[torch.Tensor] | None:
        """The gradients by the inputs at the positions `needed`; None where PyTorch is to compute them."""

    def connected(
        self, call: Call, cotangents: Sequence[torch.Tensor | None], needed: Sequence[int]
    ) -> Callable[[Sequence[Any], Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None:
        """Runs calls, from arguments and inputs, whose gradients like these have gradients; None: PyTorch does."""


def gradients_of(
    graph: Compiled,
    call: Call,
    saved: Callable[[], Sequence[torch.Tensor]],
    cotangents: Sequence[torch.Tensor | None],
    needed: Sequence[int],
) -> list[torch.Tensor | None]:
    """The gradient of each input, from the cotangents of all results; None for one that has none.

    `saved` returns the inputs and results that the backward program reads. Gradients that have gradients are computed
    for the inputs at the positions `needed`.
    """
    nothing: list[torch.Tensor | None] = [None] * len(call.tensors)
    if all(cotangent is None for cotangent in cotangents):  # a later graph reads a result that its loss does not use
        return nothing
    if graph.compiled.backward is None:  # no result depends on an input, though autograd sees them connected
        return nothing
    given = [cotangents[i] for i in graph.compiled.cotangents]
    given = [g if g is None else plain(g) for g in given]
    batched = any(g is not None and is_batched(g) for g in given)
    absent = {k for k, cotangent in enumerate(given) if cotangent is None}
    gradients = nothing
    if torch.is_grad_enabled():
        reached = [i for i in needed if not graph.compiled.sources[graph.wanted[i]] <= absent]
        results = None if batched or graph.second is None else graph.second(call, given, reached)
        if results is None:
            gradients = eager_gradients(graph, call, given)
        for position, gradient in zip(reached, results or (), strict=False):
            gradients[position] = gradient
        graph.differentiated_again(call, given, reached)
        return gradients
    if batched:
        if graph.note is not None:
            graph.note("gradients of a batch of cotangents at once (is_grads_batched, vectorize)")
        return eager_gradients(graph, call, given, create_graph=False)
    found = graph.backward([*saved(), *(filled(graph, k, c, call.tensors) for k, c in enumerate(given))], call.ticket)
    for position, index in graph.wanted.items():
        if not graph.compiled.sources[index] <= absent:
            parts = graph.compiled.sparse.get(index)
            gradients[position] = found[index] if parts is None else assembled(parts, found, call.tensors[position])
    return gradients


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def plain(cotangent: torch.Tensor) -> torch.Tensor:
    """A cotangent with all of its elements in memory; those that PyTorch creates lazily have none."""
    if torch._is_zerotensor(cotangent):
        return torch.zeros(cotangent.shape, dtype=cotangent.dtype, device=cotangent.device)
    cotangent = cotangent.resolve_conj().resolve_neg()
    return cotangent.contiguous() if 0 in cotangent.stride() else cotangent


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor represents a batch, inside `torch.func.vmap` or what `is_grads_batched` uses."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def filled(
    graph: Compiled, number: int, cotangent: torch.Tensor | None, inputs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """A cotangent; zeros for an output that the loss does not use."""
    if cotangent is not None:
        return cotangent
    captured = graph.captured.graph
    expected = captured.tensors[captured.outputs[graph.compiled.cotangents[number]]]
    sizes = sizes_of(graph.captured, dict(zip(graph.names, inputs, strict=True)))
    shape = [evaluate(size, sizes) for size in expected.shape]
    device = graph.compiled.forward.device.torch
    return torch.zeros(shape, dtype=torch_dtype(expected.dtype), device=device)


CHANGED = "an input of a compiled graph was modified in place before a gradient of its gradient"
"""An error, as in PyTorch."""


def refusal(graph: Compiled) -> str:
    """Why PyTorch, which would run the graph once more, cannot differentiate its gradients; empty if it can."""
    what = ""
    if graph.captured.random:
        what = "dropout or other random operators (PyTorch cannot reproduce their numbers)"
    elif graph.written:
        what = "a graph that updates buffers (such as BatchNorm in training mode; call eval() if it need not)"
    elif graph.captured.once:
        what = graph.captured.once
    if not what:
        return ""
    advice = "run this module without daceml_train"
    if graph.only_in_pytorch:
        advice = f"call it with a leaf, x.detach().requires_grad_(), or {advice}"
    return (
        f"a gradient of a gradient, or of a batch of cotangents, through {what} "
        f"is not available from a compiled graph: {advice}"
    )


def only_in_pytorch(graph: Compiled) -> str:
    """Why no program can repeat a graph for gradients of gradients: a hook, or updates that gradients depend on.

    Empty where one can, or where no argument has a gradient.
    """
    captured = graph.captured
    arguments = [s for s in captured.inputs if s.kind == "tensor" and graph.names.index(s.name) in graph.wanted]
    if all(captured.graph.inputs[s.name].role is Role.parameter for s in arguments):
        return ""
    found = ancestors(captured.graph.nodes, [captured.graph.outputs[i] for i in graph.differentiable])
    updated = found.intersection(captured.graph.writes)
    what = captured.once or (f"{min(updated)}, which it updates" if updated else "")
    return what and f"a call whose gradients may be differentiated again, through {what}"


def of_leaves(graph: Compiled, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether an argument is the user's own leaf, as the points of a gradient penalty are."""
    wanted = (tensors[graph.names[i]] for i in graph.wanted)
    return any(t.requires_grad and t.is_leaf and not isinstance(t, torch.nn.Parameter) for t in wanted)


def eager_gradients(
    graph: Compiled, call: Call, cotangents: Sequence[torch.Tensor | None], create_graph: bool = True
) -> list[torch.Tensor | None]:
    """Gradients by PyTorch, which runs the captured graph; with a graph of their own (`create_graph`)."""
    if (reason := refusal(graph)) and (create_graph or not graph.captured.once):
        raise RuntimeError(reason)
    inputs = call.tensors
    if any(version_of(t) != v for t, v in zip(inputs, call.versions, strict=True)):
        raise RuntimeError(CHANGED)
    arguments = call.arguments
    with torch.enable_grad():
        if len(graph.wanted) > 1 and any(inputs[i].grad_fn is not None for i in graph.wanted):
            inputs, arguments = separate(graph, call)
        results = graph.owners(graph.eager(*arguments), inputs)
    outputs = zip(graph.compiled.cotangents, cotangents, strict=True)
    pairs = [(results[i], g) for i, g in outputs if g is not None and i in results]
    wanted = [inputs[i] for i in graph.wanted]
    found = torch.autograd.grad(
        [r for r, _ in pairs], wanted, [g for _, g in pairs], create_graph=create_graph, allow_unused=True
    )
    gradients: list[torch.Tensor | None] = [None] * len(inputs)
    for position, gradient in zip(graph.wanted, found, strict=True):
        gradients[position] = gradient
    return gradients


class Unchanged(torch.autograd.Function):
    """A tensor, as the result of an operator; no view, since what is a view of it belongs to it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return cotangent


def separate(graph: Compiled, call: Call) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
    """Inputs and arguments none of which is computed from another.

    PyTorch's gradient of an input would contain what reaches it through inputs that are computed from it.
    """
    given = {id(call.tensors[i]) for i in graph.wanted}
    copies: dict[int, torch.Tensor] = {}
    for argument in call.arguments:
        if isinstance(argument, torch.Tensor) and id(argument) in given and argument.requires_grad:
            copies[id(argument)] = Unchanged.apply(argument)  # type: ignore[no-untyped-call]
    return [copies.get(id(t), t) for t in call.tensors], [copies.get(id(a), a) for a in call.arguments]


__all__ = [
    "Call",
    "Second",
    "Unchanged",
    "eager_gradients",
    "filled",
    "gradients_of",
    "is_batched",
    "of_leaves",
    "only_in_pytorch",
    "plain",
    "refusal",
    "separate",
    "version_of",
]
