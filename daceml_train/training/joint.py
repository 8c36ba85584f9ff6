"""The joint graph of a training step: a captured loss, its gradients, their processing, and the update."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields

from daceml_train.analysis.embeddings import row_gradients
from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Unsupported
from daceml_train.graph.graph import Graph, Role
from daceml_train.ops.collective import Collective
from daceml_train.ops.divided_tables import LookupRows
from daceml_train.ops.elementwise import Full
from daceml_train.ops.group_collective import GroupCollective
from daceml_train.ops.operator import Origin, Value
from daceml_train.passes.base import without_dead_code
from daceml_train.storage.storable import storable
from daceml_train.tensor import DType, Tensor
from daceml_train.training.batch_norm import synchronized, without_rows
from daceml_train.training.distribution import (
    WEIGHT,
    Exchange,
    gathered,
    lookups,
    without_requests,
)
from daceml_train.training.gradients import PLAIN, SCALER, GradientOptions, clip, next_scale, unscale
from daceml_train.training.optimizers import SCALARS, Update
from daceml_train.training.sparse_gradients import as_dense, plain_descent, refuse_sparse, refuse_sparse_part
from daceml_train.training.user_update import UserCode, reads_gradients

ACCUMULATED = "accumulated"
"""The name of the state that accumulates gradients of micro-batches; no optimizer uses it."""
OF_STEP = -1
"""In place of a group's position, for hyper-parameters that belong to the step: the bound of clipping."""


@dataclass(frozen=True)
class Trained:
    """A parameter that a step updates: its input, its update, and the position of its group in the optimizer."""

    parameter: str
    update: Update
    group: int
    first: bool = False
    """Whether the step creates the state rather than reading it."""
    accumulates: bool = False
    """Whether the gradient is only accumulated, without an update."""
    accumulated: bool = False
    """Whether the update uses the accumulated gradients plus this one."""
    share: float = 1.0
    """The factor by which the gradient is multiplied."""
    numbers: tuple[tuple[str, DType], ...] = ()
    """The types of the numbers in its state."""


@storable
@dataclass(kw_only=True)
class StepInterface:
    """The calling convention of a step: the positions and names of values after the captured inputs and the loss.

    `hyperparameters` are additional float64 inputs: the learning rate `lr` of each group, and the options that
    updates are given, as (group, option), and the bound of clipping, as (`OF_STEP`, name). `state` names the
    additional inputs as (parameter, state name), where those without a parameter belong to the loss scaler.
    `gradients` and `made`, the state that first steps create, are additional outputs; then follow the `mean` of the
    loss over all processes that train together, if it is computed, and the `norm` of the gradients, if it is clipped.
    """

    hyperparameters: list[tuple[int, str]] = field(default_factory=list)
    state: list[tuple[str, str]] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    gradients: tuple[str, ...] = ()
    made: list[tuple[str, str]] = field(default_factory=list)
    norm: bool = False
    mean: bool = False
    by_user: bool = False
    """Whether code of the user's computes the update."""
    further: int = 0
    """How many outputs stand between the loss and the gradients: what the user's code keeps."""


@dataclass(kw_only=True)
class Joint(StepInterface):
    """A step as one graph, before the passes that run on whole steps."""

    graph: Graph

    @property
    def interface(self) -> StepInterface:
        """Its calling convention, without the graph."""
        return StepInterface(**{f.name: getattr(self, f.name) for f in fields(StepInterface)})


