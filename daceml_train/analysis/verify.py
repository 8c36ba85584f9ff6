"""Verify: the invariants of a graph between passes. The first violation raises `Invalid` naming the node."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import sympy

from daceml_train.analysis.aliases import is_alias, memories, readers_of_memory, roots
from daceml_train.analysis.chunks import chunks_of, is_chunked, readers_of, update_chain_of
from daceml_train.analysis.concat_aliases import concat_alias
from daceml_train.analysis.sizes import derivation, symbols_of
from daceml_train.errors import DacemlError, Invalid
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.control import ControlFlow
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.movement import Concat
from daceml_train.ops.operator import Operator
from daceml_train.tensor import Tensor


def verify(graph: Graph) -> None:
    """Check that `graph` is well formed, in time linear in its size.

    Every array is written once, before it is read; its type is the one that its operator infers; sizes derive from
    inputs; outputs and writes exist and fit; operators have a lowering or a reference; kernels' bodies are well formed
    and update in place only arrays that have no later reader.
    """
    _inputs(graph)
    _nodes(graph)
    _results(graph)
    _sizes(graph)
    if any(node.op.updates for node in graph.nodes):
        _updates(graph)
    if any(isinstance(node.op, Concat) and node.op.placed for node in graph.nodes):
        _placed(graph)
    if is_chunked(graph):
        _in_parts(graph)


def _broken(node: Node, message: str) -> Invalid:
    return Invalid(f"{node}: {message}", where=str(node.origin))


def _inputs(graph: Graph) -> None:
    for name, entry in graph.inputs.items():
        recorded = graph.tensors.get(name)
        if recorded != entry.tensor:
            raise Invalid(f"input {name!r} is declared as {entry.tensor} but recorded as {recorded}")


def _nodes(graph: Graph) -> None:
    defined = set(graph.inputs)
    for node in graph.nodes:
        for name in node.inputs:
            if name not in defined:
                later = any(name in other.outputs for other in graph.nodes)
                raise _broken(node, f"it reads %{name}, which {'a later' if later else 'no'} node produces")
        _operator(node)
        try:
            inferred = _infer(node.op, tuple(graph.tensors[i] for i in node.inputs))
        except KeyError as error:
            raise _broken(node, f"no type is recorded for %{error.args[0]}") from None
        except DacemlError as error:
            raise _broken(node, error.message) from error
        if len(inferred) != len(node.outputs):
            raise _broken(node, f"it produces {len(inferred)} arrays but names {len(node.outputs)}")
        for name, tensor in zip(node.outputs, inferred, strict=True):
            if name in defined:
                raise _broken(node, f"%{name} is written a second time")
            if graph.tensors.get(name) != tensor:
                raise _broken(node, f"%{name} is recorded as {graph.tensors.get(name)}, the operator produces {tensor}")
            defined.add(name)
    for name in graph.tensors.keys() - defined:
        raise Invalid(f"%{name} is recorded as {graph.tensors[name]} but is neither an input nor produced by a node")


def _infer(op: Operator, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`op.infer`, cached: a model's repeated layers and successive passes ask for the same types."""
    try:
        return _remembered(op, operands)
    except TypeError:  # an attribute that cannot be hashed; any other TypeError is raised again below
        return op.infer(*operands)


