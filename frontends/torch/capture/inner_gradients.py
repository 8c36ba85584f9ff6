"""`torch.autograd.grad` inside a graph: the operators between inputs and outputs once more, under `torch.func.vjp`.

CSE merges what is computed twice. A derivative through what `torch.func` treats differently from autograd (`.data`,
in-place changes, random numbers) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.dynamo.origin import origin

_NAMES = (
    "outputs",
    "inputs",
    "grad_outputs",
    "retain_graph",
    "create_graph",
    "only_inputs",
    "allow_unused",
    "is_grads_batched",
    "materialize_grads",
)


def gradients(
    node: fx.Node,
    values: dict[fx.Node, Any],
    run: Callable[[fx.Node, dict[fx.Node, Any]], Any],
) -> tuple[Tensor | None, ...]:
    """The result of `node`, a call of `torch.autograd.grad`; `run` evaluates a node with these values of the others.

    Raises `Unsupported` for a node in between that `torch.func` differentiates otherwise.
    """
    given = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
    if given.get("is_grads_batched"):
        raise Unsupported("gradients of a batch at once", where=str(origin(node)))
    outputs, inputs = _nodes(given["outputs"]), _nodes(given["inputs"])
    seeds = given.get("grad_outputs")
    cotangents = [_value(s, values) for s in _listed(seeds, len(outputs))]
    between = list(_between(node, inputs, outputs))
    for other in between:
        if reason := _refused(other):
            raise Unsupported(f"a gradient inside a graph through {reason}", where=str(origin(other)))
    reached = _reaching(between, inputs, outputs)
    used = [n for n in dict.fromkeys(inputs) if n in reached]

    def function(*operands: Tensor) -> tuple[Tensor, ...]:
        scope = {**values, **dict(zip(used, operands, strict=True))}
        for other in between:
            scope[other] = run(other, scope)
        return tuple(scope[o] for o in outputs)

    found: dict[fx.Node, Tensor] = {}
    if used:
        results, pull = torch.func.vjp(function, *(values[n] for n in used))[:2]
        full = tuple(torch.ones_like(y) if c is None else c for y, c in zip(results, cotangents, strict=True))
        found = dict(zip(used, pull(full), strict=True))
    zeros = bool(given.get("materialize_grads"))
    return tuple(found.get(n, torch.zeros_like(values[n]) if zeros else None) for n in inputs)


_WORDS = {"autograd_function_apply": "an autograd.Function", "tag_activation_checkpoint": "a checkpoint"}
"""Higher-order operators, in the words of who calls them."""


def _refused(node: fx.Node) -> str:
    """Why `torch.func` cannot differentiate a node as autograd does; empty where it can."""
    name = name_of(node.target)
    if node.op not in ("call_function", "call_method") or isinstance(node.target, torch._ops.HigherOrderOperator):
        return _WORDS.get(name, name)
    if node.target is torch.autograd.grad:
        return "" if creates_graph(node) else "a gradient without create_graph"
    if name == "_get_data_attr":
        return ".data"
    return f"{name}, which draws random numbers" if random(node.target) else ""


def creates_graph(node: fx.Node) -> bool:
    """Whether gradients flow through the result of `torch.autograd.grad`."""
    return bool(node.kwargs.get("create_graph", node.args[4] if len(node.args) > 4 else False))


def name_of(target: Any) -> str:
    """The name of a function, of a method, or of an operator."""
    if isinstance(target, str):
        return target
    return str(getattr(target, "__name__", "") or getattr(target, "_name", "") or target)


def _nodes(given: Any) -> list[fx.Node]:
    leaves = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(n, fx.Node) for n in leaves):
        raise Unsupported("a gradient inside a graph of what the graph does not compute")
    return list(leaves)


def _listed(given: Any, count: int) -> Sequence[Any]:
    if given is None:
        return [None] * count
    return given if isinstance(given, list | tuple) else [given]


def _value(given: Any, values: dict[fx.Node, Any]) -> Any:
    return values[given] if isinstance(given, fx.Node) else given


def _between(node: fx.Node, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The nodes that depend on an input and that an output depends on, in order."""
    depends = set(inputs)
    order: list[fx.Node] = []
    for other in node.graph.nodes:
        if other is node:
            break
        if other not in depends and any(n in depends for n in other.all_input_nodes):
            depends.add(other)
            order.append(other)
    needed = set(outputs)
    for other in reversed(order):
        if other in needed:
            needed.update(n for n in other.all_input_nodes if n in depends)
    return (n for n in order if n in needed)


def _reaching(between: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """Inputs that an output depends on."""
    read = {n for other in between for n in other.all_input_nodes} | set(outputs)
    return {n for n in inputs if n in read}


def written_before(node: fx.Node, changed: Callable[[fx.Node], fx.Node | None]) -> bool:
    """Whether anything in the graph before `node` is changed in place, so that its operators cannot run twice."""
    for other in node.graph.nodes:
        if other is node:
            return False
        if changed(other) is not None:
            return True
    return False


def random(target: Any) -> bool:
    """Whether a function draws random numbers, by its name or its tag."""
    tags = getattr(target, "tags", ())
    name = target if isinstance(target, str) else str(getattr(target, "__name__", target))
    return torch.Tag.nondeterministic_seeded in tags or any(part in name for part in _RANDOM)


_RANDOM = ("dropout", "rand", "bernoulli", "normal_", "uniform_", "multinomial", "exponential_", "rrelu")
