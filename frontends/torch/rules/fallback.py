"""ATen and custom operators without a rule: called unchanged, with PyTorch's own derivative as a body."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.utils import _pytree as pytree

from daceml_train.analysis.reachability import required
from daceml_train.errors import DacemlError, Unsupported
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.capture.decompositions import derivative_table
from daceml_train.frontends.torch.dynamo.origin import origin
from daceml_train.frontends.torch.rules.collectives import refuse_collectives
from daceml_train.frontends.torch.rules.size_numbers import Unproven
from daceml_train.frontends.torch.rules.translate import Translator
from daceml_train.graph.graph import Graph
from daceml_train.ops.fallback import Aten, Body, Operand
from daceml_train.ops.kernel import Statement
from daceml_train.ops.operator import Value

_COPY = torch.ops.aten.copy.default
"""A copy over a tensor, called for complex numbers alone; autograd has no derivative for this form of it."""

_VIEW_OF: dict[object, Any] = {
    getattr(torch.ops.aten, f"{name}_scatter").default: getattr(torch.ops.aten, name)
    for name in ("slice", "select", "diagonal", "as_strided")
}
"""The view that each operator writes to a copy of its operand: for complex numbers, autograd refuses the operators, but
differentiates the write."""


def emit(t: Translator, node: fx.Node, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Emit the operator of `node` as a call of PyTorch; return its results in PyTorch's structure."""
    target = node.target
    if str(target).startswith("auto_functionalized"):
        raise Unsupported(f"the operator {node.args[0]}, which changes its arguments")
    if not isinstance(target, torch._ops.OpOverload):
        raise Unsupported(f"the call of {target}")
    refuse_collectives([node])
    _refuse_numbers(node, arguments, keywords)
    call = _functional(target)
    operands: list[Value] = []
    captured = tuple(_captured(a, operands) for a in arguments)
    named = tuple((k, _captured(a, operands)) for k, a in keywords.items() if k != "pin_memory")
    examples, structure = pytree.tree_flatten(_examples(node, operands))
    tensors = [e for e in examples if isinstance(e, Tensor)]
    if any(e.layout is not torch.strided for e in tensors):
        raise Unsupported(f"{target}, whose result is of layout {tensors[0].layout}")
    if any(_depends_on_data(e) for e in tensors):
        raise Unsupported(f"{target}, whose result's size depends on data")
    op = Aten(
        target=str(call),
        arguments=captured,
        keywords=named,
        types=tuple(types.tensor(e, laid_out=call is target) for e in tensors),
        random=torch.Tag.nondeterministic_seeded in target.tags,
    )
    if not op.zero_gradient and any(t.active(v) for v in operands):
        op = Aten(op.target, op.arguments, op.types, op.keywords, op.random, _derivative(t, node, op, operands))
    t.fallbacks.append((op.target, t.graph.origin))
    results = iter(t.graph.emit(op, *operands))
    return pytree.tree_unflatten([next(results) if isinstance(e, Tensor) else e for e in examples], structure)


