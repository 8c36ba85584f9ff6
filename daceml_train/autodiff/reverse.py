"""Reverse-mode differentiation of an operator graph.

A walk over the operators in reverse order lets each emit its VJP, so the backward pass is a graph of the same
operators. Arrays outside the paths from `wrt` to `of` get no cotangent. Contributions at a fan-out are added; those of
adjacent slices that fill an array are concatenated. A broadcast operand's cotangent is summed here, once for all
operators. An operator without a derivative on such a path is an error, never a dropped gradient (Griewank & Walther,
Evaluating Derivatives, 2008, ch. 3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from daceml_train.analysis.reachability import required
from daceml_train.autodiff.control import control_cotangents
from daceml_train.autodiff.pads import Pads
from daceml_train.errors import Invalid, Unsupported
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.control import ControlFlow
from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.fallback import Aten, Body, Operand, zeros_like
from daceml_train.ops.gradient import CustomVJP, Graft, Overwrite
from daceml_train.ops.levels import Levels
from daceml_train.ops.normalization import BatchNorm, GroupNorm, LayerNorm
from daceml_train.ops.operator import Operator, Value, vjp_parameters
from daceml_train.tensor import Dim, Tensor, same, same_shape, show_shape


def sum_to(value: Value, shape: Sequence[Dim]) -> Value:
    """Sum over the dimensions that broadcasting from `shape` added; the adjoint of broadcasting."""
    if same_shape(value.shape, shape):
        return value
    lead = len(value.shape) - len(shape)
    grown = [d + lead for d, size in enumerate(shape) if same(size, 1) and not same(value.shape[d + lead], 1)]
    dims = (*range(lead), *grown)
    summed = value.sum(dims) if dims else value
    return summed.view(shape)


def plus(a: Value, b: Value) -> Value:
    """The sum of two cotangents of one array; that of complex ones is PyTorch's, since kernels compute with none."""
    if not a.dtype.is_complex:
        return a + b
    body = Body(("a", "b", "sum", "g"), (), ("g", "g"))
    op = Aten("aten.add.Tensor", (Operand(0), Operand(1)), (Tensor(a.shape, a.dtype),), backward=body)
    return a.builder.emit(op, a, b)[0]


def active_arrays(graph: Graph, wrt: Sequence[str]) -> set[str]:
    """Arrays that a change of `wrt` affects: a gradient may have to pass through them."""
    active = set(wrt)
    for node in graph.nodes:
        if passes_gradient(node.op) and not active.isdisjoint(node.inputs):
            active.update(name for name in node.outputs if graph.tensors[name].dtype.is_float)
    return active


def reached_arrays(graph: Graph, wrt: Sequence[str]) -> set[str]:
    """Arrays that PyTorch's autograd connects to `wrt`, even if the gradient is zero everywhere."""
    reached = set(wrt)
    for node in graph.nodes:
        if not reached.isdisjoint(carrying(node)):
            reached.update(name for name in node.outputs if graph.tensors[name].dtype.is_float)
    return reached


def passes_gradient(op: Operator) -> bool:
    """Whether the derivative of `op` is not zero almost everywhere."""
    if isinstance(op, Elementwise):
        return any(formula not in (None, "0") for formula in op.row.gradients)
    return not op.zero_gradient


WITH_STATISTICS = (BatchNorm, GroupNorm, LayerNorm)
"""Normalizations whose results after the first are statistics of their first operand."""


def carrying(node: Node) -> Iterator[str]:
    """The inputs that get a gradient in PyTorch if the node's outputs do, even one of zeros, as from rounding."""
    match node.op:
        case Elementwise() as op:
            marks: Sequence[object] = op.row.gradients
        case Aten(backward=Body() as body) | CustomVJP(backward=body):
            marks = body.yields
        case Overwrite():
            marks = ("g", "g")
        case Graft():
            marks = ("g", None)
        case op:
            marks = [None if op.zero_gradient else "g"] * len(node.inputs)
    return (name for name, mark in zip(node.inputs, marks, strict=True) if mark is not None)


def reaching(graph: Graph, outputs: Collection[str]) -> set[str]:
    """The arrays that get a gradient of `outputs` in PyTorch, even one of zeros."""
    found = set(outputs)
    for node in reversed(graph.nodes):
        if not found.isdisjoint(node.outputs):
            names: Iterator[str] = carrying(node)
            if isinstance(node.op, Levels) and not node.op.reverse:
                read = node.op.read_for([k for k, name in enumerate(node.outputs) if name in found])
                names = (name for k, name in enumerate(node.inputs) if k in read)
            elif isinstance(node.op, WITH_STATISTICS) and node.outputs[0] not in found:
                names = iter(node.inputs[:1])  # the statistics do not depend on the weight and the bias
            found.update(name for name in names if graph.tensors[name].dtype.is_float)
    return found