def joint_graph(
    graph: Graph, trained: Sequence[Trained], keep: Sequence[str], options: GradientOptions = PLAIN, further: int = 0
) -> Joint:
    """A captured graph whose first output is the loss, with gradients and update appended.

    The `further` outputs after the loss stay, all others go.
    """
    code = UserCode.of(graph) if reads_gradients(graph) else None
    graph = graph if code is None else code.graph
    tables = lookups(graph, options.ranks)
    position = itertools.count(sum(isinstance(node.op, LookupRows) for node in graph.nodes))
    if code is None:
        graph = _on_ranks(graph, options, position)
        tables |= {*options.parameters}
    forward = [op for op in _collectives(graph, options) if not isinstance(op, GroupCollective)]
    kept = graph.outputs[1 : 1 + further]
    loss = graph.value(graph.outputs[0])
    joint = Joint(graph=graph, further=further)
    bounds = options.clipping.bounds if options.clipping.given else ()
    if any(t.first and t.parameter in options.parameters for t in trained):
        raise Unsupported("a first step that creates the state of divided parameters", advice="use dampening=0")
    updates = not all(t.accumulates for t in trained)
    together = options.ranks > 1 and (updates or bool(forward))
    hyper = _hyperparameters(joint, trained, (*bounds, *((WEIGHT,) if together else ())))
    weight = hyper.get((OF_STEP, WEIGHT))
    scaler = _scaler_inputs(joint, options)
    # gradients of the parts of a batch are weighed when they are added up, but where ranks add them up before
    late = any(t.accumulated for t in trained) and not forward
    seed = _seed(graph, loss, scaler, None if late else weight)
    wrt = list(dict.fromkeys([*(t.parameter for t in trained), *keep, *(code.parameters if code else ())]))
    found = {name: g for name, g in differentiate(graph, {loss.name: seed}, wrt).items() if g is not None}
    if code is not None:
        found |= code.hooked(found)
    none = _without_data(graph, found, options, tables, code) if options.idle else None
    entries = [t for t in trained if t.parameter in found]
    joint.trained = [t.parameter for t in entries]
    found |= {t.parameter: _accumulated(joint, t, found[t.parameter]) for t in entries}
    updated = [t for t in entries if not t.accumulates]
    sharded = None
    mean = None
    if weight is not None and found and updates:
        exchange = Exchange(graph, options.ranks, weight, options.idle, position)
        sharded = exchange if tables else None
        mean = _exchanged(exchange, options, loss, found, updated, late, tables)
    names = list(code.parameters) if code is not None and code.update else [t.parameter for t in updated]
    gradients = [found[name] for name in names]
    skip = None
    if options.scaling is not None and names:
        gradients, skip = unscale(gradients, scaler[0], sharded)
        for held, value in zip(scaler, next_scale(options.scaling, scaler[0], scaler[1], skip), strict=True):
            graph.write(held.name, value)
    bound = next((hyper[OF_STEP, name] for name in bounds), None)
    whole = {g.name for n, g in zip(names, gradients, strict=True) if n not in tables}
    gradients, norm = clip(options.clipping, gradients, bound, sharded, whole)
    found |= zip(names, gradients, strict=True)
    joint.gradients = tuple(name for name in keep if name in found)
    result = loss
    if none is not None:  # nothing is to be computed of the loss
        result = (mean or graph.emit(Full(0.0, loss.shape, loss.dtype))[0]) + none.cast(loss.dtype)
    graph.outputs = [result.name, *kept, *(found[name].name for name in joint.gradients)]
    if code is not None and code.update:
        joint.by_user = True
        code.append_update(found, skip)
    if options.shard and any(entry.first for entry in updated):
        raise Unsupported("a first step that creates the state of a sharded optimizer", advice="use dampening=0")
    if options.shard and joint.gradients:
        raise Unsupported("gradients that are kept while the optimizer is sharded: no rank has all of them")
    for entry in updated:
        _append_named(joint, entry, found[entry.parameter], hyper, skip)
    if mean is not None:
        joint.mean = True
        graph.output(mean)
    if norm is not None:
        joint.norm = True
        graph.output(norm)
    joint.graph = without_dead_code(graph)
    refuse_sparse(joint.graph, joint.graph.outputs, plain_descent)
    return joint


def _without_data(
    graph: Graph,
    found: dict[str, Value],
    options: GradientOptions,
    tables: AbstractSet[str],
    code: UserCode | None,
) -> Value:
    """Let a rank without data take part in the collectives of a forward pass and of its derivative.

    Returns 0, on which the result of the step has to depend.
    """
    if options.sync_batch_norm and code is None:
        none = without_rows(graph)
    else:
        graph.writes.clear()  # buffers, of which this rank has nothing new
        (none,) = graph.emit(Full(0.0, (), DType.float32))
    if tables:
        found |= without_requests(graph, {name: found[name] for name in tables if name in found})
    return none


