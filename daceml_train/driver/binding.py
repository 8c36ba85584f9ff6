"""From a call's arguments to a captured graph's inputs, and from its outputs to the call's results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree

from daceml_train.frontends.torch.capture import Captured, OutputSource, View
from daceml_train.tensor import Dim, evaluate

SEED = "seed"
"""The graph input that holds the seed of a call's random numbers."""


def input_tensors(captured: Captured, arguments: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Graph input -> tensor, without the seed and random numbers."""
    found: dict[str, torch.Tensor] = {}
    for source in captured.inputs:
        if source.kind == "tensor":
            assert source.position is not None
            found[source.name] = arguments[source.position]
        elif source.kind == "attribute":
            found[source.name] = source.value
    return found


def differentiable_outputs(captured: Captured) -> tuple[int, ...]:
    """The graph outputs that carry a gradient in eager execution."""
    graph = captured.graph
    pairs = zip(captured.outputs, captured.detached, strict=True)
    carrying = {o.index for o, detached in pairs if o.kind == "graph" and not detached}
    return tuple(i for i in sorted(carrying) if graph.tensors[graph.outputs[i]].dtype.is_float)


def sizes_of(captured: Captured, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The values of the graph's size symbols on these inputs."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        for size, value in zip(captured.graph.inputs[name].tensor.shape, tensor.shape, strict=True):
            if isinstance(size, sympy.Symbol):
                sizes[str(size)] = value
    return sizes


def memory_span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and behind its last one."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size() * bool(tensor.numel())


def results_of(captured: Captured, outputs: Sequence[torch.Tensor], arguments: Sequence[Any]) -> Any:
    """The results in the structure that the captured code returns."""
    sized = any(source.view is not None or source.kind == "size" for source in captured.outputs)
    sizes = sizes_of(captured, input_tensors(captured, arguments)) if sized else {}
    leaves = [
        _result(source, detached, outputs, arguments, sizes)
        for source, detached in zip(captured.outputs, captured.detached, strict=True)
    ]
    return pytree.tree_unflatten(leaves, captured.out_spec)


def _result(
    source: OutputSource,
    detached: bool,
    outputs: Sequence[torch.Tensor],
    arguments: Sequence[Any],
    sizes: dict[str, int],
) -> Any:
    def value(size: Dim) -> int:
        return evaluate(size, sizes)

    match source.kind:
        case "graph":
            result = outputs[source.index]
            result = result.detach() if detached and result.requires_grad else result
            return result if source.view is None else _viewed(result, source.view, value)
        case "input":
            owner = arguments[source.index]
            if source.view is None:
                return owner
            return _viewed(owner.detach() if detached and owner.requires_grad else owner, source.view, value)
        case "size":
            return value(source.value)
    return source.value


def _viewed(owner: torch.Tensor, view: View, value: Callable[[Dim], int]) -> torch.Tensor:
    shape, strides = ([value(s) for s in dims] for dims in (view.shape, view.strides))
    if view.dtype is not None:
        made = torch.empty((), dtype=view.dtype, device=owner.device)
        return made.set_(owner.untyped_storage(), value(view.offset), shape, strides)
    return owner.as_strided(shape, strides, owner.storage_offset() + value(view.offset))
