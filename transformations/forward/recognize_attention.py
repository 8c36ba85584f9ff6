"""RecognizeAttention: hand-written attention becomes one operator that stores no T x S matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.attention import Attention
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.elementwise import Elementwise, Full
from daceml_train.ops.fused_attention import FusedAttention
from daceml_train.ops.movement import Expand
from daceml_train.ops.movement import View as ViewOp
from daceml_train.ops.operator import Value
from daceml_train.ops.random import Dropout, DropoutGiven
from daceml_train.ops.softmax import Softmax
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, DType, Shape, broadcast, same_shape


@dataclass
class WrittenAttention:
    """The operators of hand-written attention, followed backward from its last matmul."""

    q: str = ""
    k_transposed: str = ""
    v: str = ""
    scores: Shape = ()
    scale: float = 1.0
    scaled: bool = False
    masks: list[tuple[str, float | None, bool]] = field(default_factory=list)
    """(mask, fill, whether it must be negated) in the order of use; a mask with fill None is added."""
    dropout: Node | None = None
    softmax: Node | None = None
    inner: list[tuple[str, Node]] = field(default_factory=list)
    """Arrays that are no longer computed, each with the operator that reads it."""


@dataclass(frozen=True)
class RecognizeAttention(Rewrite):
    """Compute hand-written attention as one operator, forward and backward, which stores one number per query.

        q, k -> [matmul] -> s -> [mul, div: a number; add, where: a mask] -> [softmax] -> [dropout] -> w;
        w, v -> [matmul] -> y      =>      q, k, v, masks, seed -> [attention] -> y

    Without mask and dropout the operator is PyTorch's flash kernel; otherwise it is `fused_attention`, a kernel of
    this package, which produces NaN in the same rows and draws the same random numbers. Bytes: none of the T x S
    arrays is written or read, forward or backward.
    """

    level = "forward"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | str | None:
        if not isinstance(node.op, Matmul):
            return None
        found = WrittenAttention(v=node.inputs[1])
        name, reader = node.inputs[0], node
        while (producer := uses.producers.get(name)) is not None:
            found.inner.append((name, reader))
            match producer.op:
                case ViewOp() if merges(uses, producer):
                    pass
                case Dropout() | DropoutGiven() if found.dropout is None and found.softmax is None:
                    found.dropout = producer
                case Softmax() if found.softmax is None:
                    found.softmax, found.scores = producer, uses.graph.tensors[name].shape
                case Matmul() if found.softmax is not None:
                    found.q, found.k_transposed = producer.inputs
                    found.masks.reverse()
                    return {"written": found}
                case Elementwise() if found.softmax is not None:
                    following = self.step(uses, producer, found)
                    if following is None:
                        return near_miss(uses, producer, found)
                    name, reader = following, producer
                    continue
                case _:
                    return near_miss(uses, producer, found)
            name, reader = producer.inputs[0], producer
        return None

    def step(self, uses: Uses, node: Node, found: WrittenAttention) -> str | None:
        """The scores before an elementwise operator, which is recorded; None if attention has no such operator."""
        tensors, kind = uses.graph.tensors, node.op.kind  # type: ignore[attr-defined]
        rank = len(found.scores)
        shape = tensors[node.outputs[0]].shape
        if kind in ("mul", "div"):
            for scores, number in (node.inputs, node.inputs[::-1])[: 1 if kind == "div" else 2]:
                factor = constant(uses, number)
                if factor:
                    found.scale, found.scaled = found.scale * factor if kind == "mul" else found.scale / factor, True
                    return scores
        if found.scaled:  # a mask that is added before the scaling would be scaled, too
            return None
        if kind == "add":
            for scores, mask in (node.inputs, node.inputs[::-1]):
                if same_shape(tensors[scores].shape, shape) and len(shape) == rank and leads_to_product(uses, scores):
                    found.masks.append((mask, None, False))
                    return scores
        if kind == "where":
            condition, *choices = node.inputs
            for inverted, (filled, scores) in enumerate((choices, choices[::-1])):
                fill = constant(uses, filled)
                if fill is not None and same_shape(tensors[scores].shape, shape):
                    found.masks.append((condition, fill, bool(inverted)))
                    return scores
        return None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        uses, w = match.uses, match.bindings["written"]
        tensors, last = uses.graph.tensors, len(w.scores) - 1
        for name, reader in w.inner:
            yield uses.only_reader(name, reader), f"%{name} has another reader than {reader}"
        dim = w.softmax.op.dim
        yield dim == last, f"the softmax goes along dimension {dim}, the keys lie along {last}"
        yield len(w.scores) in (2, 3, 4), f"the scores %{w.softmax.outputs[0]} have {len(w.scores)} dimensions"
        q, kt, v = (tensors[n] for n in (w.q, w.k_transposed, w.v))
        yield q.dtype in (DType.float32, DType.float64), f"the queries are of type {q.dtype.short}"
        known = isinstance(q.shape[-1], int) and 0 not in (*w.scores, *q.shape)
        yield known, "a size is zero, or that of a head unknown"
        yield same_shape(v.shape, (*kt.shape[:-2], kt.shape[-1], kt.shape[-2])), "values and keys differ in size"
        for mask, fill, _ in w.masks:
            m = tensors[mask]
            yield same_shape(broadcast(m.shape, w.scores), w.scores), f"the mask %{mask} is larger than the scores"
            wanted = q.dtype if fill is None else DType.bool
            yield m.dtype is wanted, f"the mask %{mask} is of type {m.dtype.short}"
        p = w.dropout.op.p if w.dropout is not None and isinstance(w.dropout.op, Dropout) else 0.0
        yield p < 1, "dropout leaves nothing"

    def traffic(self, match: Match) -> Dim:
        return match.uses.change(self.sweep(match.uses.graph, {id(match.root): match}))

    def emit(self, match: Match, builder: Graph, now: Mapping[str, Value]) -> Iterable[Value]:
        uses, w = match.uses, match.bindings["written"]
        lead = w.scores[:-2]
        batch, heads = (1, 1) if not lead else (lead[0], 1) if len(lead) == 1 else lead

        def headed(name: str) -> Value:
            x = now[whole(uses, name, lead)]
            return x.view((batch, heads, *x.shape[-2:]))

        q, v = headed(w.q), headed(w.v)
        k = headed(w.k_transposed).permute((0, 1, 3, 2))
        if not w.masks and w.dropout is None:
            y, _ = builder.emit(Attention(scale=w.scale), q, k, v)
        else:
            drop = None if w.dropout is None else w.dropout.op
            p, given = getattr(drop, "p", 0.0), isinstance(drop, DropoutGiven)
            fills = tuple(fill for _, fill, _ in w.masks)
            stream = 0 if drop is None or not (p or given) else drop.stream
            op = FusedAttention(scale=w.scale, fills=fills, p=p, stream=stream, given=given)
            seed = [now[name] for name in w.dropout.inputs[1:]] if op.before else []
            masks = (now[n].unary("logical_not") if inverted else now[n] for n, _, inverted in w.masks)
            y, _ = builder.emit(op, q, k, v, *seed, *(self.mask(mask, lead) for mask in masks))
        yield y.view(uses.graph.tensors[match.root.outputs[0]].shape)

    def mask(self, mask: Value, lead: Shape) -> Value:
        """Insert the dimension of the single head into a mask of [B, T, S] scores."""
        if len(lead) == 1 and len(mask.shape) == 3:
            return mask.view((mask.shape[0], 1, *mask.shape[1:]))
        return mask


def near_miss(uses: Uses, node: Node, found: WrittenAttention) -> str | None:
    """What stands between the scores' product and the softmax, or after the softmax, that attention has not; None
    where nothing tells that this is attention.
    """
    after = found.softmax is None
    if not (leads_to_softmax(uses, node) if after else any(leads_to_product(uses, name) for name in node.inputs)):
        return None
    place = "between the softmax and the values" if after else "between the scores and their softmax"
    where = f" (at {node.origin})" if str(node.origin) else ""
    if found.scaled and isinstance(node.op, Elementwise) and node.op.kind in ("add", "where"):
        return f"the mask is applied before the scores are scaled, by {node}{where}: scale them first"
    return f"attention has no {node.op.label} {place}: {node}{where}"


def leads_to_softmax(uses: Uses, node: Node) -> bool:
    """Whether weights come from a softmax of scores through elementwise operators."""
    waiting = list(node.inputs)
    for _ in range(16):
        producer = uses.producers.get(waiting.pop(0)) if waiting else None
        if producer is not None and isinstance(producer.op, Softmax):
            return leads_to_product(uses, producer.inputs[0])
        if producer is not None and isinstance(producer.op, ViewOp | Elementwise):
            waiting += producer.inputs
    return False


def constant(uses: Uses, name: str) -> float | None:
    """The real number that every element of an array equals."""
    node = uses.producers.get(name)
    while node is not None and isinstance(node.op, ViewOp | Expand):
        node = uses.producers.get(node.inputs[0])
    known = node is not None and isinstance(node.op, Full) and isinstance(node.op.value, int | float)
    return float(node.op.value) if known and node is not None else None  # type: ignore[attr-defined]


def merges(uses: Uses, node: Node) -> bool:
    """Whether a view only regroups leading dimensions and keeps the last two."""
    before, after = (uses.graph.tensors[n].shape for n in (node.inputs[0], node.outputs[0]))
    return len(before) > 1 and len(after) > 1 and same_shape(before[-2:], after[-2:])


def leads_to_product(uses: Uses, name: str) -> bool:
    """Whether the scores are the result of a matmul, scaled and masked."""
    for _ in range(16):
        node = uses.producers.get(name)
        if node is None:
            return False
        if isinstance(node.op, Matmul):
            return True
        if isinstance(node.op, Elementwise) and node.op.kind == "where":
            name = node.inputs[1 + (constant(uses, node.inputs[1]) is not None)]
        elif isinstance(node.op, ViewOp | Elementwise):
            name = node.inputs[0]
        else:
            return False
    return False


def whole(uses: Uses, name: str, lead: Shape) -> str:
    """The array under views that only regroup leading dimensions, as long as it keeps those of the scores."""
    best = name
    while (node := uses.producers.get(name)) is not None and isinstance(node.op, ViewOp) and merges(uses, node):
        name = node.inputs[0]
        if same_shape(uses.graph.tensors[name].shape[:-2], lead):
            best = name
    return best
