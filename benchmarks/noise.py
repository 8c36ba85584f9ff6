"""Noise: eager execution with noise in the last bit, which shows the effect of rounding on a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
NOISE = 2.0**-23
"""Relative to the results of operators; the noise of eager execution's results shows how much rounding grows."""
RUNS = 3
"""Runs with noise."""
LOST = 1e-2
"""Relative spread from which on a number has no digits left: noise of the last bit grew a hundred thousand times."""
TAKEN_APART = get_decompositions(
    [
        aten.native_batch_norm,
        aten.native_batch_norm_backward,
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten.native_group_norm,
        aten.native_group_norm_backward,
        aten._softmax,
        aten._softmax_backward_data,
        aten._log_softmax,
        aten._log_softmax_backward_data,
    ]
)
"""Operators that are several roundings whoever computes them: of a mean, of a deviation, of every term."""

PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward}
"""Operators that sum products."""


class Rounding(TorchDispatchMode):
    """Noise in the last bit of every operator's result, forward and backward: Monte Carlo arithmetic (Parker, 1997).

    Where terms cancel, the rounding of each grows to the same size whoever computes them, and eager execution may or
    may not be lucky; its spread under this noise is what rounding can do. With `terms`, the inputs of operators
    that sum products have noise, too: each term is rounded, and not the sum alone (full Monte Carlo arithmetic).
    """

    def __init__(self, seed: int, terms: bool = False) -> None:
        super().__init__()
        self.terms = terms
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        apart = TAKEN_APART.get(func)
        if apart is not None:
            with self:
                return apart(*args, **(kwargs or {}))
        if self.terms and func.overloadpacket in PRODUCTS:
            args = torch.utils._pytree.tree_map_only(Tensor, self._noisy, args)
        result = func(*args, **(kwargs or {}))
        if any(r.alias_info is not None for r in func._schema.returns):
            return result
        return torch.utils._pytree.tree_map_only(Tensor, self._noisy, result)

    def _noisy(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            return x
        return x * (1 + NOISE * (2 * torch.rand(x.shape, generator=self.generator) - 1))
