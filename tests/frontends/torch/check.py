"""Holds a captured graph, interpreted in NumPy and differentiated by our own pass, to eager values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch._dynamo
from torch import nn
from torch.utils import _pytree as pytree

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.sizes import bind
from daceml_train.autodiff.reverse import differentiate
from daceml_train.driver.binding import viewed
from daceml_train.frontends.torch.capture.capture import Captured, InputSource, capture
from daceml_train.frontends.torch.results import OutputSource
from daceml_train.graph.graph import Graph
from daceml_train.tensor import DType


@dataclass
class Interpreting:
    """A Dynamo backend that runs captured graphs in NumPy and their gradients beside them."""

    captured: list[Captured] = field(default_factory=list)
    gradients: dict[int, np.ndarray] = field(default_factory=dict)
    """id of a tensor -> its gradient for a cotangent of ones."""

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        captured = capture(gm, example_inputs)
        self.captured.append(captured)

        def run(*operands: Any) -> Any:
            arrays = {s.name: array(tensor_of(s, operands)) for s in captured.inputs if s.name}
            if captured.random:
                arrays["seed"] = np.asarray(7)
            results = interpret(captured.graph, arrays)
            self._differentiate(captured, arrays, operands)
            outputs = [output(o, operands, results.outputs, results.sizes) for o in captured.outputs]
            for name, value in results.writes.items():
                (target,) = (s for s in captured.inputs if s.name == name)
                with torch.no_grad():
                    tensor_of(target, operands).copy_(torch.as_tensor(value))
            return pytree.tree_unflatten(outputs, captured.out_spec)

        return run

    def _differentiate(self, captured: Captured, arrays: dict[str, Any], operands: Sequence[Any]) -> None:
        graph = captured.graph.copy()
        of, cotangents = {}, {}
        for source, detached in zip(captured.outputs, captured.detached, strict=True):
            if source.kind != "graph" or detached:
                continue
            name = captured.graph.outputs[source.index]
            if name not in of:
                of[name] = graph.input(graph.fresh("cotangent"), graph.tensors[name])
        wanted = {
            s.name: tensor_of(s, operands) for s in captured.inputs if s.name and tensor_of(s, operands).requires_grad
        }
        if not of or not wanted:
            return
        found = differentiate(graph, of, list(wanted))
        names = [name for name, value in found.items() if value is not None]
        graph.outputs = [value.name for value in found.values() if value is not None]
        graph.writes = {}
        sizes = interpret(captured.graph, arrays)
        for name, value in of.items():
            cotangents[value.name] = np.ones_like(sizes.values[name])
        results = interpret(graph, {**arrays, **cotangents}).outputs
        for name, value in zip(names, results, strict=True):
            key = id(wanted[name])
            self.gradients[key] = self.gradients.get(key, 0) + value


def tensor_of(source: InputSource, operands: Sequence[Any]) -> Any:
    if source.kind == "number":
        return torch.tensor(operands[source.position])
    return source.value if source.kind == "attribute" else operands[source.position]


def array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.double() if tensor.is_floating_point() else tensor).contiguous().numpy().copy()


def output(source: OutputSource, operands: Sequence[Any], results: Sequence[np.ndarray], sizes: dict[str, int]) -> Any:
    match source.kind:
        case "graph":
            tensor = torch.as_tensor(np.ascontiguousarray(results[source.index])).reshape(results[source.index].shape)
            if source.view is None or source.strides is None:
                return tensor
            strides = [bind(s, sizes) for s in source.strides]
            return viewed(torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor), source, sizes)
        case "input":
            owner = operands[source.index]
            if (view := source.view) is None:
                return owner
            return owner.as_strided(view.shape, view.strides, owner.storage_offset() + view.offset)
        case "size":
            return bind(source.value, sizes)
    return source.value


def check(
    function: Callable[..., Any],
    *inputs: Any,
    dynamic: bool | None = False,
    gradients: bool = True,
    tolerance: float = 1e-6,
    values: bool = True,
    fullgraph: bool = True,
) -> Captured:
    """Capture `function` on `inputs`; values, changed inputs and gradients equal eager's. The (last) captured graph."""
    torch._dynamo.reset()
    module = function if isinstance(function, nn.Module) else None
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    held = [*tensors, *(pytree.tree_leaves(list(module.parameters()) + list(module.buffers())) if module else [])]
    before = [t.detach().clone() for t in held]
    expected, expected_after, expected_gradients = _eager(function, inputs, held, gradients)
    _restore(held, before)
    backend = Interpreting()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    torch.manual_seed(0)
    result = compiled(*inputs)
    assert backend.captured, "nothing was captured"
    if values:
        compare(result, expected, tolerance)
        compare([t.detach().clone() for t in held], expected_after, tolerance)
    if gradients and values:
        for position, (tensor, wanted) in enumerate(zip(held, expected_gradients, strict=True)):
            if tensor.requires_grad:
                given = backend.gradients.get(id(tensor), np.zeros(tensor.shape))
                np.testing.assert_allclose(
                    np.broadcast_to(given, tensor.shape), array(wanted), tolerance, tolerance, err_msg=f"#{position}"
                )
    _restore(held, before)
    for checked in backend.captured:
        well_formed(checked.graph)
    return backend.captured[-1]


def _eager(function: Any, inputs: Any, held: Any, gradients: bool) -> tuple[Any, list[torch.Tensor], list[Any]]:
    for t in held:
        t.grad = None
    torch.manual_seed(0)
    result = function(*inputs)
    after = [t.detach().clone() for t in held]
    if gradients:
        results = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        storages = {h.untyped_storage()._cdata for h in held}
        fresh = list({id(t): t for t in results if t.untyped_storage()._cdata not in storages}.values())
        if fresh:
            torch.autograd.backward(fresh, [torch.ones_like(t) for t in fresh])
    wanted = [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in held]
    detached = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), result)
    return detached, after, wanted


def _restore(held: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(held, before, strict=True):
            tensor.grad = None
            tensor.copy_(value)


def compare(result: Any, expected: Any, tolerance: float) -> None:
    for got, wanted in zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True):
        if isinstance(wanted, torch.Tensor):
            np.testing.assert_allclose(array(got), array(wanted), tolerance, tolerance)
        else:
            assert got == wanted


def well_formed(graph: Graph) -> None:
    """Every node reads what exists, and has the types its operators infer."""
    known = set(graph.inputs)
    for node in graph.nodes:
        assert known.issuperset(node.inputs), node
        inferred = node.op.infer(*(graph.tensors[i] for i in node.inputs))
        assert [graph.tensors[o].shape for o in node.outputs] == [t.shape for t in inferred], node
        known.update(node.outputs)
    assert known.issuperset(graph.results)


def operators(captured: Captured) -> list[str]:
    return [node.op.label for node in captured.graph.nodes]


def double(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).double()


FLOATS = (DType.float32, DType.float64)
