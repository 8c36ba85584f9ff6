"""A sample through capture, translation and differentiation, and the graph's meaning in NumPy against eager execution.

The graph has one call, as an importer without TorchDynamo makes it: what follows is what `optimize` does with a graph
of Dynamo's, up to the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch._decomp.decompositions_for_rng
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from benchmarks.conformance.compare import Results, difference
from benchmarks.conformance.outcome import Outcome
from benchmarks.conformance.samples import doubled
from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.sizes import bind
from daceml_train.autodiff.reverse import differentiate
from daceml_train.driver.binding import viewed
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.capture import Captured, capture
from daceml_train.frontends.torch.results import OutputSource
from daceml_train.ops.fallback import Aten

SEED = 7
# PyTorch prepares, before and after each trace, for counting random numbers in a way that is not used here.
torch._decomp.decompositions_for_rng.PhiloxStateTracker.reset = classmethod(lambda cls: None)  # type: ignore


TOGETHER = 16
"""Samples of an entry that are captured as one graph, since a trace costs more than what is in it."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A sample that eager execution has run: what it takes and what is expected of it."""

    op: Any
    number: int
    sample: Any
    tensors: list[Tensor]
    flat: tuple[list[Any], Any]
    views: list[bool]
    leaves: int
    expected: Results
    cotangents: list[Tensor] | None


def outcomes(op: Any, samples: Sequence[Any], gradients: bool) -> list[Outcome]:
    """Compare the samples of one entry, in values and, where wanted, in gradients with random cotangents."""
    found = [prepared(op, number, sample, gradients) for number, sample in enumerate(samples)]
    results = {o.sample: o for o in found if isinstance(o, Outcome)}
    runnable = [p for p in found if isinstance(p, Prepared)]
    for start in range(0, len(runnable), TOGETHER):
        results |= {o.sample: o for o in _compared(op, runnable[start : start + TOGETHER])}
    return [results[str(number)] for number in range(len(samples))]


def outcome(op: Any, number: int, sample: Any, gradients: bool) -> Outcome:
    """Compare one sample."""
    result = prepared(op, number, sample, gradients)
    return result if isinstance(result, Outcome) else _compared(op, [result])[0]


def prepared(op: Any, number: int, sample: Any, gradients: bool) -> Prepared | Outcome:
    """Run a sample eagerly, twice; an outcome where it cannot be compared."""
    call, tensors, flat = flattened(op, sample)
    try:
        first, through, views, leaves = eager(call, tensors, None)
        cotangents = seeds(through) if gradients else None
        expected = eager(call, tensors, cotangents)[0]
    except Exception as error:
        return Outcome(str(number), "left out", f"eager execution raises {type(error).__name__}")
    if difference(first, _without_gradients(expected), None):
        return Outcome(str(number), "left out", "draws random numbers")
    return Prepared(op, number, sample, tensors, flat, views, leaves, expected, cotangents)


def _compared(op: Any, group: Sequence[Prepared]) -> list[Outcome]:
    """Capture samples as one graph and compare each; one by one where together they cannot be."""
    try:
        captured = capture(graph_of(group), [t for p in group for t in p.tensors])
        random = captured.random or any(isinstance(n.op, Aten) and n.op.random for n in captured.graph.nodes)
        results = [] if random else interpreted(captured, group)
    except Exception as error:
        if len(group) == 1:
            kind, message = (
                ("as PyTorch", error.message) if isinstance(error, Unsupported) else ("raised", _text(error))
            )
            return [Outcome(str(group[0].number), kind, message)]
        random, results = True, []
    if len(group) > 1 and random:
        return [o for p in group for o in _compared(op, [p])]
    if random:
        return [Outcome(str(group[0].number), "left out", "draws random numbers")]
    return [_outcome(op, p, ours, calls) for p, (ours, calls) in zip(group, results, strict=True)]


CHOOSING = frozenset({"sort", "argsort"})
"""Entries that may choose any of equal elements, unless they are asked to be stable."""


