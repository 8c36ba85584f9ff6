"""Operators as functions of PyTorch, which a plugin provides for models to call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import sympy
import torch

from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Invalid
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.eager_graph import EagerGraph, derived
from daceml_train.frontends.torch.rules.translate import Translator, rule
from daceml_train.graph.graph import Graph
from daceml_train.ops.operator import Operator, Value
from daceml_train.passes.base import without_dead_code
from daceml_train.tensor import Dim, Tensor

_SCHEMA: Mapping[Any, str] = {
    float: "float",
    int: "int",
    bool: "bool",
    str: "str",
    tuple[int, ...]: "int[]",
    tuple[float, ...]: "float[]",
}
"""Type of an attribute -> its type in PyTorch's schemas."""

_libraries: list[torch.library.Library] = []
"""Kept alive: an operator exists as long as its library."""


def torch_function(kind: type[Operator], name: str) -> Callable[..., Any]:
    """The PyTorch operator `name` (`namespace::operator`) that means operator class `kind`, for use in models.

    Arguments are the operator's operands, then its attributes, with their defaults. In eager execution
    what the operator lowers to, and its derivative, run as PyTorch calls; compiled code runs the operator itself.
    Raises `Invalid` for an attribute that PyTorch's schemas cannot express.
    """
    if not isinstance(kind, type) or not issubclass(kind, Operator):
        raise Invalid(f"torch_function takes a class of operators, given {kind!r}")
    namespace, _, short = name.partition("::") if isinstance(name, str) else ("", "", "")
    if not short.isidentifier() or not namespace.isidentifier():
        raise Invalid(f"{name!r} is no name of a PyTorch operator", advice="expected namespace::operator")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"{short}({_signature(kind)}) -> {_results(kind)}")
    _libraries.append(library)
    function = _Function(kind)
    library.impl(short, function.eager, "CompositeExplicitAutograd")
    torch.library.register_fake(name, function.fake, lib=library)
    torch.library.register_autograd(name, function.backward, setup_context=function.remember, lib=library)
    torch.library.register_vmap(name, function.batched, lib=library)
    rule(f"{namespace}.{short}.default")(function.translated)
    function.function = getattr(getattr(torch.ops, namespace), short)
    return function.called()


def _signature(kind: type[Operator]) -> str:
    if any(operand.startswith("*") for operand in kind.operands):
        raise Invalid(f"operator {kind.name} takes any number of operands, which torch_function does not express")
    hints = get_type_hints(kind)
    parts = [f"Tensor {operand}" for operand in kind.operands]
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if hints[field.name] not in _SCHEMA:
            known = ", ".join(getattr(k, "__name__", str(k)) if isinstance(k, type) else str(k) for k in _SCHEMA)
            message = f"attribute {field.name} of operator {kind.name} is {hints[field.name]}"
            raise Invalid(f"{message}, which PyTorch's schemas do not express", advice=f"they express: {known}")
        default = "" if field.default is dataclasses.MISSING else f"={_default(field.default)}"
        parts.append(f"{_SCHEMA[hints[field.name]]} {field.name}{default}")
    return ", ".join(parts)


