"""A captured graph with the numbers of one call, and PyTorch's results in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo.exc import TorchDynamoException

from daceml_train.analysis.interpret import interpret
from daceml_train.driver.binding import differentiable_outputs, input_tensors
from daceml_train.driver.module import original
from daceml_train.errors import DacemlError, Unsupported
from daceml_train.frontends.torch.capture.capture import Captured, capture
from daceml_train.frontends.torch.dynamo.tracing import reason, traced, tracing
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.node import SEED
from daceml_train.ops.operator import Array, Value

TOLERANCE = 1e-5
"""The least deviation in float64, relative to an array's largest element: casts to float32 inside a model are exact in
only one of the two computations."""


@dataclass
class Case:
    """One captured graph of a model, its inputs as arrays, and a cotangent per differentiable output."""

    captured: Captured
    module: fx.GraphModule
    arguments: tuple[Any, ...]
    arrays: dict[str, Array]
    cotangents: dict[str, Array] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The captured graph."""
        return self.captured.graph

    @property
    def wrt(self) -> list[str]:
        """Inputs that require a gradient."""
        tensors = input_tensors(self.captured, self.arguments)
        return [name for name, tensor in tensors.items() if tensor.requires_grad]


def cases(model: torch.nn.Module, inputs: Sequence[Any]) -> tuple[list[Case], list[str]]:
    """The graphs of a copy of `model` on these inputs, and why others are missing."""
    model = copy.deepcopy(original(model))
    found: list[Case] = []
    missing: list[str] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        try:
            captured = capture(gm, examples, keep_trace=True)
        except DacemlError as error:
            missing.append(str(error))
            return gm.forward

        def run(*arguments: Any) -> Any:
            found.append(_case(captured, gm, arguments))
            return gm.forward(*arguments)

        return run

    torch._dynamo.reset()
    try:
        with tracing():
            traced(type(model).forward, model, backend, dynamic=False)(*inputs)
    except TorchDynamoException as error:
        model(*inputs)  # where that fails too, the model is at fault, and PyTorch says so
        raise Unsupported(f"the model cannot be captured: {reason(error)}") from error
    return found, missing


def _case(captured: Captured, gm: fx.GraphModule, arguments: Sequence[Any]) -> Case:
    kept = tuple(
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments
    )
    arrays = {name: array(tensor) for name, tensor in input_tensors(captured, kept).items()}
    if SEED in captured.graph.inputs:
        arrays[SEED] = np.asarray(7)
    case = Case(captured, gm, kept, arrays)
    values = interpret(captured.graph, arrays).outputs
    random = np.random.default_rng(0)
    for i in differentiable_outputs(captured):
        case.cotangents[captured.graph.outputs[i]] = np.asarray(random.standard_normal(values[i].shape))
    return case


def array(tensor: torch.Tensor) -> Array:
    """A tensor's values, floats in float64."""
    tensor = tensor.detach().cpu()
    result: Array = (tensor.double() if tensor.is_floating_point() else tensor).contiguous().numpy().copy()
    return result


def departs(given: Array, expected: Array, tolerance: float = TOLERANCE) -> float | None:
    """The deviation of `given` from `expected`, relative to its largest element; None if there is none."""
    if given.shape != expected.shape:
        return float("inf")
    if given.dtype.kind in "biu" or not given.size:
        return None if np.array_equal(given, expected) else float("inf")
    special = ~np.isfinite(expected)
    if not np.array_equal(special, ~np.isfinite(given)) or not np.array_equal(
        expected[special], given[special], equal_nan=True
    ):
        return float("inf")
    difference = np.abs(given - expected)[~special].max(initial=0.0)
    error = float(difference / max(float(np.abs(expected[~special]).max(initial=0.0)), 1e-12))
    return error if error > tolerance and difference > 1e-12 else None


@dataclass
class Eager:
    """PyTorch's results of a case in float64: graph outputs, new values of written inputs, gradients, by name."""

    outputs: dict[str, Array]
    writes: dict[str, Array]
    gradients: dict[str, Array]


def eager(case: Case) -> Eager:
    """Run Dynamo's graph in float64 with autograd. Raises whatever PyTorch raises where float64 does not go through."""
    module = copy.deepcopy(case.module).double()
    wide = [
        a.detach().double().requires_grad_(a.requires_grad)
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in case.arguments
    ]
    given = [a.clone() if isinstance(a, torch.Tensor) else a for a in wide]  # which may be changed in place
    with torch.enable_grad():
        results = pytree.tree_leaves(module(*given))
    outputs: dict[str, torch.Tensor] = {}
    for source, result in zip(case.captured.outputs, results, strict=True):
        if source.kind == "graph":
            outputs.setdefault(case.graph.outputs[source.index], result)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    leaves, after = {}, {}
    for entry in case.captured.inputs:
        if entry.kind == "tensor":
            assert entry.position is not None
            leaves[entry.name], after[entry.name] = wide[entry.position], given[entry.position]
        elif entry.kind == "attribute" and entry.source in tensors:
            leaves[entry.name] = after[entry.name] = tensors[entry.source]
    gradients = _gradients(outputs, case.cotangents, {n: leaves[n] for n in case.wrt if n in leaves})
    writes = {name: array(after[name]) for name in case.graph.writes if name in after}
    return Eager({name: array(value) for name, value in outputs.items()}, writes, gradients)


def _gradients(
    outputs: Mapping[str, torch.Tensor], cotangents: Mapping[str, Array], leaves: Mapping[str, torch.Tensor]
) -> dict[str, Array]:
    carrying = [name for name in cotangents if name in outputs and outputs[name].requires_grad]
    if not carrying or not leaves:
        return {}
    seeds = [torch.as_tensor(cotangents[name]).to(outputs[name].dtype) for name in carrying]
    found = torch.autograd.grad([outputs[n] for n in carrying], list(leaves.values()), seeds, allow_unused=True)
    return {name: array(g) for name, g in zip(leaves, found, strict=True) if g is not None}


def first_departing_node(case: Case) -> tuple[Node, float] | None:
    """The first operator of the captured graph whose result is not PyTorch's result of the traced one."""
    trace = case.captured.trace
    assert trace is not None
    ours = interpret(case.graph, case.arrays).values
    producers = case.graph.producers()
    tensors = input_tensors(case.captured, case.arguments)
    attributes = {s.source: s.value for s in case.captured.inputs if s.kind == "attribute"}
    env: dict[fx.Node, Any] = {}
    for node in trace.module.graph.nodes:
        value = trace.arrays.get(node)
        try:
            if node.op == "placeholder":
                name = value.name if isinstance(value, Value) else ""
                tensor = tensors.get(name, attributes.get(name))
                env[node] = tensor.double() if tensor is not None and tensor.is_floating_point() else tensor
                env[node] = value if tensor is None else env[node]
                continue
            if node.op == "output":
                return None
            if node.op == "get_attr":
                env[node] = getattr(trace.module, str(node.target))
                continue
            arguments, keywords = (fx.node.map_arg(a, env.__getitem__) for a in (node.args, node.kwargs))
            result = node.target(*arguments, **keywords)
        except Exception:  # what exists in traces only, or float64 where the trace has another type
            return None
        env[node] = result
        if isinstance(value, Value) and isinstance(result, torch.Tensor) and value.name in producers:
            error = departs(ours[value.name], array(result)) if value.name in ours else None
            if error is not None:
                return producers[value.name], error
    return None
