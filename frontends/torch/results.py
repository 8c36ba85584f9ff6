"""The results of a captured graph: its outputs, inputs, or views of either, where results share memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.rules.translate import Translator
from daceml_train.ops.operator import Value
from daceml_train.tensor import Dim, Shape, same


@dataclass(frozen=True, eq=False)
class View:
    """A view of an input or result: sizes, strides, the offset from its first element, another element type.

    Strides and offset count elements of the view's own type.
    """

    shape: Shape
    strides: Shape
    offset: Dim
    dtype: torch.dtype | None = None
    conjugated: bool = False
    negated: bool = False
    """Whether its elements are lazily conjugated or negated, counted from those in memory."""


@dataclass(frozen=True, eq=False)
class OutputSource:
    """What one flattened result is.

    `kind` is `graph` (graph output `index`, itself, or `view` of it, where results share memory), `input` (the input at
    position `index`, itself, or `view` of it), `size` (`value`, an expression over symbols), or `constant` (`value`).
    `strides` are the eager strides of what `index` names: a view refers to elements in that memory, so only these
    strides are correct. None: any strides. `version` is the number of in-place changes. `whole`: in eager execution it
    covers all of its memory, so that whoever keeps it keeps nothing else.
    """

    kind: str
    index: int = 0
    view: View | None = None
    value: Any = None
    strides: Shape | None = None
    version: int = 0
    whole: bool = False


def example_of(node: fx.Node) -> Any:
    """PyTorch's metadata of a node's result."""
    return node.meta.get("example_value", node.meta.get("val"))


def outputs_of(
    t: Translator,
    results: Sequence[Any],
    inputs: Sequence[Any],
    created: Sequence[Any],
    bases: Sequence[fx.Node],
    grad_enabled: bool,
) -> tuple[tuple[OutputSource, ...], tuple[bool, ...]]:
    """The description of each result, and whether it requires no gradient; values that results need become outputs.

    `results` and `inputs` are examples; `made` holds the results' values, and then those of `bases`.
    """
    shared = {_storage(example_of(n)): (example_of(n), v) for n, v in zip(bases, created[len(results) :], strict=False)}
    outputs: list[OutputSource] = []
    detached: list[bool] = []
    taken: dict[int, int] = {}
    for example, value in zip(results, created, strict=False):
        detached.append(not (grad_enabled and isinstance(example, Tensor) and example.requires_grad))
        storage = _storage(example) if isinstance(example, Tensor) else 0
        if isinstance(example, Tensor) and (owner := _owner(example, inputs)) is not None:
            base = inputs[owner]
            outputs.append(OutputSource("input", owner, _view(example, base), strides=types.sizes(base.stride())))
        elif storage in shared or isinstance(value, Value):
            base, value = shared.get(storage, (example, value))
            if storage not in taken:  # results of memory of their own are outputs of their own
                taken[storage] = len(t.graph.outputs)
                t.graph.output(t.dependent(value))
            dense = types.order_of(base) is not None
            strides = types.sizes(base.stride()) if dense else None
            view, index = _view(example, base), taken[storage]
            outputs.append(OutputSource("graph", index, view, None, strides, version(base), _keeps_nothing_else(base)))
        elif isinstance(value, sympy.Expr):
            outputs.append(OutputSource("size", value=value))
        else:
            outputs.append(OutputSource("constant", value=value))
    if t.required:
        raise Unsupported("a check of values in a graph without results of its own")
    return tuple(outputs), tuple(detached)


def shared_bases(nodes: Iterable[fx.Node], results: Sequence[Any], inputs: Sequence[Any]) -> list[fx.Node]:
    """The nodes that own memory shared by several results, none of it an input's.

    Raises `Unsupported` where no node does.
    """
    seen: dict[int, Tensor] = {}
    several: set[int] = set()
    for example in results:
        if isinstance(example, Tensor):
            storage = _storage(example)
            if seen.setdefault(storage, example) is not example:
                several.add(storage)
    several -= {_storage(e) for e in inputs if isinstance(e, Tensor)}
    owners: list[fx.Node] = []
    for node in nodes if several else ():
        example = example_of(node)
        if isinstance(example, Tensor) and _storage(example) in several and is_whole(example):
            several.discard(_storage(example))
            owners.append(node)
    if several:
        raise Unsupported("results that share memory of which no tensor of the graph is the whole")
    return owners


def is_whole(example: Tensor) -> bool:
    """Whether a tensor covers all of its memory, each element once."""
    size = types.size(example.untyped_storage().nbytes())
    whole = same(size, types.size(example.numel()) * example.element_size())
    return whole and types.order_of(example) is not None and not example.is_conj() and not example.is_neg()


def _keeps_nothing_else(example: Tensor) -> bool:
    """Whether a tensor is known to be all of its memory; one whose sizes depend on data is not."""
    try:
        return is_whole(example)
    except Unsupported:
        return False


def _storage(example: Tensor) -> int:
    """What identifies the memory of a tensor; one that has no single memory, such as a sparse one, shares none."""
    return int(example.untyped_storage()._cdata) if example.layout is torch.strided else -id(example)


def _owner(example: Tensor, inputs: Sequence[Any]) -> int | None:
    """The input whose memory a result is; of several in that memory one that carries a gradient as the result does."""
    storage = _storage(example)
    found = [i for i, e in enumerate(inputs) if isinstance(e, Tensor) and _storage(e) == storage]
    alike = example.requires_grad
    return max(found, key=lambda i: (inputs[i] is example, inputs[i].requires_grad == alike, i), default=None)


def _view(example: Tensor, owner: Tensor) -> View | None:
    """The view that `example` is of the memory of `owner`; None if it is `owner` itself."""
    if example is owner:
        return None
    shape, strides = types.sizes(example.shape), types.sizes(example.stride())
    first = types.size(owner.storage_offset())
    offset = types.size(example.storage_offset())
    lazy = example.is_conj(), example.is_neg()
    if example.dtype is owner.dtype:
        return View(shape, strides, offset - first, None, *lazy)
    start = first * owner.element_size() // example.element_size()
    return View(shape, strides, offset - start, example.dtype, *lazy)


def version(example: Tensor) -> int:
    """How often a tensor's memory was changed in place."""
    return 0 if example.is_inference() else example._version