def chosen(sample: Any, results: Results) -> Results:
    """Results in which indices into the sample's input are what they choose, and which ones there are, in order."""
    x, dim = sample.input.detach(), (*sample.args, sample.kwargs.get("dim", -1))[0]
    indices = results.values[-1]
    what = [x.gather(dim, indices), indices.sort(dim).values] if x.ndim else [indices]
    return replace(results, values=[*results.values[:-1], *what])


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _outcome(op: Any, p: Prepared, ours: Results, calls: tuple[str, ...]) -> Outcome:
    message = difference(ours, p.expected, None)
    if message and op.name in CHOOSING and not p.sample.kwargs.get("stable"):
        message = difference(chosen(p.sample, ours), chosen(p.sample, p.expected), None)
    if message:  # seldom: only then is eager's own error of interest
        message = difference(ours, p.expected, _exact(op, p.sample, p.cotangents))
    return Outcome(str(p.number), "wrong" if message else "ATen" if calls else "native", message, calls)


def flattened(op: Any, sample: Any) -> tuple[Callable[..., Any], list[Tensor], tuple[list[Any], Any]]:
    """The sample as a function of its tensors, the tensors, and its flat arguments with their structure."""
    arguments, structure = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    tensors = [a for a in arguments if isinstance(a, Tensor)]

    def call(*given: Tensor) -> Any:
        remaining = iter(given)
        args, kwargs = pytree.tree_unflatten(
            [next(remaining) if isinstance(a, Tensor) else a for a in arguments], structure
        )
        return sample.output_process_fn_grad(op.op(*args, **kwargs))

    return call, tensors, (arguments, (structure, sample.output_process_fn_grad))


def graph_of(group: Sequence[Prepared]) -> fx.GraphModule:
    """Samples as one graph, a call for each."""
    graph = fx.Graph()
    given = [[_placeholder(graph, f"x{i}_{k}", a) for k, a in enumerate(p.flat[0])] for i, p in enumerate(group)]
    results = [_call(graph, p, arguments) for p, arguments in zip(group, given, strict=True)]
    graph.output(tuple(results))
    return fx.GraphModule({}, graph)


