"""The symbols of sizes of a graph's operands: which the shapes tell, which are equal, and which are burned in."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import guard_int
from torch.utils import _pytree as pytree

from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.results import example_of
from daceml_train.tensor import Dim, symbol


def told(operands: Sequence[Any]) -> set[sympy.Symbol]:
    """The size symbols that the shapes of the tensors determine."""
    shapes = [types.sizes(x.shape) for x in operands if isinstance(x, Tensor)]
    return {s for shape in shapes for size in shape for s in _free(size)}


def shape_env_of(operands: Sequence[Any]) -> Any:
    """What PyTorch knows of the symbols of sizes, if there are any."""
    given: list[Any] = [size for x in operands if isinstance(x, Tensor) for size in x.shape]
    return next((size.node.shape_env for size in given if isinstance(size, torch.SymInt)), None)


def tied(operands: Sequence[Any]) -> set[sympy.Symbol]:
    """The size symbols in equations that hold for the present sizes; PyTorch recompiles where they do not."""
    shape_env = shape_env_of(operands)
    guards = () if shape_env is None else shape_env.guards
    equations = [guard.expr for guard in guards if isinstance(guard.expr, sympy.Eq)]
    return {symbol(s.name) for equation in equations for s in equation.free_symbols}


def specialize(
    operands: Sequence[Any], symbols: set[sympy.Symbol], numbers: AbstractSet[sympy.Symbol] = frozenset()
) -> None:
    """Burn in all sizes but those over `symbols`, each with a guard: Dynamo recompiles for others.

    Graphs take their sizes from shapes alone, so integers that no shape tells are burned in, but for `numbers`, which
    reach no shape.
    """
    for x in operands:
        for size in x.shape if isinstance(x, Tensor) else (x,):
            if isinstance(size, torch.SymInt) and not _free(types.size(size)) <= symbols | numbers:
                guard_int(size)


def without_shapes(gm: fx.GraphModule, operands: Sequence[Any]) -> set[sympy.Symbol]:
    """The symbols of integer operands that occur in no tensor's sizes, strides or offset."""
    given = {s for x in operands if isinstance(x, torch.SymInt) for s in _free(types.size(x))}
    for node in gm.graph.nodes if given else ():
        for example in pytree.tree_leaves(example_of(node)):
            if isinstance(example, Tensor) and example.layout is torch.strided:
                for size in (*example.shape, *example.stride(), example.storage_offset()):
                    if isinstance(size, torch.SymInt):
                        given -= {symbol(str(s)) for s in size.node.expr.free_symbols}
    return given


def _free(size: Dim) -> set[sympy.Symbol]:
    return set() if isinstance(size, int) else set(size.free_symbols)


__all__ = ["shape_env_of", "specialize", "tied", "told", "without_shapes"]
