"""What a node of TorchDynamo's graph says of itself: its name, its example, the tensor that it changes in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import numpy_method_wrapper, numpy_operator_wrapper

from daceml_train.frontends.torch.capture import graph_leaves


def name_of(target: Any) -> str:
    """The name of a function, of a method, or of an operator."""
    if isinstance(target, str):
        return target
    return str(getattr(target, "__name__", "") or getattr(target, "_name", "") or target)


def changed_in_place(node: fx.Node) -> fx.Node | None:
    """The node of the tensor that `node` changes in place, by PyTorch's naming; None if it changes none."""
    name = name_of(node.target)
    if graph_leaves.marks_leaf(node):
        return None
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    if isinstance(node.target, numpy_method_wrapper | numpy_operator_wrapper):  # of what shares memory with a tensor
        name = name.removeprefix("wrapped_").strip("_")
        name = "setitem" if name in _ARRAY_METHODS else name
    in_place = (name.endswith("_") and not name.endswith("__") and name not in _KEYWORDS) or name in _IN_PLACE_OPERATORS
    if not (in_place or node.kwargs.get("inplace")):
        return None
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) else None


_ARRAY_METHODS = frozenset({"fill", "sort", "partition", "put", "itemset"})
"""Methods of NumPy's arrays that change them."""

_KEYWORDS = frozenset({"and_", "or_", "not_", "is_"})
"""Functions of `operator` that are named after keywords."""

_AUGMENTED = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor imatmul ilshift irshift"
_IN_PLACE_OPERATORS = frozenset({"setitem", *_AUGMENTED.split()})


def storage_of(example: Any) -> int | None:
    """The identity of an example's memory; None if it has none, as tensors inside `torch.func`."""
    if not isinstance(example, torch.Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(example):
        return None
    return int(example.untyped_storage()._cdata)
