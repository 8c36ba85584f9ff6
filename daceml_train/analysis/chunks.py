"""Chunked gradients: an update consumes each chunk of rows before the next chunk is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from daceml_train.analysis.aliases import memories
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.elementwise import Cast, Elementwise, Full
from daceml_train.ops.embedding import AddRows, EmbeddingGrad
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.movement import Permute, View
from daceml_train.ops.operator import Operator
from daceml_train.tensor import Dim, DType, same, same_shape


@dataclass(frozen=True)
class UpdateChain:
    """A gradient [R, N], optional rows that are added to it, and the kernel that is the only reader of the sum.

        a, b -> [matmul] -> d;  d, i, g -> [add_rows] -> e;  e, p -> [update over p]
        g, i -> [embedding_grad] -> d;  d, p -> [update over p]

    Rows of d correspond to elements of p along their first dimension, so the chain can run for a chunk of rows at a
    time. Fields are positions of nodes; `views` are the aliases between them through which the kernel reads.
    """

    gradient: int
    rows: int | None
    views: tuple[int, ...]
    update: int
    argument: int
    """The kernel's argument that is the sum."""


def chunks_of(op: Operator) -> int:
    """The number of chunks in which an operator's result is computed."""
    return op.chunks if isinstance(op, Matmul | EmbeddingGrad) else 1


def is_chunked(graph: Graph) -> bool:
    """Whether an operator computes its result in chunks."""
    return any(isinstance(node.op, Matmul | EmbeddingGrad) and node.op.chunks > 1 for node in graph.nodes)


def update_chains(graph: Graph) -> dict[int, UpdateChain]:
    """Update -> its chain, for the chunked gradients of a graph."""
    if not is_chunked(graph):
        return {}
    readers, memory = readers_of(graph), memories(graph)
    found = {}
    for position, node in enumerate(graph.nodes):
        if chunks_of(node.op) > 1:
            chain = update_chain_of(graph, position, readers, memory)
            assert isinstance(chain, UpdateChain), f"{node} cannot be computed in chunks: {chain}"
            found[chain.update] = chain
    return found


def mended(graph: Graph) -> Graph:
    """The graph in which gradients are unchunked if the nodes of their chain are no longer consecutive."""
    if not is_chunked(graph):
        return graph
    readers, memory = readers_of(graph), memories(graph)
    other = graph.copy()
    for position, node in enumerate(graph.nodes):
        if chunks_of(node.op) > 1 and isinstance(update_chain_of(graph, position, readers, memory), str):
            assert isinstance(node.op, Matmul | EmbeddingGrad)
            other.nodes[position] = replace(node, op=replace(node.op, chunks=1))
    return other


def chunk_rows(graph: Graph, chain: UpdateChain) -> int:
    """The number of rows of a chunk; the last may have fewer."""
    node = graph.nodes[chain.gradient]
    count = graph.tensors[node.outputs[0]].shape[0]
    assert isinstance(count, int)
    return -(-count // chunks_of(node.op))


def readers_of(graph: Graph) -> dict[str, list[int]]:
    """Array -> the positions of its readers; for results, also the end of the graph."""
    found: dict[str, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        for name in dict.fromkeys(node.inputs):
            found.setdefault(name, []).append(position)
    for name in graph.results:
        found.setdefault(name, []).append(len(graph.nodes))
    return found


def update_chain_of(
    graph: Graph, position: int, readers: Mapping[str, Sequence[int]], memory: Mapping[str, str], apart: bool = False
) -> UpdateChain | str:
    """The chain of the gradient at a position, or why it cannot be computed in chunks.

    Its nodes must be consecutive; with `apart`, it suffices that they could be moved together.
    """
    node = graph.nodes[position]
    (name,) = node.outputs
    if len(graph.tensors[name].shape) != 2 or not all(isinstance(size, int) for size in graph.tensors[name].shape):
        return f"%{name} is not a matrix of known sizes"
    takes_rows = graph.tensors[name].dtype in (DType.float32, DType.float64)
    if isinstance(node.op, EmbeddingGrad) and not takes_rows:
        return f"%{name} is {graph.tensors[name].dtype.short}, for which there is no index_add kernel"
    count = graph.tensors[name].shape[0]
    rows, views, read, at = None, list[int](), list(node.inputs), position
    while True:
        found = readers.get(name, ())
        if len(found) != 1 or found[0] == len(graph.nodes):
            return f"%{name} has other readers than its update"
        if not apart and found[0] != at + 1:
            return f"%{name} is not read by the next operator"
        (at,) = found
        following = graph.nodes[at]
        if isinstance(following.op, Kernel):
            break
        if isinstance(following.op, AddRows) and following.op.in_place and takes_rows and rows is None and not views:
            rows = at
            read += following.inputs[1:]
        elif _keeps_rows(following, count, graph):
            views.append(at)
        else:
            return f"%{name} is read by {following.op.label}, which is not an update"
        (name,) = following.outputs
    between = graph.nodes[position + 1 : at] if apart else []
    reason = _by_rows(graph, following, name) or _unread((*between, following), read, memory)
    return reason or UpdateChain(position, rows, tuple(views), at, following.inputs.index(name))


def _keeps_rows(node: Node, count: Dim, graph: Graph) -> bool:
    """Whether an alias preserves the first dimension."""
    if isinstance(node.op, Permute):
        return node.op.dims[0] == 0
    return isinstance(node.op, View) and same(graph.tensors[node.outputs[0]].shape[0], count)


def _by_rows(graph: Graph, node: Node, gradient: str) -> str:
    """Why a kernel cannot run for a chunk of rows; empty if it can."""
    kernel, shape = node.op, graph.tensors[gradient].shape
    assert isinstance(kernel, Kernel)
    for s in kernel.statements:
        if not isinstance(s.op, Elementwise | Cast) and not (isinstance(s.op, Full) and s.op.shape == ()):
            return f"{s.op.label} in its update is not elementwise"
    if node.inputs.count(gradient) != 1:
        return f"%{gradient} occurs twice in the arguments of its update"
    for name in node.inputs:
        sizes = graph.tensors[name].shape
        if len(sizes) == len(shape) and not same_shape(sizes, shape) and not same(sizes[0], 1):
            return f"%{name} does not have the update's sizes"
    updated = dict(kernel.updates)
    for k, name in enumerate(node.outputs):
        whole = same_shape(graph.tensors[name].shape, shape)
        if graph.tensors[name].shape != () and not (whole and k in updated and node.inputs[updated[k]] != gradient):
            return f"%{name} does not replace an argument of the update in place"
    return ""


def _unread(nodes: Sequence[Node], read: Sequence[str], memory: Mapping[str, str]) -> str:
    """Why a later chunk would read memory that nodes have overwritten; empty if none would."""
    over = {memory[node.inputs[argument]] for node in nodes for _, argument in node.op.updates}
    name = next((n for n in read if memory[n] in over), None)
    return "" if name is None else f"%{name} is overwritten before the last chunk is computed"
