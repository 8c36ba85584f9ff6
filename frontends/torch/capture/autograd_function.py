"""A user's `autograd.Function` as one operator: both bodies are traced, the backward one as its derivative."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._subclasses import FakeTensor

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.capture.operators import (
    CustomFunction,
    custom_functions,
    result_counts,
    without_grad_modes,
)
from daceml_train.frontends.torch.capture.trace import trace
from daceml_train.frontends.torch.rules.fallback import body_of
from daceml_train.frontends.torch.rules.translate import Translator, rule
from daceml_train.graph.graph import Graph
from daceml_train.graph.node import SEED
from daceml_train.ops.fallback import Body
from daceml_train.ops.gradient import CustomVJP
from daceml_train.ops.operator import Value


@rule("daceml_train.custom_vjp.default")
def _custom_vjp(t: Translator, key: int, xs: Sequence[Value]) -> tuple[Value, ...]:
    function = custom_functions.get()[key]
    assert isinstance(function, CustomFunction)
    node_operands = t.node.args[1]
    assert isinstance(node_operands, list | tuple)
    operands = [n.meta["val"] for n in node_operands if isinstance(n, fx.Node)]
    results: list[FakeTensor] = list(t.node.meta["val"])
    count, _ = result_counts(function)
    forward = _traced(t, function.forward, operands, None)
    backward = _traced(t, function.backward, results, len(xs))
    return t.graph.emit(CustomVJP(forward, backward, count), *xs)


def _traced(t: Translator, module: fx.GraphModule, operands: Sequence[FakeTensor], gradients: int | None) -> Body:
    """One of the bodies on fake operands; a backward body yields `gradients` cotangents."""
    with operands[0].fake_mode:
        fresh = [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device) for o in operands]
    traced = trace(without_grad_modes(module), {}, fresh, grad_enabled=True, randomness=t.randomness)
    if traced.changed:
        raise Unsupported("an autograd.Function that changes its input in place")
    graph = Graph("body")
    inner = Translator(graph, t.fallback, t.randomness)
    results = inner.run(traced.module, [graph.input(f"x{i}", types.tensor(o)) for i, o in enumerate(operands)])
    if SEED in graph.inputs or inner.draws:
        raise Unsupported("random numbers inside an autograd.Function")
    t.fallbacks += inner.fallbacks
    if gradients is None:
        return body_of(graph, [v.name for v in results if isinstance(v, Value)])
    names = [v.name if isinstance(v, Value) else None for v in results]
    return body_of(graph, (names + [None] * gradients)[:gradients])
