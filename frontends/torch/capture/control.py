"""PyTorch's control flow (`torch.cond`, `scan`, `while_loop`, `map`): the arguments of Dynamo's operators for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.operators import Control

CONTROL = frozenset({"cond", "scan", "while_loop", "map_impl"})
"""Names of the higher-order operators that become control flow of the graph."""


def control_of(name: str, args: Sequence[Any], results: Any, grad_enabled: bool, where: str) -> Control:
    """The control flow of a higher-order operator on these arguments. Raises `Unsupported` for non-tensors."""
    bodies = tuple(a for a in args if isinstance(a, fx.GraphModule))
    match name:
        case "cond":
            states, slices, shared = [], [], list(args[3])
        case "scan":
            states, slices, shared = list(args[1]), list(args[2]), list(args[3])
        case "while_loop":
            states, slices, shared = list(args[2]), [], list(args[3])
        case _:
            states, slices, shared = [], list(args[1]), list(args[2])
    examples = pytree.tree_leaves(results)
    if not all(isinstance(x, torch.Tensor) for x in (*states, *slices, *examples)):
        raise Unsupported(f"{name} that carries or makes what is not a tensor", where=where)
    if not any(isinstance(x, torch.Tensor) for x in (*states, *slices, *shared, *args[:1])):
        raise Unsupported(f"{name} of no tensor", where=where)
    groups = (len(states), len(slices), len(shared))
    return Control(name, bodies, (*states, *slices, *shared), groups, tuple(examples), grad_enabled)
