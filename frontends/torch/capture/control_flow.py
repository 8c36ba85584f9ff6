"""Branches and loops as operators: each body is traced, and its random numbers and constants become operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.capture.operators import Control, custom_functions
from daceml_train.frontends.torch.capture.trace import trace
from daceml_train.frontends.torch.rules.translate import Translator, rule
from daceml_train.graph.bodies import body_of
from daceml_train.graph.graph import Graph, Role
from daceml_train.graph.node import SEED
from daceml_train.ops.control import Cond, ControlFlow, Scan, While, dense
from daceml_train.ops.fallback import Body
from daceml_train.ops.operator import Value
from daceml_train.tensor import Tensor


@rule("daceml_train.control.default")
def _control(t: Translator, key: int, xs: Sequence[Value]) -> tuple[Value, ...]:
    control = custom_functions.get()[key]
    assert isinstance(control, Control)
    condition = [xs[0]] if control.name == "cond" else []
    values = list(xs[len(condition) :])
    states, slices, _ = control.groups
    given = [dense(v.tensor) for v in values]
    given[states : states + slices] = [Tensor(g.shape[1:], g.dtype) for g in given[states : states + slices]]
    nodes = t.node.args[1]
    assert isinstance(nodes, list | tuple)
    examples = [n.meta["val"] for n in nodes if isinstance(n, fx.Node)][len(condition) :]
    examples[states : states + slices] = [_slice(e) for e in examples[states : states + slices]]
    graphs, extras = [], list[tuple[int, str, Value]]()
    for number, body in enumerate(control.bodies):
        graph, held = _body(t, control, body, given, examples, any(t.active(v) for v in values))
        graphs.append(graph)
        extras += [(number, name, value) for name, value in held]
    bodies = [_with(graph, number, extras) for number, graph in enumerate(graphs)]
    return t.graph.emit(_operator(control, bodies, values), *condition, *values, *(value for *_, value in extras))


def _operator(control: Control, bodies: Sequence[Body], values: Sequence[Value]) -> ControlFlow:
    states, slices, _ = control.groups
    match control.name:
        case "cond":
            return Cond(*bodies)
        case "while_loop":
            return While(bodies[0], bodies[1], states)
    return Scan(bodies[0], states, slices, values[states].shape[0], control.reverse)


def _slice(example: torch.Tensor) -> torch.Tensor:
    with example.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(example.shape[1:], dtype=example.dtype)


def _body(
    t: Translator,
    control: Control,
    body: fx.GraphModule,
    given: Sequence[Tensor],
    examples: Sequence[Any],
    active: bool,
) -> tuple[Graph, list[tuple[str, Value]]]:
    """A body as a graph on its tensor operands, and its further inputs with their values."""
    tensors = iter(examples)
    operands: list[Any] = []
    for x in control.operands:
        operands.append(_fresh(next(tensors)) if isinstance(x, torch.Tensor) else x)
    traced = trace(body, {}, operands, control.grad_enabled, randomness=t.randomness)
    if traced.changed:
        raise Unsupported(f"a change of an operand in place inside {control.name}")
    graph = Graph("body")
    inner = Translator(graph, t.fallback, t.randomness)
    inner.count_streams_with(t)
    types_of = iter(given)
    values: list[Any] = []
    for position, x in enumerate(operands):
        if isinstance(x, torch.Tensor):
            values.append(graph.input(f"x{position}", next(types_of)))
            if active and x.is_floating_point():
                inner.require_gradient(values[-1])
        else:
            values.append(types.size(x) if isinstance(x, torch.SymInt) else x)
    results = inner.run(traced.module, values, tokens=traced.tokens)[len(traced.tokens) :]
    if not all(isinstance(v, Value) for v in results):
        raise Unsupported(f"a result of {control.name} that is not a tensor")
    graph.output(*(inner.dependent(v) for v in results))
    t.count_streams_with(inner)
    t.fallbacks += inner.fallbacks
    constants = []
    if SEED in graph.inputs:
        if control.name != "cond":
            raise Unsupported(f"random numbers inside {control.name}")
        constants.append((SEED, t.seed()))
    if inner.draws:
        raise Unsupported(f"random numbers of eager execution inside {control.name}")
    for name, tensor in inner.constants.items():
        outer = t.graph.fresh(name)
        t.constants[outer] = tensor
        constants.append((name, t.graph.input(outer, types.tensor(tensor, laid_out=True), Role.buffer, outer)))
    return graph, constants


def _fresh(example: torch.Tensor) -> torch.Tensor:
    with example.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(example.shape, dtype=example.dtype)


def _with(graph: Graph, number: int, extras: Sequence[tuple[int, str, Value]]) -> Body:
    """A graph as a body that takes all further operands, also those of another body."""
    operands = [name for name in graph.inputs if not any(name == n and k == number for k, n, _ in extras)]
    further = [name if k == number else graph.fresh(f"unused{i}") for i, (k, name, _) in enumerate(extras)]
    body = body_of(graph)
    return Body((*operands, *further), body.statements, body.yields)
