"""A sample through capture, translation and differentiation, and the graph's meaning in NumPy against eager execution.

The graph has one call, as an importer without TorchDynamo makes it: what follows is what `optimize` does with a graph
of Dynamo's, up to the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch._decomp.decompositions_for_rng
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from benchmarks.conformance.compare import Results, difference
from benchmarks.conformance.outcome import Outcome
from benchmarks.conformance.samples import doubled
from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture import Captured, OutputSource, capture
from daceml_train.graph.interpret import interpret
from daceml_train.graph.sizes import bind
from daceml_train.ops.fallback import Aten

SEED = 7
# PyTorch prepares, before and after each trace, for counting random numbers in a way that is not used here.
torch._decomp.decompositions_for_rng.PhiloxStateTracker.reset = classmethod(lambda cls: None)  # type: ignore


def outcome(op: Any, number: int, sample: Any, gradients: bool) -> Outcome:
    """Compare one sample's values and, where wanted, its gradients with random cotangents."""
    call, tensors, flat = flattened(op, sample)
    try:
        first = eager(call, tensors, None)
        cotangents = seeds(first[1]) if gradients else None
        expected = eager(call, tensors, cotangents)[0]
    except Exception as error:
        return Outcome(str(number), "left out", f"eager execution raises {type(error).__name__}")
    if difference(first[0], _without_gradients(expected), None):
        return Outcome(str(number), "left out", "draws random numbers")
    try:
        captured = capture(graph_of(op, flat, tensors, first[2]), tensors)
        ours = interpreted(captured, tensors, expected, cotangents)
    except Unsupported as error:
        return Outcome(str(number), "as PyTorch", error.message)
    except Exception as error:
        return Outcome(str(number), "raised", f"{type(error).__name__}: {error}")
    if ours is None:
        return Outcome(str(number), "left out", "draws random numbers")
    fallbacks = tuple(dict.fromkeys(name for name, _ in captured.fallbacks))
    if said := difference(ours, expected, None):  # seldom: only then is eager's own error of interest
        said = difference(ours, expected, _exact(op, sample, cotangents))
    return Outcome(str(number), "wrong" if said else "ATen" if fallbacks else "native", said, fallbacks)


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


def graph_of(op: Any, flat: tuple[list[Any], Any], tensors: Sequence[Tensor], views: Sequence[bool]) -> fx.GraphModule:
    """The sample as a graph; a result that is a view of an input is copied, so that the view is computed here."""
    arguments, (structure, process) = list(flat[0]), flat[1]
    graph = fx.Graph()
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            arguments[i] = graph.placeholder(f"x{i}")
            arguments[i].meta["requires_grad"] = argument.requires_grad
    args, kwargs = pytree.tree_unflatten(arguments, structure)
    made = graph.call_function(_named(op), tuple(args), kwargs)

    def finished(result: Any) -> Any:
        leaves, spec = pytree.tree_flatten(process(result))
        results = iter(views)
        copied = [leaf.clone() if isinstance(leaf, Tensor) and next(results) else leaf for leaf in leaves]
        return pytree.tree_unflatten(copied, spec)

    graph.output((graph.call_function(finished, (made,)),))
    return fx.GraphModule({}, graph)


def _named(op: Any) -> Callable[..., Any]:
    """The entry's function, with a name: the pre-pass takes what it knows by identity, what changes inputs by name."""
    if hasattr(op.op, "__name__") and op.op.__name__ != "<lambda>":
        function: Callable[..., Any] = op.op
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return op.op(*args, **kwargs)

    call.__name__ = op.name.replace(".", "_")
    return call


# ---- eager execution ------------------------------------------------------------------------------------------------
def eager(
    call: Callable[..., Any], tensors: Sequence[Tensor], cotangents: Sequence[Tensor] | None
) -> tuple[Results, list[Tensor], list[bool]]:
    """Results on copies of the tensors; also the results that carry a gradient, and which results view an input."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    values = [v for v in pytree.tree_leaves(call(*inputs)) if isinstance(v, Tensor)]
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
    return results, through, views


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
def interpreted(
    captured: Captured, tensors: Sequence[Tensor], expected: Results, cotangents: Sequence[Tensor] | None
) -> Results | None:
    """What the captured graph and its derivative compute; None where it draws random numbers."""
    if captured.random or any(isinstance(n.op, Aten) and n.op.random for n in captured.graph.nodes):
        return None
    graph = captured.graph.copy()
    arrays = {
        s.name: _array(s.value if s.kind == "attribute" else tensors[s.position]) for s in captured.inputs if s.name
    }
    names = {s.position: s.name for s in captured.inputs if s.kind == "tensor"}
    leaves = [names.get(i, "") for i, t in enumerate(tensors) if t.requires_grad]
    found: dict[str, Any] = {}
    if cotangents and expected.gradients:
        carrying = [o for o, detached in zip(captured.outputs, captured.detached, strict=True) if not detached]
        of: dict[str, Any] = {}
        for source, seed in zip(carrying, cotangents, strict=True):
            name = captured.graph.outputs[source.index]
            given = graph.input(graph.fresh("cotangent"), graph.tensors[name])
            arrays[given.name] = _array(seed)
            of[name] = of[name] + given if name in of else given
        found = differentiate(graph, of, [name for name in leaves if name])
    made = {name: value.name for name, value in found.items() if value is not None}
    graph.outputs += list(made.values())
    results = interpret(graph, arrays)
    outputs = [_output(o, results.outputs, results.sizes) for o in captured.outputs]
    values = [
        _like(v, e) for v, e in zip([v for v in outputs if isinstance(v, np.ndarray)], expected.values, strict=True)
    ]
    wanted = [t for t in tensors if t.requires_grad]
    gradients = [
        _like(results.values[made[name]], t) if name in made else None for name, t in zip(leaves, wanted, strict=True)
    ]
    inputs = [(i, t) for i, t in enumerate(tensors) if not t.requires_grad]
    written = [_like(results.writes[names[i]], t) if names.get(i) in results.writes else t.detach() for i, t in inputs]
    flags = [not d for d, v in zip(captured.detached, outputs, strict=True) if isinstance(v, np.ndarray)]
    return Results(values, gradients if expected.gradients else [], written, flags)


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    wide = tensor.double() if tensor.is_floating_point() else tensor
    made: np.ndarray[Any, Any] = wide.contiguous().numpy().copy()
    return made


def _like(value: np.ndarray[Any, Any], example: Tensor) -> Tensor:
    """A computed array as PyTorch's result would hold it; the type is compared with that of PyTorch at capture."""
    made = torch.as_tensor(np.array(value))
    return made if made.is_complex() and not example.is_complex() else made.to(example.dtype)


def _output(source: OutputSource, made: Sequence[Any], sizes: dict[str, int]) -> Any:
    match source.kind:
        case "graph":
            return np.asarray(made[source.index])
        case "size":
            return bind(source.value, sizes)
        case "input":
            raise Unsupported("a result that is its input, changed in place")
    return source.value