def _on_ranks(graph: Graph, options: GradientOptions, position: Iterator[int]) -> Graph:
    """A copy of the forward pass with the collectives of divided parameters and of synchronized batch norm."""
    graph = gathered(graph, options.parameters, options.ranks, position)
    return synchronized(graph, options.ranks, position) if options.sync_batch_norm else graph.copy()


def _collectives(graph: Graph, options: GradientOptions) -> list[Collective]:
    """The collectives of a forward pass. Raises `Unsupported` for those in which a rank without data has no part."""
    found = [node.op for node in graph.nodes if isinstance(node.op, Collective)]
    if options.idle and any(isinstance(op, GroupCollective) for op in found):
        why = "collectives of the model's own"
        raise Unsupported(f"a rank without data in a step with {why}", advice="give each rank some rows")
    return found


def _scaler_inputs(joint: Joint, options: GradientOptions) -> list[Value]:
    """Scale and growth tracker, if the loss is scaled."""
    if options.scaling is None:
        return []
    graph, types = joint.graph, (Tensor(()), Tensor((), DType.int32))
    joint.state += [("", name) for name in SCALER]
    return [graph.input(graph.fresh(n[1:]), t, Role.state) for n, t in zip(SCALER, types, strict=True)]


def _seed(graph: Graph, loss: Value, scaler: Sequence[Value], weight: Value | None) -> Value:
    """The cotangent of the loss: its scale times its weight."""
    factors = [factor.cast(loss.dtype).view(loss.shape) for factor in (*scaler[:1], *([weight] if weight else []))]
    if not factors:
        return graph.emit(Full(1.0, loss.shape, loss.dtype))[0]
    return functools.reduce(lambda a, b: a * b, factors)


def _exchanged(
    exchange: Exchange,
    options: GradientOptions,
    loss: Value,
    found: dict[str, Value],
    updated: Sequence[Trained],
    late: bool,
    shards: AbstractSet[str],
) -> Value | None:
    """Replace the gradients by their means over all ranks; those in `shards` are sums over all ranks already.

    Returns the mean of the loss, unless it is that of a part.
    """
    graph, weight = exchange.graph, exchange.weight
    assert weight is not None
    names = list(found)
    plain = {t.parameter for t in updated if plain_descent(t.update.op)}
    tables = row_gradients(graph, [found[name] for name in names])
    for name in names:
        for part in tables.get(found[name].name, ()):
            refuse_sparse_part(part, name in plain)
    found |= {n: as_dense(graph, found[n]) for n in names}
    if late:
        found |= {t.parameter: found[t.parameter] * weight.cast(found[t.parameter].dtype) for t in updated}
    tables = row_gradients(graph, [found[name] for name in names])
    paths = Counter(graph.inputs[name].path for name in names)
    own = {name: graph.inputs[name].path if paths[graph.inputs[name].path] == 1 else name for name in names}
    what = {name: f"gradient of {own[name] or name}" for name in names if name not in shards}
    rows = {what[n]: count for n, count in options.rows if n in what and found[n].name in tables}
    values = {text: found[name] for name, text in what.items()}
    if not any(t.accumulated for t in updated):
        values["loss"] = loss * weight.cast(loss.dtype)
    means = exchange.means(values, rows)
    found |= {name: means[text] for name, text in what.items()}
    found |= {name: exchange.of_sum(found[name]) for name in shards if name in found}  # the sums that this rank has
    return means.get("loss")