def _default(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _results(kind: type[Operator]) -> str:
    return "Tensor" if len(kind.results) == 1 else f"({', '.join(['Tensor'] * len(kind.results))})"


class _Function:
    """The registration of one operator class with PyTorch."""

    def __init__(self, kind: type[Operator]) -> None:
        self.kind, self.__name__ = kind, kind.name
        self.function: Callable[..., Any] = self.eager

    def operator(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Operator, list[Any]]:
        """The operator with its attributes, and the operands."""
        names = [*self.kind.operands, *(f.name for f in dataclasses.fields(self.kind))]  # type: ignore[arg-type]
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        operands = [given.pop(name) for name in self.kind.operands]
        return self.kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}), operands

    def called(self) -> Callable[..., Any]:
        """What users call: the operator, or where nothing traces, PyTorch's calls with their own derivatives."""
        operator, kind = self.function, self.kind

        @functools.wraps(operator, updated=())
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not torch.compiler.is_compiling() and not _traced():
                op, operands = self.operator(arguments, keywords)
                if len(operands) == len(kind.operands) and all(type(x) in _PLAIN for x in operands):
                    graph, direct = _forward(op, _kinds(operands))
                    if direct:
                        return self.packed(graph(operands))
            return operator(*arguments, **keywords)

        call.__name__, call.__doc__ = kind.name, kind.__doc__
        return call

    def translated(self, t: Translator, *arguments: Any, **keywords: Any) -> Any:
        """The rule of the frontend."""
        op, operands = self.operator(arguments, keywords)
        results = t.graph.emit(op, *operands)
        return results[0] if len(results) == 1 else results

    def eager(self, *arguments: Any, **keywords: Any) -> Any:
        """What the operator lowers to, as PyTorch calls."""
        op, operands = self.operator(arguments, keywords)
        return self.packed(_forward(op, _kinds(operands))[0](operands))

    def fake(self, *arguments: Any, **keywords: Any) -> Any:
        """Sizes and element types of the results."""
        op, operands = self.operator(arguments, keywords)
        symbols = {types.size(s): s for x in operands for s in x.shape if isinstance(s, torch.SymInt)}
        results = op.infer(*(types.tensor(x) for x in operands))
        shapes = [[_torch_size(size, symbols) for size in tensor.shape] for tensor in results]
        dtypes = [types.TORCH_DTYPES[tensor.dtype] for tensor in results]
        return self.packed([operands[0].new_empty(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)])

    def remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the operands for the backward pass."""
        op, operands = self.operator(inputs, {})
        ctx.op, ctx.arguments = op, len(inputs)
        ctx.save_for_backward(*operands)

    def backward(self, ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        """The operator's derivative, as PyTorch calls, which autograd can record."""
        operands = list(ctx.saved_tensors)
        given = [(i, g) for i, g in enumerate(cotangents) if g is not None]
        wanted = tuple(
            needed and x.is_floating_point() for needed, x in zip(ctx.needs_input_grad, operands, strict=False)
        )
        graph, present = _derivative(ctx.op, _kinds(operands), tuple(i for i, _ in given), wanted)
        result = iter(graph([*operands, *(g for _, g in given)]))
        gradients = [next(result) if there else None for there in present]
        gradients += [None] * (ctx.arguments - len(gradients))
        return gradients[0] if len(gradients) == 1 else tuple(gradients)

    def batched(self, info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        """`torch.vmap`: one call per element of the batch."""
        count = len(self.kind.operands)
        operands = [x if d is None else x.movedim(d, 0) for x, d in zip(arguments[:count], in_dims, strict=False)]
        each = [
            [x if d is None else x[i] for x, d in zip(operands, in_dims, strict=False)] for i in range(info.batch_size)
        ]
        results = [self.function(*own, *arguments[count:]) for own in each]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    def packed(self, results: Sequence[Any]) -> Any:
        """One result as itself, several as a tuple."""
        return results[0] if len(results) == 1 else tuple(results)


Kinds = tuple[Tensor, ...]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _traced() -> bool:
    """Whether a mode, a transform, or autocast sees calls, which must be those of the operator."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return (
        bool(modes) or torch._C._is_any_autocast_enabled() or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _kinds(operands: Sequence[torch.Tensor]) -> Kinds:
    """The types of operands, whose memory order does not matter here."""
    return tuple(Tensor(tuple(map(int, x.shape)), types.tensor(x).dtype) for x in operands)


def _graph(kinds: Kinds) -> tuple[Graph, list[Value]]:
    graph = Graph()
    return graph, [graph.input(f"x{i}", kind) for i, kind in enumerate(kinds)]


@functools.lru_cache(maxsize=1024)
def _forward(op: Operator, kinds: Kinds) -> tuple[EagerGraph, bool]:
    """What an operator lowers to, and whether PyTorch's derivatives of that are the operator's."""
    graph, values = _graph(kinds)
    graph.output(*graph.emit(op, *values))
    result = EagerGraph(graph)
    return result, result.native and derived(op, kinds)


@functools.lru_cache(maxsize=1024)
def _derivative(
    op: Operator, kinds: Kinds, given: tuple[int, ...], wanted: tuple[bool, ...]
) -> tuple[EagerGraph, tuple[bool, ...]]:
    """The gradients of the wanted operands as a graph of operands and given cotangents; which of them there are."""
    graph, values = _graph(kinds)
    results = graph.emit(op, *values)
    seeds = {results[i].name: graph.input(f"g{i}", results[i].tensor) for i in given}
    names = [v.name for v, w in zip(values, wanted, strict=True) if w]
    found = differentiate(graph, seeds, names) if seeds and names else {}
    graph.output(*(v for v in found.values() if v is not None))
    return EagerGraph(without_dead_code(graph)), tuple(found.get(v.name) is not None for v in values)


def _torch_size(size: Dim, symbols: Mapping[Dim, Any]) -> Any:
    """A size in PyTorch's symbols."""
    if isinstance(size, int) or size in symbols:
        return symbols.get(size, size)
    names = sorted(size.free_symbols, key=str)
    unknown = [str(n) for n in names if n not in symbols]
    if unknown:
        raise Invalid(f"the size {size} of a result is over {', '.join(unknown)}, which is no operand's size")
    return sympy.lambdify(names, size)(*(symbols[n] for n in names))
