"""Device-dependent parts of a captured graph: some hand-written kernels exist for the CPU only."""

from __future__ import annotations

from dataclasses import replace

from daceml_train.graph.bodies import within
from daceml_train.graph.graph import Graph
from daceml_train.lowering.device import Device
from daceml_train.ops.fused_attention import FusedAttention, threshold
from daceml_train.ops.normalization import BatchNorm
from daceml_train.ops.operator import Value, make
from daceml_train.ops.random import DropoutGiven, Uniform
from daceml_train.tensor import simplify


def for_device(graph: Graph, device: Device) -> Graph:
    """The graph in operators that have an implementation on this device; before differentiation."""
    if device.toolchain.templates:
        return graph
    graph = within(graph, lambda body: for_device(body, device))
    if not any(isinstance(n.op, FusedAttention | BatchNorm) for n in graph.nodes):
        return graph
    result = graph.empty()
    names: dict[str, str] = {}
    for node in graph.nodes:
        operands = tuple(names.get(n, n) for n in node.inputs)
        with result.at(node.origin):
            if isinstance(node.op, FusedAttention):
                values = _written_out(node.op, [result.value(n) for n in operands])
            elif isinstance(node.op, BatchNorm):  # each pass over x costs two launches more
                values = result.append(replace(node.op, at_once=True), operands)
            else:
                values = result.append(node.op, operands)
        names |= dict(zip(node.outputs, (v.name for v in values), strict=True))
    return graph.finish(result, names)


def _written_out(op: FusedAttention, operands: list[Value]) -> tuple[Value, ...]:
    """The y and logsumexp, by matmuls, masks and a softmax."""
    q, k, v, *rest = operands
    flat = {
        name: t.view((simplify(t.shape[0] * t.shape[1]), *t.shape[2:]))
        for name, t in zip("qkv", (q, k, v), strict=True)
    }
    shape = (*q.shape[:3], k.shape[2])
    scores = (flat["q"] @ flat["k"].T).view(shape) * op.scale
    for mask, fill in zip(rest[op.before :], op.fills, strict=True):
        scores = scores + mask if fill is None else mask.where(fill, scores)
    weights = scores.apply(make("softmax", dim=3))
    level = scores.apply(make("logsumexp", dims=(3,)))
    if op.given:
        weights = weights.apply(DropoutGiven(op.stream), rest[0], rest[1])
    elif op.p:
        kept = rest[0].apply(Uniform(shape, op.stream)).compare("ge", threshold(op.p))
        weights = kept.where(weights * (1 / (1 - op.p)), 0.0)
    y = weights.view((simplify(shape[0] * shape[1]), *shape[2:])) @ flat["v"]
    return y.view(q.shape), level
