"""Capture: a Dynamo graph and its example inputs become an operator graph, and a description of inputs and outputs."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._dynamo import compiled_autograd
from torch.utils import _pytree as pytree

from daceml_train.analysis.reachability import required
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.capture import graph_leaves, selections, size_symbols, zero_gradients
from daceml_train.frontends.torch.capture.functional_trace import FunctionalGraph
from daceml_train.frontends.torch.capture.nodes import name_of
from daceml_train.frontends.torch.capture.operators import CustomFunction, custom_functions
from daceml_train.frontends.torch.capture.rng_draws import Draw, Randomness
from daceml_train.frontends.torch.capture.trace import fake, fake_mode, first_line, functorch_levels, trace
from daceml_train.frontends.torch.dynamo import origin, size_limits
from daceml_train.frontends.torch.dynamo.polyfills import POLYFILLS
from daceml_train.frontends.torch.results import OutputSource, example_of, outputs_of, shared_bases, version
from daceml_train.frontends.torch.rules import collectives, fallback, table
from daceml_train.frontends.torch.rules.size_numbers import Unproven
from daceml_train.frontends.torch.rules.translate import Translator
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.graph.node import SEED
from daceml_train.ops.operator import Origin, Value
from daceml_train.tensor import DType
from daceml_train.tensor import Tensor as TensorType

assert table.RULES  # filled by importing the table


@dataclass(frozen=True, eq=False)
class InputSource:
    """The origin of one operand of the captured graph.

    `kind` is `tensor` (graph input `name`), `size` (an integer: `value` is its symbol's name, or its expression),
    `number` (an integer that reaches no shape: `value` is its symbol, graph input `name` holds it where operators read
    it), `constant` (`value`, burned in), or `attribute` (graph input `name`, bound to the tensor `value`). `position`
    is that of the placeholder, None for an attribute. `copy`: the tensor is not dense and has to be made contiguous.
    """

    kind: str
    position: int | None
    name: str = ""
    source: str = ""
    value: Any = None
    copy: bool = False
    number: bool = False
    """Whether Dynamo passes a Python float as this tensor."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The functional ATen graph, and per node its array in the operator graph (or a tuple, or a size)."""

    module: fx.GraphModule
    arrays: dict[fx.Node, Any]


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured graph: inputs in the order of the placeholders, then attributes, then `seed` if there is one."""

    graph: Graph
    inputs: tuple[InputSource, ...]
    outputs: tuple[OutputSource, ...]
    out_spec: pytree.TreeSpec
    detached: tuple[bool, ...]
    """Per result: whether it requires no gradient in eager execution."""
    fallbacks: tuple[tuple[str, Origin], ...]
    """ATen operators without a rule, and their lines in the user's code."""
    trace: Trace | None = None
    """The translation, if `capture` was asked to keep it."""

    draws: dict[str, Draw] = field(default_factory=dict)
    """Graph inputs for random numbers as eager execution draws them, in its order."""

    changes: dict[str, int] = field(default_factory=dict)
    """Graph inputs that eager execution changes in place, and how often; not all of them get other values."""

    constant_sizes: tuple[str, ...] = ()
    """Which sizes became constants although others were asked for, and why."""

    selection: selections.Selection | None = None
    """Computes further operands, of sizes that depend on data, from the others."""

    once: str = ""
    """Through what its gradients cannot be differentiated again; empty if they can."""

    @functools.cached_property
    def sized(self) -> bool:
        """Whether the graph is for more than one set of sizes."""
        return bool(self.graph.symbols)

    @functools.cached_property
    def arrays(self) -> tuple[tuple[int, OutputSource], ...]:
        """What each graph output is that a result names."""
        return tuple(sorted({s.index: s for s in self.outputs if s.kind == "graph"}.items()))

    @functools.cached_property
    def flat(self) -> bool:
        """Whether the results are a plain tuple of leaves."""
        return bool(self.out_spec == pytree.tree_structure((0,) * len(self.outputs)))

    @functools.cached_property
    def random(self) -> bool:
        """Whether random numbers are drawn: the graph then has the input `seed`, or inputs with the numbers."""
        return SEED in self.graph.inputs or bool(self.draws)


def capture(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    randomness: Randomness = "seeded",
    *,
    keep_trace: bool = False,
    select: bool = False,
) -> Captured:
    """The operator graph of `gm`. Raises `Unsupported`, naming the user's line, for what cannot be captured.

    `select`: what is selected by the values of arguments may be computed before the program; see `selections`.
    """
    _refuse_compiled_autograd(gm)
    if select and (hoisted := selections.hoist(gm, example_inputs)) is not None:
        main, operands, selection = hoisted
        with types.determined(selection.symbols):
            captured = capture(main, operands, randomness, keep_trace=keep_trace)
        if any(source.kind == "input" and source.index >= selection.first for source in captured.outputs):
            raise Unsupported("a result that consists of what the values of arguments select")
        return replace(captured, selection=selections.with_conditions(selection, operands))
    grad_enabled = torch.is_grad_enabled()
    mode = fake_mode(example_inputs)
    operands = [
        fake(mode, x, node.name, getattr(node, "_dynamo_source", None))
        for node, x in zip(_placeholders(gm), example_inputs, strict=True)
    ]
    size_symbols.specialize(operands, size_symbols.told(operands), size_symbols.without_shapes(gm, operands))
    held = dict(gm.named_parameters(remove_duplicate=False)) | dict(gm.named_buffers(remove_duplicate=False))
    attributes = {name: fake(mode, t, name) for name, t in held.items()}
    _annotate(gm, mode, operands, held, attributes)
    _refuse_gradients_into_inputs(gm, grad_enabled)
    _refuse_enabled_gradients(gm, grad_enabled)
    graph_leaves.refuse_if_seen(gm)
    if grad_enabled:
        collectives.refuse_in_place(gm.graph.nodes)
    try:
        captured, trace = _with_equal_sizes(gm, example_inputs, operands, held, attributes, grad_enabled, randomness)
    except Unsupported as error:
        unproven = isinstance(error, Unproven) or any(isinstance(x, torch.SymInt) for x in operands)
        if not unproven or types.some_determined():  # sizes that depend on data have no numbers
            raise
        captured, trace = _with_fewer_symbols(gm, example_inputs, operands, held, attributes, grad_enabled, randomness)
    noted = size_limits.traces.noted()
    return replace(captured, trace=trace if keep_trace else None, constant_sizes=noted)


def _with_equal_sizes(
    gm: fx.GraphModule, example_inputs: Sequence[object], operands: Any, *more: Any
) -> tuple[Captured, Trace]:
    """The translation; once more where PyTorch's derivative of an operator has found that sizes have to be equal.

    That is a guard of the graph, and these sizes have one symbol from then on.
    """
    shape_env = size_symbols.shape_env_of(operands)
    known = 0 if shape_env is None else len(shape_env.replacements)
    try:
        return _translated(gm, example_inputs, operands, *more)
    except Unproven:
        if shape_env is None or len(shape_env.replacements) == known:
            raise
    return _translated(gm, example_inputs, operands, *more)


def _with_fewer_symbols(gm: fx.GraphModule, example_inputs: Sequence[object], operands: Any, *more: Any) -> Any:
    """The translation without the symbols of sizes in PyTorch's equations, or else without any symbol."""
    for kept in (size_symbols.told(operands) - size_symbols.tied(operands), set[sympy.Symbol]()):
        size_symbols.specialize(operands, kept)
        try:
            return _translated(gm, example_inputs, operands, *more)
        except Unproven:
            if not kept:
                raise


def _translated(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    operands: Sequence[Any],
    held: dict[str, Tensor],
    attributes: dict[str, Tensor],
    grad_enabled: bool,
    randomness: Randomness,
) -> tuple[Captured, Trace]:
    """Trace and translate, on fake operands and attributes."""
    token = custom_functions.set([])
    try:
        examples = [example_of(n) for n in _placeholders(gm)]
        results = pytree.tree_leaves(_results(gm))
        bases = shared_bases(gm.graph.nodes, results, examples)
        traced = trace(gm, attributes, operands, grad_enabled, [*bases, *_unread(gm, randomness)], randomness)
        collectives.refuse_collectives(traced.module.graph.nodes)
        graph = Graph("forward")
        t = Translator(graph, fallback.emit, randomness)
        inputs = _inputs(t, gm, example_inputs, operands, grad_enabled)
        bound = [_attribute(t, name, held[name], example) for name, example in attributes.items()]
        values = [graph.value(i.name) if i.name and i.kind != "number" else i.value for i in (*bound, *inputs)]
        created = t.run(traced.module, values, tokens=traced.tokens)
        once = next((f.once for f in custom_functions.get() if isinstance(f, CustomFunction) and f.once), "")
    finally:
        custom_functions.reset(token)
    created = created[len(traced.tokens) :]
    _declare_writes(t, traced, created, values)
    written = len(traced.changed)
    outputs, detached = outputs_of(t, results, examples, created[written:], bases, grad_enabled)
    graph.nodes = _live(graph)
    inputs = [_dropped(graph, i) for i in inputs]
    spec = pytree.tree_structure(_results(gm))
    bound += [InputSource("attribute", None, name, name, tensor) for name, tensor in t.constants.items()]
    given = {i.name: examples[i.position] for i in inputs if i.name in graph.inputs and i.position is not None}
    versions = {name: version(example) for name, example in given.items() if isinstance(example, Tensor)}
    # one that leaves all values is no write, and one through `.data` does not count
    changes = {name: count for name, count in versions.items() if count or name in graph.writes}
    if grad_enabled:
        names: dict[int | str, str] = dict(zip(attributes, (i.name for i in bound), strict=False))
        names.update((i.position, i.name) for i in inputs if i.position is not None and i.kind == "tensor")
        zero_gradients.connect(gm, operands, attributes, names, graph, outputs)
    fallbacks = tuple(t.fallbacks)
    known = (graph, (*inputs, *bound), outputs, spec, detached, fallbacks)
    captured = Captured(*known, draws=t.draws, changes=changes, once=once)
    return captured, Trace(traced.module, t.scope)


def _live(graph: Graph) -> list[Node]:
    """The nodes that outputs or writes depend on; results that are views of inputs leave dead nodes."""
    kept, _ = required(graph.nodes, graph.results)
    produced = {name for node in kept for name in node.outputs}
    for name in {name for node in graph.nodes for name in node.outputs} - produced:
        del graph.tensors[name]
    return kept


def _dropped(graph: Graph, entry: InputSource) -> InputSource:
    """Drop the input of a Python float that Dynamo passes as a tensor and the trace has burned in."""
    used = {name for node in graph.nodes for name in node.inputs} | {*graph.outputs, *graph.writes}
    if entry.name in used or not entry.number:
        return entry
    del graph.inputs[entry.name], graph.tensors[entry.name]
    if entry.kind == "number":  # which Python alone sees
        return replace(entry, name="")
    return InputSource("constant", entry.position, "", entry.source)


# ---- inputs ------------------------------------------------------------------------------------------------------


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def _output_node(gm: fx.GraphModule) -> fx.Node:
    output: fx.Node
    (output,) = gm.graph.find_nodes(op="output")
    return output


def _results(gm: fx.GraphModule) -> Any:
    """The graph's results in the user's structure, as examples."""
    return pytree.tree_map_only(fx.Node, example_of, _output_node(gm).args[0])


def _annotate(
    gm: fx.GraphModule, mode: Any, operands: Sequence[Any], held: dict[str, Tensor], attributes: dict[str, Tensor]
) -> None:
    """Add the examples that Dynamo's nodes have to a graph that does not come from Dynamo.

    What the graph holds is fake, too: a call in place that reads and writes it alone would run on the real data.
    """
    given = _placeholders(gm) or [n for n in gm.graph.nodes if n.op.startswith("call_")][:1]
    if all("example_value" in n.meta for n in given):
        return

    class Annotator(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return super().call_function(POLYFILLS.get(target, target), args, kwargs)

        def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
            return own[target] if target in own else super().get_attr(target, args, kwargs)

        def run_node(self, n: fx.Node) -> Any:
            n.meta["example_value"] = result = super().run_node(n)
            return result

    flags = [n.meta.get("requires_grad", False) for n in _placeholders(gm)]
    with functorch_levels(), mode, torch.enable_grad():
        own = {name: x.detach().requires_grad_(held[name].requires_grad) for name, x in attributes.items()}
        fresh = [
            x.detach().requires_grad_(flag) if isinstance(x, Tensor) else x
            for x, flag in zip(operands, flags, strict=True)
        ]
        try:
            Annotator(gm, garbage_collect_values=False).run(*fresh)
        except Exception as error:
            raise Unsupported(f"a graph that PyTorch cannot run without data: {first_line(error)}") from error


def _refuse_compiled_autograd(gm: fx.GraphModule) -> None:
    """Raise for a backward pass that compiled autograd traced; its operators ask inputs if they require gradients."""
    if any(isinstance(node.target, compiled_autograd.Op) for node in gm.graph.nodes):
        raise Unsupported("a backward pass that torch._dynamo.compiled_autograd traced")


def _refuse_gradients_into_inputs(gm: fx.GraphModule, grad_enabled: bool) -> None:
    """Raise if an input that needs no gradient is overwritten by values that have one."""
    for node in _placeholders(gm):
        example = example_of(node)
        if grad_enabled and isinstance(example, Tensor) and example._version and example.grad_fn is not None:
            raise Unsupported(
                f"an in-place change of the input {_path(node)} by values that have a gradient",
                advice="detach the value that is written",
            )


def _refuse_enabled_gradients(gm: fx.GraphModule, grad_enabled: bool) -> None:
    """Raise if a result has a gradient that the code enables in itself, in a call without gradients."""
    for node in () if grad_enabled else _output_node(gm).all_input_nodes:
        example = example_of(node)
        if node.op.startswith("call") and isinstance(example, Tensor) and example.requires_grad:
            raise Unsupported("a result of enable_grad in a call without gradients", where=str(origin.origin(node)))


def _source(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return ""
    text = source.name
    return str(text() if callable(text) else text)


def _path(node: fx.Node) -> str:
    return origin.path(_source(node)) or node.name


def _inputs(
    t: Translator, gm: fx.GraphModule, given: Sequence[object], operands: Sequence[Any], grad_enabled: bool
) -> list[InputSource]:
    sources: list[InputSource] = []
    for position, (node, real, example) in enumerate(zip(_placeholders(gm), given, operands, strict=True)):
        text = _source(node)
        if isinstance(example, Tensor):
            name, copy = _declare(t, _path(node), example, _role(real, text))
            if grad_enabled and isinstance(real, Tensor) and real.requires_grad:
                t.require_gradient(t.graph.value(name))
            number = getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)
            sources.append(InputSource("tensor", position, name, text, None, copy, number))
        elif isinstance(example, torch.SymInt):
            size = types.size(example)
            if isinstance(size, sympy.Symbol) and size not in size_symbols.told(operands):
                name = t.graph.fresh(re.sub(r"\W+", "_", _path(node)).strip("_") or "number")
                t.number(str(size), t.graph.input(name, TensorType((), DType.int64), Role.input, _path(node)))
                sources.append(InputSource("number", position, name, text, size, number=True))
            else:
                sources.append(InputSource("size", position, "", text, size))
        elif isinstance(example, int | float | bool | str | None):
            sources.append(InputSource("constant", position, "", text, example))
        else:
            raise Unsupported(f"an input of type {type(example).__name__} ({text or node.name})")
    return sources


def _attribute(t: Translator, path: str, real: Tensor, example: Tensor) -> InputSource:
    role = Role.parameter if isinstance(real, nn.Parameter) else Role.buffer
    name, copy = _declare(t, path, example, role)
    if real.requires_grad:
        t.require_gradient(t.graph.value(name))
    return InputSource("attribute", None, name, path, real, copy)


def _declare(t: Translator, path: str, example: Tensor, role: Role) -> tuple[str, bool]:
    """Declare a graph input; return its name, and whether its memory is not dense."""
    if example.layout is not torch.strided:
        raise Unsupported(f"the input {path} of layout {example.layout}")
    name = t.graph.fresh(re.sub(r"\W+", "_", path).strip("_") or "x")
    t.graph.input(name, types.tensor(example, laid_out=True), role, path)
    return name, types.order_of(example) is None


def _role(real: object, text: str) -> Role:
    if isinstance(real, nn.Parameter):
        return Role.parameter
    return Role.buffer if "_buffers" in text else Role.input


# ---- outputs -----------------------------------------------------------------------------------------------------


def _declare_writes(t: Translator, traced: FunctionalGraph, results: Sequence[Any], values: Sequence[Any]) -> None:
    """Declare the changed inputs as writes."""
    placeholders = (n.name for n in traced.module.graph.find_nodes(op="placeholder") if n.name not in traced.tokens)
    owners = dict(zip(placeholders, values, strict=True))
    for value, target in zip(results, traced.changed, strict=False):
        owner = owners[target]
        assert isinstance(value, Value) and isinstance(owner, Value)
        t.graph.write(owner.name, value)


def _unread(gm: fx.GraphModule, randomness: Randomness) -> list[fx.Node]:
    """Values that nothing reads; with eager execution's random numbers, a trace must not leave them out."""
    if randomness != "eager":
        return []
    found, nesting = [], 0
    for n in gm.graph.nodes:
        name = name_of(n.target)
        nesting += name.endswith("_increment_nesting")
        nesting -= name.endswith("_decrement_nesting")
        unread = n.op in ("call_function", "call_method") and not n.users
        if unread and not nesting and isinstance(example_of(n), Tensor):  # no value within a transformation outlives it
            found.append(n)
    return found