@functools.lru_cache(maxsize=1 << 12)
def _remembered(op: Operator, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return op.infer(*operands)


def _operator(node: Node) -> None:
    if isinstance(node.op, Kernel):
        _kernel(node, node.op)
    elif not isinstance(node.op, ControlFlow) and not _has_meaning(type(node.op)):
        raise _broken(node, f"{node.op.label} has neither a lowering nor a reference")


def _has_meaning(kind: type[Operator]) -> bool:
    return kind.lower is not Operator.lower or kind.evaluate is not Operator.evaluate


def _kernel(node: Node, kernel: Kernel) -> None:
    if len(node.inputs) != len(kernel.arguments):
        raise _broken(node, f"the kernel has {len(kernel.arguments)} arguments and {len(node.inputs)} operands")
    known = set(kernel.arguments)
    if len(known) != len(kernel.arguments):
        raise _broken(node, "two arguments of the kernel have one name")
    for statement in kernel.statements:
        for name in statement.inputs:
            if name not in known:
                raise _broken(node, f"in its body, {statement} reads {name}, which nothing before it produces")
        for name in statement.outputs:
            if name in known:
                raise _broken(node, f"in its body, {statement} writes {name} a second time")
            known.add(name)
        if statement.op.is_composite or isinstance(statement.op, Kernel):
            raise _broken(node, f"in its body, {statement} is not a leaf")
    for name in kernel.yields:
        if name not in known:
            raise _broken(node, f"the kernel yields {name}, which its body does not produce")


def _results(graph: Graph) -> None:
    for name in graph.outputs:
        if name not in graph.tensors:
            raise Invalid(f"graph {graph.name!r} returns %{name}, which does not exist")
    for target, name in graph.writes.items():
        if target not in graph.inputs:
            raise Invalid(f"graph {graph.name!r} writes {target!r}, which is not an input")
        if name not in graph.tensors:
            raise Invalid(f"graph {graph.name!r} writes %{name} to {target!r}, but %{name} does not exist")
        expected, given = graph.inputs[target].tensor, graph.tensors[name]
        if (expected.shape, expected.dtype) != (given.shape, given.dtype):
            raise Invalid(f"graph {graph.name!r} writes %{name}, {given}, to {target!r}, {expected}")


def _sizes(graph: Graph) -> None:
    derived = {step.symbol for step in derivation(graph.inputs)}
    for name, entry in graph.inputs.items():
        for symbol in entry.tensor.symbols - derived:
            raise Invalid(f"size {symbol} of input {name!r}, {entry.tensor}, does not follow from the inputs' shapes")
    for node in graph.nodes:
        for symbol in _symbols(node.op):
            if symbol not in derived:
                raise _broken(node, f"size {symbol} occurs in no input")


def _symbols(op: Operator) -> Sequence[sympy.Symbol]:
    try:
        return _remembered_symbols(op)
    except TypeError:  # an attribute that cannot be hashed
        return tuple(symbols_of(op))


@functools.lru_cache(maxsize=1 << 10)
def _remembered_symbols(op: Operator) -> tuple[sympy.Symbol, ...]:
    return tuple(set(symbols_of(op)))


def _placed(graph: Graph) -> None:
    """An in-place operand is the result of a kernel or concatenation and lies in no other concatenation."""
    producers, visible = graph.producers(), set(graph.results)
    root = roots(graph)
    seen = {root[name] for name in visible}
    for node in graph.nodes:
        for position in node.op.placed if isinstance(node.op, Concat) else ():
            name = root[node.inputs[position]]
            producer = producers.get(name)
            if concat_alias(graph, producers, node, position) is None:
                raise _broken(node, f"it has its operand {position} in place, for which no strides exist")
            if (
                producer is None
                or (producer.op.vendor and not isinstance(producer.op, Concat))
                or is_alias(producer.op)
            ):
                raise _broken(node, f"it has %{name} in place, which no kernel produces")
            if producer.outputs.index(name) in dict(producer.op.updates):
                raise _broken(node, f"it has %{name} in place, which is stored over an operand")
            if name in seen:
                raise _broken(node, f"it has %{name} in place, which lies elsewhere, too")
            seen.add(name)


def _in_parts(graph: Graph) -> None:
    """A chunked gradient is read by an update that can process a chunk of rows at a time."""
    readers, memory = readers_of(graph), memories(graph)
    for position, node in enumerate(graph.nodes):
        if chunks_of(node.op) > 1:
            chain = update_chain_of(graph, position, readers, memory)
            if isinstance(chain, str):
                raise _broken(node, f"it is computed in chunks, but {chain}")


def _updates(graph: Graph) -> None:
    """An in-place update overwrites its argument: nothing may read it, or an alias of it, afterward."""
    root = roots(graph)
    position = {name: readers[-1] for name, readers in readers_of_memory(graph, root).items()}
    last = {name: graph.nodes[index] for name, index in position.items()}
    visible = {root[name]: name for name in graph.results}
    for index, node in enumerate(graph.nodes):
        for result, argument in node.op.updates:
            if not (0 <= result < len(node.outputs) and 0 <= argument < len(node.inputs)):
                raise _broken(node, f"the update ({result}, {argument}) names no result or no argument")
            output, updated = node.outputs[result], node.inputs[argument]
            memory = root[updated]
            inner = memory not in graph.inputs
            if not inner and graph.writes.get(updated) != output:
                raise _broken(node, f"it updates %{updated} in place, but the graph does not write %{output} to it")
            if inner and graph.tensors[updated].bytes != graph.tensors[output].bytes:
                raise _broken(node, f"it updates %{updated} in place with %{output}, which has another size")
            if sum(root[name] == memory for name in node.inputs) > 1:
                raise _broken(node, f"it updates %{updated} in place and reads it through another argument")
            if position[memory] > index:
                what = "array" if inner else "input"
                raise _broken(node, f"it updates %{updated} in place, but {last[memory]} reads that {what} later")
            if memory in visible:
                raise _broken(node, f"it updates %{updated} in place, but the result %{visible[memory]} is its memory")
