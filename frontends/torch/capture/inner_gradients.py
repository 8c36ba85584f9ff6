"""`torch.autograd.grad` inside a graph: the operators between inputs and outputs once more, under `torch.func.vjp`.

CSE merges what is computed twice. A dropout is a multiplication by the mask that it has drawn, and running statistics
are updated once. A derivative through what `torch.func` treats differently from autograd (`.data`, other random
numbers), and through tensors that the graph changes in place but for those that it computes twice, is refused.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.composed import given_dropout
from daceml_train.frontends.torch.capture.nodes import changed_in_place, name_of, storage_of
from daceml_train.frontends.torch.dynamo.origin import origin
from daceml_train.frontends.torch.results import example_of

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

    Raises `Unsupported` for a node in between that `torch.func` differentiates otherwise, or that computes something
    else the second time.
    """
    given = _arguments(node)
    if given.get("is_grads_batched"):
        raise Unsupported("gradients of a batch at once", where=str(origin(node)))
    outputs, inputs = _nodes(given["outputs"]), _nodes(given["inputs"])
    seeds = given.get("grad_outputs")
    cotangents = [_value(s, values) for s in _listed(seeds, len(outputs))]
    between = list(_between(node, inputs, outputs))
    _refuse_changes(node, inputs, between)
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
    if node.target in _DROPOUTS:
        return ""
    if "_norm" in name and node.target not in _WITH_STATISTICS and ("batch" in name or "instance" in name):
        return name
    return f"{name}, which draws random numbers" if random(node.target) else ""


def creates_graph(node: fx.Node) -> bool:
    """Whether gradients flow through the result of `torch.autograd.grad`."""
    return bool(_arguments(node).get("create_graph"))


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of `torch.autograd.grad` by their names."""
    return dict(zip(_NAMES, node.args, strict=False)) | node.kwargs


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
    order = list(_depending(node, inputs))
    depends = {*inputs, *order}
    needed = set(outputs)
    for other in reversed(order):
        if other in needed:
            needed.update(n for n in other.all_input_nodes if n in depends)
    return (n for n in order if n in needed)


def _depending(node: fx.Node, inputs: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The nodes before `node` whose values depend on an input, but for those that take only its size or type."""
    depends = set(inputs)
    for other in node.graph.nodes:
        if other is node:
            break
        takes_size = name_of(other.target) in _TAKES_SIZE
        if other not in depends and not takes_size and any(n in depends for n in other.all_input_nodes):
            depends.add(other)
            yield other


def _reaching(between: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """Inputs that an output depends on."""
    read = {n for other in between for n in other.all_input_nodes} | set(outputs)
    return {n for n in inputs if n in read}


def _refuse_changes(node: fx.Node, inputs: Sequence[fx.Node], between: Sequence[fx.Node]) -> None:
    """Raise if nodes that run twice read another value the second time, or if a change in place carries a gradient.

    A tensor that these nodes compute and then change, as activations in place do, is computed and changed again.
    """
    twice, depends = set(between), {*inputs, *_depending(node, inputs)}
    read, owners, enabled = set[Any](), dict[Any, list[fx.Node]](), True
    for other in itertools.takewhile(lambda n: n is not node, node.graph.nodes):
        if other.target is torch._C._set_grad_enabled:
            enabled = bool(other.args[0])
        target = changed_in_place(other)
        if target is not None:
            sharing = owners.get(_memory(target), [target])
            own = enabled and other in twice and _is_own(target) and twice.issuperset(sharing)
            flows = any(n in depends and _has_gradient(n) for n in other.all_input_nodes)
            if not own and (flows or not twice.isdisjoint(sharing) or _memory(target) in read):
                raise Unsupported("a gradient inside a graph that changes tensors in place", where=str(origin(other)))
        updated = statistics(other)
        if any(_memory(n) in read for n in updated):
            raise Unsupported("a gradient inside a graph that changes running statistics", where=str(origin(other)))
        if other in twice:
            read.update(_memory(n) for n in other.all_input_nodes if n not in updated)
        owners.setdefault(_memory(other), []).append(other)


def _is_own(node: fx.Node) -> bool:
    """Whether a tensor has a gradient and is no view of another."""
    example = example_of(node)
    return isinstance(example, Tensor) and example.requires_grad and example._base is None


def _has_gradient(node: fx.Node) -> bool:
    """Whether a value has a gradient, as far as is known."""
    leaves = pytree.tree_leaves(example_of(node))
    return not leaves or any(isinstance(x, Tensor) and x.requires_grad for x in leaves)


def _memory(node: fx.Node) -> Any:
    """The memory of a node's tensor, or the node itself."""
    storage = storage_of(example_of(node))
    return node if storage is None else storage


def random(target: Any) -> bool:
    """Whether a function draws random numbers, by its name or its tag."""
    tags = getattr(target, "tags", ())
    name = target if isinstance(target, str) else str(getattr(target, "__name__", target))
    return torch.Tag.nondeterministic_seeded in tags or any(part in name for part in _RANDOM)


_RANDOM = ("dropout", "rand", "bernoulli", "normal_", "uniform_", "multinomial", "exponential_", "rrelu")
_LIKE = "ones_like zeros_like empty_like rand_like randn_like randint_like new_ones new_zeros new_empty size dim"
_TAKES_SIZE = frozenset(_LIKE.split())
"""Functions and methods whose results depend on an operand's size and type alone."""
_DROPOUTS: frozenset[Any] = frozenset({F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, given_dropout})
"""Functions that multiply by a mask that they draw."""
_WITH_STATISTICS: frozenset[Any] = frozenset({F.batch_norm, F.instance_norm})
"""Functions that update running statistics where they do not use them."""


def masked(graph: fx.Graph) -> set[fx.Node]:
    """The dropouts that a gradient inside a graph is a derivative of, each with the same mask both times."""
    found = set[fx.Node]()
    for node in graph.nodes:
        if node.target is torch.autograd.grad:
            given = _arguments(node)
            between = _between(node, _nodes(given["inputs"]), _nodes(given["outputs"]))
            found.update(n for n in between if n.target in _DROPOUTS)
    return found


def dropped(
    target: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The result of a dropout, and the mask by which it multiplies: the given one, or one drawn as PyTorch draws it.

    There is no mask where nothing is dropped.
    """
    bound = inspect.signature(target).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    x, p = given["input"], given["p"]
    if given.get("inplace"):
        raise Unsupported("a gradient inside a graph through a dropout in place")
    if not given.get("training", True) or p == 0:
        return x, None
    if mask is None:
        mask = target(torch.ones_like(x), p).detach()
    return x * mask, mask


def statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a node updates."""
    if node.target not in _WITH_STATISTICS:
        return []
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    if not given.get("training", given.get("use_input_stats", node.target is F.instance_norm)):
        return []
    return [n for n in (given.get("running_mean"), given.get("running_var")) if isinstance(n, fx.Node)]


def without_statistics(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node that updates running statistics, for the same result without updates."""
    updated = statistics(node)
    return fx.map_arg((node.args, node.kwargs), lambda n: None if n in updated else n)
