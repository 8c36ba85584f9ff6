"""In-place changes that PyTorch's functional traces silently get wrong: each is refused and runs in PyTorch.

A trace turns a change of a view into a new value of its base. For `unfold` it sets elements outside of all windows to
zero, for `expand` it adds up what was written to one element, for `as_strided` it assumes a row-major base and writes
one of several elements at an address, and what is written to `x.detach()` has no gradient. A derivative in PyTorch
reads what is in memory by then, also what was written there through `x.data`; a trace keeps what was there before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.dynamo.origin import origin
from daceml_train.frontends.torch.results import example_of, is_whole


def refuse_lost_writes(node: fx.Node, changed: fx.Node | None) -> None:
    """Raise if `node` changes `changed` in place and a functional trace would write something else."""
    operand = _tensor(node.args[0]) if _name(node) == "as_strided" and node.args else None
    if operand is not None and operand.requires_grad and not is_whole(operand):
        raise Unsupported("as_strided of a part of a tensor that has a gradient", where=str(origin(node)))
    if changed is None or not isinstance(_tensor(changed), torch.Tensor):
        return
    where = str(origin(node))
    if any(isinstance(seen := _tensor(view), torch.Tensor) and _overlaps(seen) for view in _views(changed)):
        raise Unsupported("an in-place change of a tensor whose elements share memory with one another", where=where)
    if any(_name(n) == "unfold" for n in _views(changed)):
        raise Unsupported("an in-place change of windows", where=where, advice="change the tensor they are taken from")
    if any(_detaches(n) and (seen := _tensor(n)) is not None and seen.requires_grad for n in _views(changed)):
        raise Unsupported("an in-place change of a detached tensor by values that have a gradient", where=where)
    if any(
        _name(n) == "as_strided" and (seen := _tensor(n)) is not None and seen.requires_grad for n in _views(changed)
    ):
        raise Unsupported("an in-place change of an as_strided view that has a gradient", where=where)
    if any(map(_detaches, _views(changed))) and _in_a_derivative(node, changed):
        raise Unsupported("a change through detach() or .data of values that a derivative may read", where=where)
    for other in changed.graph.nodes:
        if _name(other) == "as_strided" and _same_memory(other, changed):
            operand = _tensor(other.args[0])
            if not (isinstance(operand, torch.Tensor) and operand.is_contiguous() and is_whole(operand)):
                raise Unsupported("an in-place change of memory that as_strided views of a part look at", where=where)


_FUNCTIONS = "tanh sigmoid exp expm1 relu elu selu softmax log_softmax logsumexp sqrt rsqrt reciprocal tan"
_KEPT = frozenset(_FUNCTIONS.split())
"""Functions whose derivatives read their results."""


def _in_a_derivative(node: fx.Node, changed: fx.Node) -> bool:
    """Whether a derivative may read the memory of `changed`, of which `node` changes the values: that of an operator
    before it, or of the one that computed them.
    """
    *_, first = _views(changed)
    read = False
    for other in itertools.takewhile(lambda n: n is not node, node.graph.nodes):
        result = _tensor(other) if other.op in ("call_function", "call_method") else None
        if _name(other) == "loss_gradients":  # of a whole step, whose derivative is over
            read = False
        elif result is not None and other is first:
            read = _name(other).strip("_") in _KEPT
        elif result is not None and result.requires_grad and not _same_memory(other, changed):
            read = read or any(_same_memory(operand, changed) for operand in other.all_input_nodes)
    return read


def _detaches(node: fx.Node) -> bool:
    """Whether a node detaches its operand; what is written to the result later may carry a gradient."""
    return _name(node) in ("detach", "_get_data_attr") or (_name(node) == "getattr" and node.args[1] == "data")


def _overlaps(example: torch.Tensor) -> bool:
    """Whether two elements may share an address."""
    reach = 0
    dims = [(s, n) for n, s in zip(example.shape, example.stride(), strict=True) if not isinstance(n, int) or n > 1]
    if any(not isinstance(number, int) for dim in dims for number in dim):
        return any(isinstance(s, int) and s == 0 for s, _ in dims)
    for stride, size in sorted(dims):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and those of which it is a view, one after the other."""
    while True:
        yield node
        operand = node.args[0] if node.op in ("call_function", "call_method") and node.args else None
        if not isinstance(operand, fx.Node) or not _same_memory(operand, node):
            return
        node = operand


def _same_memory(a: fx.Node, b: fx.Node) -> bool:
    first, second = _tensor(a), _tensor(b)
    if first is None or second is None or {first.layout, second.layout} != {torch.strided}:
        return False
    return _memory(first) == _memory(second)


def _memory(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory, also of one inside `torch.func`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)


def _tensor(node: Any) -> torch.Tensor | None:
    """The first tensor among a node's results."""
    found = pytree.tree_leaves(example_of(node)) if isinstance(node, fx.Node) else []
    return next((leaf for leaf in found if isinstance(leaf, torch.Tensor)), None)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