def update_graph(trained: Sequence[Trained], tensors: Sequence[Tensor], paths: Sequence[str]) -> Joint:
    """The update of parameters by gradients that are inputs, named as `gradient_name` says."""
    graph = Graph("update")
    joint = Joint(graph=graph, trained=[t.parameter for t in trained])
    for entry, tensor, path in zip(trained, tensors, paths, strict=True):
        graph.input(entry.parameter, tensor, Role.parameter, path)
    hyper = _hyperparameters(joint, trained)
    for entry, tensor, path in zip(trained, tensors, paths, strict=True):
        gradient = graph.input(gradient_name(entry.parameter), tensor, path=path)
        _append_named(joint, entry, gradient, hyper, None)
    return joint


def _hyperparameters(
    joint: Joint, trained: Sequence[Trained], bounds: Iterable[str] = ()
) -> dict[tuple[int, str], Value]:
    """The inputs for learning rates, options and bounds, which the interface then names."""
    groups = range(max((t.group for t in trained), default=-1) + 1)
    options = dict.fromkeys((t.group, name) for t in trained for name in t.update.op.given)
    joint.hyperparameters = [*((group, "lr") for group in groups), *options, *((OF_STEP, b) for b in bounds)]
    graph, scalar = joint.graph, Tensor((), DType.float64)
    return {
        (g, name): graph.input(graph.fresh(name if g == OF_STEP else f"{name}_{g}"), scalar, Role.state)
        for g, name in joint.hyperparameters
    }


def gradient_name(parameter: str) -> str:
    """The input of an update that is the gradient of a parameter."""
    return f"grad_{parameter}"


def _accumulated(joint: Joint, entry: Trained, gradient: Value) -> Value:
    """A gradient plus those of the previous micro-batches."""
    graph = joint.graph
    if entry.share != 1:
        gradient = gradient * entry.share
    if entry.accumulates or entry.accumulated:
        label = graph.fresh(f"{entry.parameter}_{ACCUMULATED}")
        total = graph.input(label, graph.tensors[entry.parameter], Role.state, graph.inputs[entry.parameter].path)
        joint.state.append((entry.parameter, ACCUMULATED))
        gradient = total + gradient
        if entry.accumulates:
            graph.write(label, gradient)
    return gradient


def _append_named(
    joint: Joint,
    entry: Trained,
    gradient: Value,
    hyper: Mapping[tuple[int, str], Value],
    skip: Value | None,
) -> None:
    """The update of a parameter, under a name that says whose it is."""
    path = joint.graph.inputs[entry.parameter].path
    rule = "adamw" if getattr(entry.update.op, "decoupled", False) else entry.update.op.name.removesuffix("_update")
    with joint.graph.at(Origin(path.rpartition(".")[0]).of(f"{rule} {path or entry.parameter}", "update")):
        _append_update(joint, entry, gradient, hyper, skip)


def _append_update(
    joint: Joint,
    entry: Trained,
    gradient: Value,
    hyper: Mapping[tuple[int, str], Value],
    skip: Value | None,
) -> None:
    """The update of a parameter; if `skip` is true, nothing changes."""
    graph = joint.graph
    p = graph.value(graph.writes.get(entry.parameter, entry.parameter))
    before = []  # the parameter is as the forward pass left it
    if not entry.first:
        for name in entry.update.state:
            tensor = Tensor((), dict(entry.numbers)[name]) if name in SCALARS else p.tensor
            label = graph.fresh(f"{entry.parameter}_{name}")
            before.append(graph.input(label, tensor, Role.state, graph.inputs[entry.parameter].path))
            joint.state.append((entry.parameter, name))
    elif skip is not None:
        raise Unsupported(f"a first step of {entry.update.op.label} that a loss scaler may skip")
    rate, *options = (hyper[entry.group, name] for name in ("lr", *entry.update.op.given))
    after = entry.update.emit(p, gradient, rate, before, options)
    if skip is not None:
        after = [skip.where(old, new) for old, new in zip((p, *before), after, strict=True)]
    graph.write(entry.parameter, after[0])
    if entry.first:
        joint.made += [(entry.parameter, name) for name in entry.update.state]
        graph.outputs += [value.name for value in after[1:]]
    else:
        for old, new in zip(before, after[1:], strict=True):
            graph.write(old.name, new)
