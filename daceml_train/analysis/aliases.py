"""Aliases: arrays that share other arrays' memory under a different indexing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.control import ControlFlow
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.movement import Expand, Permute, Slice, View
from daceml_train.ops.operator import Operator
from daceml_train.ops.read import Read
from daceml_train.tensor import Dim, Shape, Tensor, same, simplify


def is_alias(op: Operator) -> bool:
    """Whether the result of `op` aliases its operand: such an operator moves no bytes."""
    return isinstance(op, View | Permute | Expand | Slice | Read)


def roots(graph: Graph) -> dict[str, str]:
    """Array name -> the array whose memory it uses: itself, or the source of its chain of aliases."""
    root = {name: name for name in graph.inputs}
    for node in graph.nodes:
        for output in node.outputs:
            root[output] = root.get(node.inputs[0], node.inputs[0]) if is_alias(node.op) else output
    return root


def memories(graph: Graph) -> dict[str, str]:
    """Array -> the first array in its memory, through aliases and in-place results."""
    root = roots(graph)
    first: dict[str, str] = {}
    for node in graph.nodes:
        for result, argument in node.op.updates:
            operand = root[node.inputs[argument]]
            first[node.outputs[result]] = first.get(operand, operand)
    return {name: first.get(base, base) for name, base in root.items()}


def root_of(producers: Mapping[str, Node], name: str) -> str:
    """The array under the aliases that `producers` produce: `roots` for one array."""
    while (node := producers.get(name)) is not None and is_alias(node.op):
        name = node.inputs[0]
    return name


def readers_of_memory(graph: Graph, root: Mapping[str, str]) -> dict[str, list[int]]:
    """Root of aliases -> the positions of nodes that read it, also through aliases, which themselves read nothing."""
    readers: dict[str, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        if not is_alias(node.op):
            for name in dict.fromkeys(root[i] for i in node.inputs):
                readers.setdefault(name, []).append(position)
    return readers


def copying_views(graph: Graph) -> frozenset[str]:
    """Views that strides cannot express, such as of a transposed array: lowering copies their operand.

    What follows a copy has memory of its own. Operators that are not in a kernel yet compute where elements are.
    """
    types, stored = graph.tensors, set(graph.results)
    for node in reversed(graph.nodes):
        through = is_alias(node.op) and node.outputs[0] in stored
        if through or node.op.vendor or isinstance(node.op, Kernel | ControlFlow):
            stored.update(node.inputs)
    copied: set[str] = set()
    strided: dict[str, tuple[Dim, ...]] = {}  # aliases that are not contiguous
    for node in graph.nodes:
        if not is_alias(node.op):
            continue
        (x,), (y,) = node.inputs, node.outputs
        before, after = types[x], types[y]
        if x not in strided and before.order is None and isinstance(node.op, View):
            continue
        contiguous = x in copied or before.order is None
        strides = strided.get(x) or (Tensor(before.shape) if contiguous else before).strides
        moved = moved_strides(node.op, before.shape, strides, after.shape)
        if moved is not None:
            strided[y] = moved
        elif y in stored:
            copied.add(y)
    return frozenset(copied)


def moved_strides(op: Operator, shape: Shape, strides: Sequence[Dim], target: Shape) -> tuple[Dim, ...] | None:
    """The strides of an alias with sizes `target` of an array with these sizes and strides; None if it is a copy."""
    match op:
        case Permute(dims=dims):
            return tuple(strides[d] for d in dims)
        case Expand():
            lead = len(target) - len(shape)
            kept = (s if same(n, target[d + lead]) else 0 for d, (n, s) in enumerate(zip(shape, strides, strict=True)))
            return (0,) * lead + tuple(kept)
        case Slice(dim=dim, step=step):
            return tuple(simplify(s * step) if d == dim else s for d, s in enumerate(strides))
        case Read():
            return op.strides(strides)[0]
    return view_strides(shape, strides, target)


def view_strides(shape: Shape, strides: Sequence[Dim], target: Shape) -> tuple[Dim, ...] | None:
    """Strides that view an array of this layout with sizes `target`, or None if that needs a copy.

    The rule of PyTorch's `computeStride`: dimensions that are contiguous may be split and merged freely.
    """
    if any(isinstance(size, int) and size == 0 for size in shape):
        return Tensor(target).strides
    chunks: list[tuple[Dim, Dim]] = []  # (elements, stride of the innermost) of maximal contiguous runs
    for size, stride in zip(shape, strides, strict=True):
        if same(size, 1):
            continue
        if chunks and same(chunks[-1][1], size * stride):
            chunks[-1] = (simplify(chunks[-1][0] * size), stride)
        else:
            chunks.append((size, stride))
    result: list[Dim] = [0] * len(target)
    dims = list(range(len(target)))
    for size, stride in reversed(chunks):
        covered: Dim = 1
        while not same(covered, size):
            while dims and same(target[dims[-1]], 1):
                result[dims.pop()] = simplify(stride * covered)
            if not dims:
                return None
            d = dims.pop()
            result[d] = simplify(stride * covered)
            covered = simplify(covered * target[d])
            if isinstance(covered, int) and isinstance(size, int) and covered > size:
                return None
    step: Dim = 1
    for d in reversed(dims):
        if not same(target[d], 1):
            return None
        result[d] = step
    return tuple(result)