def differentiate(graph: Graph, of: Mapping[str, Value], wrt: Sequence[str]) -> dict[str, Value | None]:
    """Append the backward pass to `graph`.

    `of` maps each differentiated array to its cotangent (a value of `graph`, of the array's shape). The result maps
    each array of `wrt` to its gradient: zeros if `of` depends on it only through rounding, None if not at all.
    Raises `Unsupported`, naming the operator and the user's line, where an operator in between has no derivative.
    """
    active = active_arrays(graph, wrt)
    connected = reaching(graph, of)
    contributions: dict[str, list[Value]] = {}
    for name, cotangent in of.items():
        if not same_shape(cotangent.shape, graph.tensors[name].shape):
            expected = show_shape(graph.tensors[name].shape)
            raise Invalid(f"cotangent of {name} has shape {show_shape(cotangent.shape)}, expected {expected}")
        contributions[name] = [cotangent]
    total: dict[str, Value | None] = {}
    pads = Pads(graph)

    def cotangent_of(name: str) -> Value | None:
        if name not in total:
            parts = pads.joined(contributions.pop(name, []))
            result = parts[0] if parts else None
            for part in parts[1:]:
                assert result is not None
                result = plus(result, part)
            total[name] = result
        return total[name]

    for position in reversed(range(len(graph.nodes))):  # new nodes are appended after these
        node = graph.nodes[position]
        if active.isdisjoint(node.outputs) or active.isdisjoint(node.inputs) or not passes_gradient(node.op):
            continue
        with graph.at(node.origin.of(node.op.label, "backward")):
            cotangents = [cotangent_of(name) if name in active else None for name in node.outputs]
            if all(c is None for c in cotangents):
                continue
            if isinstance(node.op, ControlFlow):
                asked = [name in active for name in node.inputs]
                gradients: Sequence[Value | None] = control_cotangents(
                    graph, position, cotangents, asked, differentiate
                )
            else:
                gradients = operand_cotangents(graph, node, cotangents, active)
            for name, gradient in zip(node.inputs, gradients, strict=True):
                if gradient is not None and name in active:
                    contributions.setdefault(name, []).append(sum_to(gradient, graph.tensors[name].shape))
    for name in wrt:
        if cotangent_of(name) is None and name in connected:
            total[name] = zeros_like(graph, graph.value(name))
    return {name: cotangent_of(name) for name in wrt}


def operand_cotangents(
    graph: Graph, node: Node, cotangents: Sequence[Value | None], active: set[str]
) -> Sequence[Value | None]:
    """One cotangent per input of `node`, from those of its outputs."""
    op, operands = node.op, tuple(graph.value(i) for i in node.inputs)
    results = tuple(graph.value(o) for o in node.outputs)
    if isinstance(op, Elementwise):
        (g,) = cotangents
        assert g is not None
        return [
            op.gradient(graph, i, operands, results[0], g) if name in active else None
            for i, name in enumerate(node.inputs)
        ]
    if op.vjp is None and op.is_composite:
        return derived_cotangents(graph, op, operands, cotangents, [name in active for name in node.inputs])
    if op.vjp is None:
        raise Unsupported(
            f"operator {op.label} has no derivative but a gradient flows through it",
            where=str(node.origin),
            advice="detach its input, or register a derivative for it",
        )
    scope = named_operands(op, operands) | dict(zip(result_names(op, len(results)), results, strict=True))
    scope |= {f"grad_{n}": c for n, c in zip(result_names(op, len(results)), cotangents, strict=True)}
    if op.results and op.results[-1].startswith("*"):
        scope[op.results[-1][1:]] = results
        scope[f"grad_{op.results[-1][1:]}"] = tuple(cotangents)
    answer = op.vjp(graph, *(scope[p] for p in vjp_parameters(type(op).vjp)))
    if isinstance(answer, Value) or answer is None:
        answer = (answer,)
    if op.operands and op.operands[-1].startswith("*"):
        answer = (*answer[: len(op.operands) - 1], *answer[-1])
    if len(answer) != len(operands):
        raise Invalid(f"the VJP of {op.label} returned {len(answer)} cotangents for {len(operands)} operands")
    return tuple(answer)


def derived_cotangents(
    graph: Graph, op: Operator, operands: Sequence[Value], cotangents: Sequence[Value | None], wanted: Sequence[bool]
) -> list[Value | None]:
    """The cotangents of a composite without a VJP of its own, by differentiating its lowering.

    Forward values that the derivative needs are emitted a second time; CSE merges equal operators later.
    """
    inner = Graph(op.label)
    xs = [inner.input(f"x{i}", v.tensor) for i, v in enumerate(operands)]
    now = {x.name: v.name for x, v in zip(xs, operands, strict=True)}
    of: dict[str, Value] = {}
    for i, (result, cotangent) in enumerate(zip(op.lowered(inner, *xs), cotangents, strict=True)):
        if cotangent is not None:
            seed = inner.input(f"g{i}", cotangent.tensor)
            now[seed.name] = cotangent.name
            of[result.name] = plus(of[result.name], seed) if result.name in of else seed
    names = [x.name for x, asked in zip(xs, wanted, strict=True) if asked]
    gradients = differentiate(inner, of, names)
    kept, _ = required(inner.nodes, [value.name for value in gradients.values() if value is not None])
    for node in kept:
        results = graph.append(node.op, tuple(now[i] for i in node.inputs))
        now.update((name, value.name) for name, value in zip(node.outputs, results, strict=True))
    found = (gradients.get(x.name) for x in xs)
    return [None if value is None else graph.value(now[value.name]) for value in found]


def named_operands(op: Operator, operands: tuple[Value, ...]) -> dict[str, object]:
    """Operand name -> value, a tuple of values for a variadic last name."""
    fixed = [n for n in op.operands if not n.startswith("*")]
    scope: dict[str, object] = dict(zip(fixed, operands, strict=False))
    if len(fixed) < len(op.operands):
        scope[op.operands[-1][1:]] = operands[len(fixed) :]
    return scope


def result_names(op: Operator, count: int) -> list[str]:
    """A name per result; results of a variadic name are numbered."""
    if op.results and op.results[-1].startswith("*"):
        fixed = list(op.results[:-1])
        return fixed + [f"{op.results[-1][1:]}{i}" for i in range(count - len(fixed))]
    return list(op.results)