def _refuse_numbers(node: fx.Node, arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
    """Raise `Unsupported` if an attribute is a number that the program reads: the operator is called with constants."""
    given = pytree.tree_leaves((tuple(node.args), dict(node.kwargs)), is_leaf=lambda leaf: leaf is None)
    read = pytree.tree_leaves((tuple(arguments), keywords), is_leaf=lambda leaf: leaf is None)
    for argument, value in zip(given, read, strict=False):
        if isinstance(value, Value) and not isinstance(getattr(argument, "meta", {}).get("val"), Tensor):
            raise Unsupported(f"{node.target} with a number that changes", where=str(origin(node)))


def _tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node as they occur in its arguments, with repetitions."""
    flat = pytree.tree_leaves((node.args, node.kwargs))
    return [a for a in flat if isinstance(a, fx.Node) and isinstance(a.meta["val"], Tensor)]


def _call(node: fx.Node, tensors: Sequence[Tensor]) -> Any:
    """The operator of a node on other tensors."""
    given = iter(tensors)

    def replaced(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        value = argument.meta["val"]
        return next(given) if isinstance(value, Tensor) else value

    args, kwargs = pytree.tree_map(replaced, (node.args, node.kwargs))
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target is _COPY and torch.is_grad_enabled():
        return args[1].to(args[0].dtype).expand(args[0].shape)
    if target in _VIEW_OF and args[0].is_complex() and torch.is_grad_enabled():
        result = args[0].clone()
        _VIEW_OF[target](result, *args[2:], **kwargs).copy_(args[1])
        return result
    return target(*args, **kwargs)


def _examples(node: fx.Node, operands: Sequence[Value]) -> Any:
    """The results in PyTorch's layout for operands in the graph's memory order.

    Some operators mean something else in another order: the factors of `_linalg_det` are those of the transpose.
    """
    nodes = _tensor_nodes(node)
    here = [(types.order_of(n.meta["val"]) or None) == v.tensor.order for n, v in zip(nodes, operands, strict=False)]
    if all(here) or len(nodes) != len(operands):
        return node.meta["val"]
    with nodes[0].meta["val"].fake_mode:
        return _call(node, [_as_here(n.meta["val"], v) for n, v in zip(nodes, operands, strict=True)])


def _as_here(example: Tensor, value: Value) -> Tensor:
    """A fake tensor like `example` in the memory order of `value`."""
    order = value.tensor.order or tuple(range(example.dim()))
    result = torch.empty([example.shape[d] for d in order], dtype=example.dtype, device=example.device)
    return result.permute([order.index(d) for d in range(example.dim())]).detach()


def _functional(target: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The operator that returns a copy where `target` returns a view: results own their memory."""
    if not any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns):
        return target
    packet = getattr(getattr(torch.ops, target.namespace), f"{target._opname}_copy", None)
    return getattr(packet, target._overloadname, target) if packet is not None else target


def _depends_on_data(example: Tensor) -> bool:
    return any(
        isinstance(s, torch.SymInt) and any(str(n).startswith("u") for n in s.node.expr.free_symbols)
        for s in example.shape
    )


def _captured(argument: Any, operands: list[Value]) -> Any:
    """An argument in the form of `Aten`; tensors are appended to `operands`."""
    match argument:
        case Value():
            operands.append(argument)
            return Operand(len(operands) - 1)
        case tuple() | list():
            return tuple(_captured(a, operands) for a in argument)
        case torch.dtype():
            return types.element_type(argument)
        case torch.layout() | torch.memory_format() | torch.device():
            return str(argument)
        case None | bool() | int() | float() | str() | complex() | sympy.Expr():
            return argument
    raise Unsupported(f"an argument of type {type(argument).__name__}")


# ---- derivatives -------------------------------------------------------------------------------------------------


_traced: dict[tuple[object, ...], Body | None] = {}
"""Derivatives of calls without symbolic sizes: equal layers of a model share them, and a trace is slow."""


def _has_derivative(target: torch._ops.OpOverload) -> bool:
    """Whether autograd knows the operator. If not, its kernel may have a gradient, which PyTorch's trace leaves out."""
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key) for key in keys)


