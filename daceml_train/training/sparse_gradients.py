"""Sparse gradients: that of an embedding table with `sparse=True`, as rows and the indices where they are added."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from daceml_train.errors import Unsupported
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.embedding import EmbeddingGrad
from daceml_train.ops.operator import Operator, Value
from daceml_train.ops.optimizer import AdagradUpdate, SGDUpdate
from daceml_train.storage.storable import storable


@storable
@dataclass(frozen=True)
class Rows:
    """A part of a sparse gradient: positions among the gradients' outputs of rows [..., D] and of indices [...].

    The row `padding_idx` (-1: none) gets nothing.
    """

    rows: int
    indices: int
    padding_idx: int


SparseGradients = Mapping[int, tuple[Rows, ...]]
"""The parts of each sparse gradient, by its position among the gradients."""


def sparse_arrays(graph: Graph) -> dict[str, tuple[Node, ...]]:
    """The arrays that are sparse tensors in PyTorch, and the `EmbeddingGrad`s whose sum each is."""
    found: dict[str, tuple[Node, ...]] = {}
    for node in graph.nodes:
        if isinstance(node.op, EmbeddingGrad) and node.op.sparse:
            found[node.outputs[0]] = (node,)
        elif _adds(node.op) and all(name in found for name in node.inputs):
            found[node.outputs[0]] = tuple(part for name in node.inputs for part in found[name])
    return found


def _adds(op: Operator) -> bool:
    return isinstance(op, Elementwise) and op.kind == "add"


def plain_descent(op: Operator) -> bool:
    """Whether an update has the same result for a sparse gradient as for a dense one."""
    if isinstance(op, SGDUpdate):
        return not op.has("momentum") and not op.has("weight_decay")
    # where a row has no gradient and its sum is 0, the update is 0 / eps
    return isinstance(op, AdagradUpdate) and not op.has("weight_decay") and op.has("eps")


def refuse_sparse_part(part: Node, plain: bool) -> None:
    """Raise `Unsupported` for the gradient of an embedding with `sparse=True`, unless its update is `plain` descent."""
    if isinstance(part.op, EmbeddingGrad) and part.op.sparse and not plain:
        raise Unsupported(_SPARSE, where=str(part.origin))


def as_dense(graph: Graph, gradient: Value) -> Value:
    """A gradient, as a dense array where it has sparse parts."""
    parts = sparse_arrays(graph).get(gradient.name, ())
    dense = [
        graph.emit(replace(part.op, sparse=False), *(graph.value(name) for name in part.inputs))[0]
        for part in parts
        if isinstance(part.op, EmbeddingGrad)
    ]
    return functools.reduce(lambda a, b: a + b, dense) if dense else gradient


_SPARSE = (
    "the gradient of an embedding with sparse=True is a sparse tensor, which inside a program only SGD and Adagrad "
    "without momentum and weight decay take"
)


def refuse_sparse(graph: Graph, dense: Sequence[str] = (), taken: Callable[[Operator], bool] | None = None) -> None:
    """Raise `Unsupported` if an array `dense` is a sparse tensor in PyTorch, or if an operator reads one.

    Additions may, and so may operators that are `taken`.
    """
    found = sparse_arrays(graph)
    reading = (node for node in graph.nodes if not _adds(node.op) and not (taken is not None and taken(node.op)))
    read = (name for node in reading for name in node.inputs)
    for name in (*read, *dense) if found else ():
        if name in found:
            raise Unsupported(_SPARSE, where=str(found[name][0].origin))


def as_rows(graph: Graph, results: int) -> tuple[Graph, SparseGradients]:
    """The graph, whose outputs from `results` on are gradients, with the sparse ones as their parts.

    The first part's rows replace the gradient; all other outputs follow the gradients.
    """
    found = sparse_arrays(graph)
    if found.keys().isdisjoint(graph.outputs[results:]):
        return graph, {}
    gradients, further = list(graph.outputs[results:]), list[str]()
    parts: dict[int, tuple[Rows, ...]] = {}
    for position, name in enumerate(graph.outputs[results:]):
        outputs = list[Rows]()
        for node in found.get(name, ()):
            rows, indices = node.inputs
            assert isinstance(node.op, EmbeddingGrad)
            if not outputs:
                gradients[position] = rows
                place = position
            else:
                place = len(gradients) + len(further)
                further.append(rows)
            outputs.append(Rows(place, len(gradients) + len(further), node.op.padding_idx))
            further.append(indices)
        if outputs:
            parts[position] = tuple(outputs)
    changed = graph.copy()
    changed.outputs = [*graph.outputs[:results], *gradients, *further]
    return changed, parts


def assembled(parts: Sequence[Rows], outputs: Sequence[torch.Tensor], table: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of `table`, uncoalesced as in PyTorch: an index may occur more than once."""
    places, values = list[torch.Tensor](), list[torch.Tensor]()
    for part in parts:
        index, rows = outputs[part.indices].reshape(-1).long(), outputs[part.rows].reshape(-1, *table.shape[1:])
        if part.padding_idx >= 0:
            kept = index != part.padding_idx
            index, rows = index[kept], rows[kept]
        places.append(index)
        values.append(rows)
    index, rows = (torch.cat(t) if len(t) > 1 else t[0] for t in (places, values))
    return torch.sparse_coo_tensor(index[None], rows, table.shape, check_invariants=False)
