"""BlockedAttention: attention over few keys runs in this package's own kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.attention import Attention
from daceml_train.ops.fused_attention import FusedAttention
from daceml_train.ops.movement import Permute
from daceml_train.ops.movement import View as ViewOp
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, DType, same_shape

HEADS = (0, 2, 1, 3)
"""[B, H, T, E] as [B, T, H, E], and back."""


@dataclass(frozen=True)
class BlockedAttention(Rewrite):
    """Compute attention with all scores of a block of queries in cache, where there are at most `keys` keys.

        q, k, v -> [attention] -> y, logsumexp      =>      q, k, v -> [fused_attention] -> y, logsumexp

    PyTorch's flash kernel iterates over blocks of keys and rescales its partial sums after each, which pays off
    where a row block of scores exceeds the cache. Both kernels read and write the same arrays; this one writes the
    heads of a query side by side, as they are read next.
    """

    level = "forward"
    targets = ("cpu",)
    keys: int = 512

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        return {} if isinstance(node.op, Attention) else None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        op = match.root.op
        assert isinstance(op, Attention)
        q, k = (match.uses.graph.tensors[name] for name in match.root.inputs[:2])
        count = k.shape[2]
        yield not op.causal, "the library skips half of the scores of causal attention"
        yield len(match.root.inputs) == 3, "the library adds masks while it computes scores"
        yield q.dtype is DType.float32, f"the kernel computes in float32, not in {q.dtype.short}"
        yield isinstance(q.shape[3], int), f"the scale depends on the size {q.shape[3]}"
        few = isinstance(count, int) and count <= self.keys
        yield few, f"{count} keys are more than {self.keys}: a row block of scores would exceed the cache"
        y, level = match.root.outputs
        merged = _merged(match.uses, y) and level not in match.uses.visible and not match.uses.readers[level]
        yield merged, f"%{y} is not only reshaped with the heads of a query side by side, as the kernel lays them out"

    def traffic(self, match: Match) -> Dim:
        return match.uses.change(self.sweep(match.uses.graph, {id(match.root): match}))

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        op, (q, k, v) = match.root.op, (values[name] for name in match.root.inputs)
        assert isinstance(op, Attention)
        return builder.emit(FusedAttention(scale=op.factor(q.tensor)), q, k, v)


def _merged(uses: Uses, y: str) -> bool:
    """Whether the result's only use is a reshape after heads and queries are transposed.

    The results of other operators would inherit its order of dimensions in memory, which differs from the library's,
    and the user would see it.
    """
    for turned in _readers(uses, y):
        if not isinstance(turned.op, Permute) or turned.op.dims != HEADS or turned.outputs[0] in uses.visible:
            return False
        if not all(isinstance(reader.op, ViewOp) for reader in uses.readers[turned.outputs[0]]):
            return False
    return y not in uses.visible


def _readers(uses: Uses, name: str) -> Iterator[Node]:
    """The readers of an array, through views that merge its dimensions and split them back."""
    shape = uses.graph.tensors[name].shape
    for node in uses.readers[name]:
        folded = node.outputs[0]
        again = uses.readers[folded] if isinstance(node.op, ViewOp) and folded not in uses.visible else []
        same = [n.outputs[0] for n in again if isinstance(n.op, ViewOp) and n.outputs[0] not in uses.visible]
        if again and len(same) == len(again) and all(same_shape(uses.graph.tensors[n].shape, shape) for n in same):
            for unfolded in same:
                yield from _readers(uses, unfolded)
        else:
            yield node