def _derivative(t: Translator, node: fx.Node, op: Aten, operands: Sequence[Value]) -> Body | None:
    """PyTorch's derivative of this one call as a body; None if PyTorch has none."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if not _has_derivative(node.target):
        return None
    key = (  # by its text, since 1, 1.0 and True are equal
        repr(op),
        tuple(v.tensor for v in operands),
        tuple(t.active(v) for v in operands),
        torch.get_default_dtype(),
        tuple(_read(node)),
    )
    symbolic = any(tensor.symbols for tensor in (*op.types, *(v.tensor for v in operands)))
    if not symbolic and key in _traced:
        return _traced[key]
    try:
        found = _traced_derivative(t, node, op, operands)
    except Unproven:
        raise  # with fewer symbols, or those that PyTorch's derivative takes to be equal, there may be one
    except (DacemlError, RuntimeError, NotImplementedError, AssertionError):
        found = None  # the reverse pass raises, naming the operator, if a gradient has to flow through it
    if not symbolic:
        if len(_traced) >= 1024:
            _traced.clear()
        _traced[key] = found
    return found


def _traced_derivative(t: Translator, node: fx.Node, op: Aten, operands: Sequence[Value]) -> Body | None:
    nodes = _tensor_nodes(node)
    assert len(nodes) == len(operands)
    mode = nodes[0].meta["val"].fake_mode

    def call(*tensors: Tensor) -> list[Tensor]:
        return [r for r in pytree.tree_leaves(_call(node, tensors)) if isinstance(r, Tensor)]

    with mode, torch.enable_grad():
        leaves = [_as_here(n.meta["val"], v).requires_grad_(t.active(v)) for n, v in zip(nodes, operands, strict=True)]
        read = _read(node)
        results = call(*leaves)
        if op.target.startswith("aten.") and not any(r.requires_grad for r in results):  # as of `full_like`
            return body_of(_Signature(op, operands).graph, [None] * len(operands))
        differentiable = [i for i, r in enumerate(results) if r.requires_grad and (not read or i in read)]
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        if not differentiable or not wanted:
            return None

        def chosen(*tensors: Tensor) -> tuple[Tensor, ...]:
            results = call(*tensors)
            return tuple(results[i].clone() for i in differentiable)

        joint = aot_export_joint_simple(chosen, tuple(leaves), trace_joint=True, decompositions=derivative_table())
    assert isinstance(joint, fx.GraphModule)
    return _body(joint, node, op, operands, differentiable, wanted)


def _read(node: fx.Node) -> list[int]:
    """The results that anything reads, of several: a derivative by others may not exist, as that of equal vectors."""
    if not isinstance(node.meta["val"], tuple | list) or not all(isinstance(v, Tensor) for v in node.meta["val"]):
        return []
    if not all(user.target is operator.getitem for user in node.users):
        return []
    return sorted({int(user.args[1]) for user in node.users})  # type: ignore[arg-type]


class _Signature:
    """A graph with the inputs of the body of a derivative."""

    def __init__(self, op: Aten, operands: Sequence[Value]) -> None:
        self.graph = graph = Graph("derivative")
        self.xs = [graph.input(f"x{i}", v.tensor) for i, v in enumerate(operands)]
        self.ys = [graph.input(f"y{i}", result) for i, result in enumerate(op.types)]
        self.cotangents = {i: graph.input(f"g{i}", r) for i, r in enumerate(op.types) if r.dtype.is_float}


def _body(
    joint: fx.GraphModule,
    node: fx.Node,
    op: Aten,
    operands: Sequence[Value],
    differentiable: list[int],
    wanted: list[int],
) -> Body:
    """The body of a traced forward and backward, in which the operator's own results replace the forward."""
    inputs = _Signature(op, operands)
    if not all(i in inputs.cotangents for i in differentiable):
        raise Unsupported(f"the derivative of {op.label}")
    t = Translator(inputs.graph, emit)
    first = next((n for n in joint.graph.nodes if n.target is node.target), None)
    if first is not None:
        examples, structure = pytree.tree_flatten(node.meta["val"])
        results = iter(inputs.ys)
        t.given[first] = pytree.tree_unflatten(
            [next(results) if isinstance(e, Tensor) else e for e in examples], structure
        )
    elif op.random:
        raise Unsupported(f"the derivative of {op.label}, which is random")
    outputs = t.run(joint, [*inputs.xs, *(inputs.cotangents[i] for i in differentiable)])[len(differentiable) :]
    gradients: list[str | None] = [None] * len(operands)
    for position, value in zip(_gradient_positions(outputs, wanted, len(operands)), outputs, strict=True):
        if isinstance(value, Value):
            gradients[position] = value.name
    return body_of(inputs.graph, gradients)


def _gradient_positions(results: Sequence[Any], wanted: Sequence[int], count: int) -> Sequence[int]:
    """The operand of each traced gradient: PyTorch returns one per operand, or one per differentiable one."""
    return range(count) if len(results) == count else wanted


def body_of(graph: Graph, yields: Sequence[str | None]) -> Body:
    """A graph as a body that yields these arrays, without the nodes that do not contribute."""
    nodes, _ = required(graph.nodes, yields)
    statements = tuple(Statement(node.op, node.inputs, node.outputs) for node in nodes)
    return Body(tuple(graph.inputs), statements, tuple(yields))
