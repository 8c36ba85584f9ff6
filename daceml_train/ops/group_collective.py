"""Collectives that a model calls itself, over a process group that it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.collective import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from daceml_train.ops.operator import Array, Builder, Value
from daceml_train.tensor import Dim, Tensor

REDUCTIONS: dict[str, Callable[..., Array]] = {
    "sum": np.sum,
    "avg": np.mean,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
}
"""How arrays of all ranks are combined, by PyTorch's name for it."""

TRANSPOSED = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}
"""Collectives whose sums PyTorch differentiates, and the derivative of each."""


@dataclass(frozen=True)
class GroupCollective(Collective):
    """`kind` over the `ranks` of the process group named `group`: what `torch.distributed` does, and as it does it.

    `reduction` is that of all_reduce and reduce_scatter, `root` the rank in the group whose array is broadcast.
    Where it is not `differentiable`, PyTorch has no derivative for the call.
    """

    name = "group_collective"
    kind: str = "all_reduce"
    group: str = ""
    reduction: str = "sum"
    root: int = 0
    differentiable: bool = False

    @property
    def alike(self) -> Collective:
        """The collective of a step that does the same for sums."""
        if self.kind == "broadcast":
            return Broadcast(self.ranks, self.position, self.root)
        kinds = (AllReduce, AllGather, ReduceScatter, AllToAll)
        return next(kind(self.ranks, self.position) for kind in kinds if kind.name == self.kind)

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        if self.kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
            raise Invalid(f"group_collective has no kind {self.kind}")
        if self.reduction not in REDUCTIONS:
            raise Invalid(f"{self.kind} reduces by one of {', '.join(REDUCTIONS)}, given {self.reduction}")
        return self.alike.infer(*operands)

    def exchange(self, operands: Sequence[tuple[Array, ...]]) -> list[Array]:
        if self.kind not in ("all_reduce", "reduce_scatter"):
            return self.alike.exchange(operands)
        found: Array = REDUCTIONS[self.reduction](np.stack([x for (x,) in operands]), axis=0)
        return list(np.split(found, self.ranks)) if self.kind == "reduce_scatter" else [found] * self.ranks

    def vjp(self, b: Builder, grad_y: Value) -> Value:
        if not self.differentiable or self.kind not in TRANSPOSED or self.reduction != "sum":
            raise Unsupported(f"the derivative of the collective {self.kind} ({self.reduction}), which PyTorch lacks")
        op = GroupCollective(self.ranks, self.position, TRANSPOSED[self.kind], self.group, differentiable=True)
        return grad_y.apply(op)

    def flops(self, *operands: Tensor) -> Dim:
        return self.alike.flops(*operands)

    def network_bytes(self, *operands: Tensor) -> Dim:
        return self.alike.network_bytes(*operands)


__all__ = ["REDUCTIONS", "TRANSPOSED", "GroupCollective"]
