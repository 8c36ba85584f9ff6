"""FuseSoftmaxCrossEntropy: the loss is computed directly from the logits, without log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.loss import CrossEntropy, NLLLoss
from daceml_train.ops.operator import Operator, Value
from daceml_train.ops.softmax import LogSoftmax
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, Tensor, simplify


@dataclass(frozen=True)
class FuseSoftmaxCrossEntropy(Rewrite):
    """Compute the negative log likelihood of a log-softmax directly from the logits.

        x -> [log_softmax] -> p -> [nll_loss] -> loss     =>     x -> [cross_entropy] -> loss

    Bytes: those of cross_entropy's leaves replace those of the two operators; p is neither written nor read. The
    backward pass then reads x and two numbers per row instead of p (see the formula in `CrossEntropy`).
    """

    level = "forward"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, NLLLoss):
            return None
        p = uses.producers.get(node.inputs[0])
        return {"p": p} if p is not None and isinstance(p.op, LogSoftmax) else None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        p, loss = match.bindings["p"], match.root
        name, rank = p.outputs[0], match.uses.graph.tensors[p.outputs[0]].rank
        classes = min(1, rank - 1)
        yield p.op.dim == classes, f"%{name} is normalized along {p.op.dim}, the classes lie along {classes}"
        yield len(loss.inputs) == 2, f"{loss.op.label} has class weights, which cross_entropy does not take"
        yield match.uses.only_reader(name, loss), f"the log-probabilities %{name} have another reader"

    def traffic(self, match: Match) -> Dim:
        uses, p, loss = match.uses, match.bindings["p"], match.root
        x, logp, target = (uses.graph.tensors[n] for n in (*p.inputs, *loss.inputs[:2]))
        seen = [bool(uses.readers[n]) or n in uses.visible for n in loss.outputs]
        before = alone(p.op, [x], [True]) + alone(loss.op, [logp, target], seen)
        return simplify(alone(entropy(loss.op), [x, target], [seen[0], False, False, seen[1]]) - before)

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        logits, target = values[match.bindings["p"].inputs[0]], values[match.root.inputs[1]]
        loss, _, _, total = builder.emit(entropy(match.root.op), logits, target)
        return loss, total


def entropy(op: Operator) -> CrossEntropy:
    """The cross-entropy that replaces a negative log likelihood."""
    assert isinstance(op, NLLLoss)
    return CrossEntropy(op.reduction, op.ignore_index)


def alone(op: Operator, operands: Sequence[Tensor], seen: Sequence[bool]) -> Dim:
    """The bytes of an operator by itself; `seen` tells which of its results are read."""
    graph = Graph()
    results = graph.emit(op, *(graph.input(f"x{i}", tensor) for i, tensor in enumerate(operands)))
    graph.output(*(value for value, visible in zip(results, seen, strict=True) if visible))
    return traffic(graph).bytes