def _placeholder(graph: fx.Graph, name: str, argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    node = graph.placeholder(name)
    node.meta["requires_grad"] = argument.requires_grad
    return node


def _call(graph: fx.Graph, p: Prepared, arguments: list[Any]) -> fx.Node:
    """One sample's call; a result that is a view of an input is copied, so that the view is computed in the graph."""
    structure, process = p.flat[1]
    args, kwargs = pytree.tree_unflatten(arguments, structure)
    output = graph.call_function(_named(p.op), tuple(args), kwargs)

    def finished(result: Any) -> Any:
        leaves, spec = pytree.tree_flatten(process(result))
        views = iter(p.views)
        copied = [leaf.clone() if isinstance(leaf, Tensor) and next(views) else leaf for leaf in leaves]
        return pytree.tree_unflatten(copied, spec)

    return graph.call_function(finished, (output,))


def _named(op: Any) -> Callable[..., Any]:
    """The entry's function, named as PyTorch's: the pre-pass takes what it knows by identity, others by name."""
    if hasattr(op.op, "__name__") and op.op.__name__ != "<lambda>":
        function: Callable[..., Any] = op.op
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return op.op(*args, **kwargs)

    call.__name__ = op.name.replace(".", "_")
    call.__module__ = "torch"
    return call


# ---- eager execution ------------------------------------------------------------------------------------------------
def eager(
    call: Callable[..., Any], tensors: Sequence[Tensor], cotangents: Sequence[Tensor] | None
) -> tuple[Results, list[Tensor], list[bool], int]:
    """Results on copies of the tensors, those that carry a gradient, which view an input, and how many leaves."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    outputs = pytree.tree_leaves(call(*inputs))
    values = [v for v in outputs if isinstance(v, Tensor)]
    through = [v for v in values if v.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    gradients: list[Tensor | None] = []
    if cotangents is not None and through and wanted:
        given = [c.to(v.dtype) for c, v in zip(cotangents, through, strict=True)]
        gradients = list(torch.autograd.grad(through, wanted, given, allow_unused=True))
    owners = {_storage(t) for t in inputs}
    views = [_storage(v) in owners for v in values]
    written = [t.detach() for t in inputs if not t.requires_grad]
    results = Results([v.detach() for v in values], gradients, written, [v.requires_grad for v in values])
    return results, through, views, len(outputs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -id(tensor)


def seeds(results: Sequence[Tensor]) -> list[Tensor]:
    """Random cotangents of results."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(v.shape, dtype=v.dtype, generator=generator) for v in results]


def _without_gradients(results: Results) -> Results:
    return Results(results.values, [], results.inputs, results.differentiable)


def _exact(op: Any, sample: Any, cotangents: Sequence[Tensor] | None) -> Results | None:
    try:
        call, tensors, _ = flattened(op, sample.transform(doubled))
        given = None if cotangents is None else [doubled(c) for c in cotangents]
        return eager(call, tensors, given)[0]
    except Exception:
        return None


# ---- the captured graph ---------------------------------------------------------------------------------------------
def interpreted(captured: Captured, group: Sequence[Prepared]) -> list[tuple[Results, tuple[str, ...]]]:
    """What the captured graph and its derivative compute for each sample, and what each calls in PyTorch."""
    graph = captured.graph.copy()
    tensors = [t for p in group for t in p.tensors]
    arrays = {
        s.name: _array(s.value if s.kind == "attribute" else tensors[s.position]) for s in captured.inputs if s.name
    }
    names = {s.position: s.name for s in captured.inputs if s.kind == "tensor"}
    outputs = iter(zip(captured.outputs, captured.detached, strict=True))
    sources = [list(islice(outputs, p.leaves)) for p in group]
    of: dict[str, Any] = {}
    for p, found in zip(group, sources, strict=True):
        if not p.expected.gradients:
            continue
        for source, seed in zip((o for o, detached in found if not detached), p.cotangents or (), strict=True):
            name = captured.graph.outputs[source.index]
            given = graph.input(graph.fresh("cotangent"), graph.tensors[name])
            arrays[given.name] = _array(seed)
            of[name] = of[name] + given if name in of else given
    wanted = [names[i] for i, t in enumerate(tensors) if t.requires_grad and i in names]
    gradients = differentiate(graph, of, wanted) if of else {}
    created = {name: value.name for name, value in gradients.items() if value is not None}
    graph.outputs += list(created.values())
    results = interpret(graph, arrays)
    arrived: list[tuple[Results, tuple[str, ...]]] = []
    first = 0
    for p, found in zip(group, sources, strict=True):
        own = [(names.get(first + i, ""), t) for i, t in enumerate(p.tensors)]
        first += len(p.tensors)
        values = [(_output(o, results.outputs, results.sizes), detached) for o, detached in found]
        arrays_made = [(v, detached) for v, detached in values if isinstance(v, np.ndarray)]
        ours = Results(
            [_like(v, e) for (v, _), e in zip(arrays_made, p.expected.values, strict=True)],
            [_like(results.values[created[n]], t) if n in created else None for n, t in own if t.requires_grad]
            if p.expected.gradients
            else [],
            [_like(results.writes[n], t) if n in results.writes else t.detach() for n, t in own if not t.requires_grad],
            [not detached for _, detached in arrays_made],
        )
        reached = {captured.graph.outputs[o.index] for o, _ in found if o.kind == "graph"}
        arrived.append((ours, _calls(captured, reached)))
    return arrived


def _calls(captured: Captured, reached: set[str]) -> tuple[str, ...]:
    """The operators without a rule on which these arrays of the captured graph depend."""
    without = {name for name, _ in captured.fallbacks}
    found: dict[str, None] = {}
    for node in reversed(captured.graph.nodes if without else ()):
        if not reached.isdisjoint(node.outputs):
            reached.update(node.inputs)
            if isinstance(node.op, Aten):
                found[node.op.target] = None
    return tuple(found)


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    wide = tensor.double() if tensor.is_floating_point() else tensor
    result: np.ndarray[Any, Any] = wide.contiguous().numpy().copy()
    return result


def _like(value: np.ndarray[Any, Any], example: Tensor) -> Tensor:
    """A computed array as PyTorch's result would hold it; the type is compared with that of PyTorch at capture."""
    result = torch.as_tensor(np.array(value))
    return result if result.is_complex() and not example.is_complex() else result.to(example.dtype)


def _output(source: OutputSource, results: Sequence[Any], sizes: dict[str, int]) -> Any:
    match source.kind:
        case "graph":
            if source.view is None or source.strides is None:
                return np.asarray(results[source.index])
            tensor = torch.as_tensor(np.asarray(results[source.index]))
            strides = [bind(s, sizes) for s in source.strides]
            owner = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
            return viewed(owner, source, sizes).resolve_conj().numpy()
        case "size":
            return bind(source.value, sizes)
        case "input":
            raise Unsupported("a result that is its input, changed in place")
    return source.value
