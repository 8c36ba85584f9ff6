"""How the elements of an array lie in memory, as far as passes need to know."""

from __future__ import annotations

from daceml_train.ops.movement import Expand, Permute, Slice
from daceml_train.ops.movement import View as ViewOp
from daceml_train.ops.read import Read
from daceml_train.passes.base import Uses
from daceml_train.tensor import same
from daceml_train.transformations.intra_operator.peephole import memory_order


def dense(uses: Uses, name: str) -> bool:
    """Whether the elements of an array lie in row-major order without gaps, so that any view of it is free."""
    node = uses.producers.get(name)
    tensors = uses.graph.tensors
    while node is not None and isinstance(node.op, ViewOp | Permute | Expand | Slice | Read):
        x = node.inputs[0]
        match node.op:
            case Permute(dims=dims):
                moved = tuple(d for d in dims if not same(tensors[x].shape[d], 1))
                if moved != tuple(sorted(moved)):
                    return False
            case Expand() | Read():
                return False
            case Slice(dim=dim, step=step):
                if step != 1 or any(not same(size, 1) for size in tensors[x].shape[:dim]):
                    return False
        name, node = x, uses.producers.get(x)
    return memory_order(tensors[name]) == tuple(sorted(memory_order(tensors[name])))
