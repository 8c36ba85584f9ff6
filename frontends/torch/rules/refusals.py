"""Element types that eager execution refuses: a rule would compute with them what PyTorch has no kernel for."""

from __future__ import annotations

import functools
import re
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from daceml_train.errors import Unsupported

Rule = TypeVar("Rule")

_OTHERS = """
_prelu_kernel.default _softmax.default _log_softmax.default addr.default cumsum.default dot.default floor_divide.Scalar
floor_divide.default hardswish.default huber_loss.default index_add.default index_copy.default index_put.default
log_sigmoid_forward.default masked_scatter.default mse_loss.default rsub.Tensor scatter_add.default
smooth_l1_loss.default sort.stable topk.default
"""
OTHERS = frozenset(f"aten.{name}" for name in _OTHERS.split())
"""Operators that also run on tensors of one element, besides those tagged as pointwise or as reductions."""

_NORMALIZATIONS = re.compile(
    r"aten\.(native_layer_norm|native_group_norm|_native_batch_norm_legit\w*|_batch_norm_\w+)\."
)

_OF_TYPES = re.compile(
    r"not implemented for|dtype|datatype|scalar type|[Bb]ool|negative integer powers|floating.point", re.IGNORECASE
)
"""What PyTorch says of element types; other errors are those of the one-element operands."""


def admitted(rule: Rule, node: fx.Node) -> Rule:
    """The rule of a node. Raises `Unsupported` where eager execution raises for the element types of its operands."""
    if rule is not None:
        _refuse_types(node)
    return rule


def _refuse_types(node: fx.Node) -> None:
    values = [a.meta.get("val") for a in node.all_input_nodes]
    types = {value.dtype for value in values if isinstance(value, Tensor) and value.device.type == "cpu"}
    if not types or not isinstance(node.target, torch._ops.OpOverload):
        return
    if len(types) == 1 and next(iter(types)).is_floating_point and not _has_truth_value(node):
        return
    if _NORMALIZATIONS.match(str(node.target)):
        refused = _mixed(values)
    elif str(node.target) in OTHERS or not _tags().isdisjoint(node.target.tags):
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs), is_leaf=lambda leaf: leaf is None)
        refused = _refusal(node.target, tuple(map(_key, leaves)), structure)
    else:
        return
    if refused:
        raise Unsupported(f"{node.target} of {' and '.join(sorted(map(str, types)))}, which PyTorch refuses: {refused}")


@functools.cache
def _tags() -> frozenset[torch.Tag]:
    """Tags of operators that run on tensors of one element; PyTorch before 2.13 has none for reductions."""
    return frozenset(tag for name in ("pointwise", "reduction") if (tag := getattr(torch.Tag, name, None)) is not None)


def _has_truth_value(node: fx.Node) -> bool:
    """Whether a number of `x - True` is a truth value; attributes such as `keepdim` come as keywords or later."""
    return any(isinstance(argument, bool) for argument in node.args[:2])


def _mixed(values: list[Any]) -> str:
    """Why a normalization of `values[0]` is refused, or nothing: 16-bit inputs may have float32 parameters."""
    given, *others = (value.dtype for value in values if isinstance(value, Tensor))
    admitted = {given, torch.float32} if given in (torch.float16, torch.bfloat16) else {given}
    if not given.is_floating_point:
        return "an input of integers"
    return "" if admitted.issuperset(others) else "parameters of another element type"


def _key(leaf: Any) -> Any:
    """An argument as far as it decides: element type and number of dimensions of a tensor, an attribute itself."""
    value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
    if isinstance(value, Tensor):
        return (value.dtype, value.dim())
    return value if isinstance(value, int | float | bool | str | torch.dtype | None) else 1


@functools.lru_cache(maxsize=4096)
def _refusal(target: torch._ops.OpOverload, keys: tuple[Any, ...], structure: pytree.TreeSpec) -> str:
    """What PyTorch says of the element types, or nothing: the operator is called on operands of one element."""
    said = ""
    for number in (1, 0):  # divisors are not zero, indices are within bounds
        leaves = [torch.full((1,) * k[1], number, dtype=k[0]) if isinstance(k, tuple) else k for k in keys]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        try:
            with torch.no_grad():
                target(*args, **kwargs)
            return ""
        except Exception as error:
            said = str(error).partition("\n")[0]
            if not _OF_TYPES.search(said):
                return ""
    return said
