"""Printer: a graph as text; `text.py` describes the notation and reads it back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from daceml_train.graph.grammar import show_name, show_type, show_value
from daceml_train.graph.lanes import Lanes
from daceml_train.graph.node import Input, Node
from daceml_train.ops.fallback import Body
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.operator import Operator, Origin
from daceml_train.tensor import Tensor

WIDTH = 120
"""Line length beyond which the inputs of a graph are printed on separate lines."""
MODULE = re.compile(r"""[^\s:"]+""")
SOURCE = re.compile(r"""[^\s"]+:\d+""")
"""Module paths and source lines that an origin shows unquoted."""


class Program(Protocol):
    """The parts of a graph that the printer needs."""

    name: str
    inputs: dict[str, Input]
    nodes: list[Node]
    tensors: dict[str, Tensor]
    outputs: list[str]
    writes: dict[str, str]
    lanes: Lanes | None


def show(graph: Program) -> str:
    """The graph as text. Raises `Invalid` for an attribute that texts cannot show."""
    return "\n".join(_lines(graph, origins=True)) + "\n"


def canonical_text(graph: Program) -> str:
    """The graph as text without origins: equal for equal programs from any place in the user's source."""
    return "\n".join(_lines(graph, origins=False)) + "\n"


def show_operator(op: Operator) -> str:
    """An operator without operands: `reduce(kind="sum", dims=(0,))`."""
    return "\n".join(_call(op, (), "", ""))


def show_frame(graph: Program) -> list[str]:
    """The lines of the graph around its operators: signature, writes, results."""
    return [*_signature(graph), *_results(graph)]


def _lines(graph: Program, origins: bool) -> Iterator[str]:
    yield from _signature(graph)
    for node in graph.nodes:
        results = ", ".join("%" + show_name(o) for o in node.outputs)
        types = ", ".join(show_type(graph.tensors[o]) for o in node.outputs)
        start = f"{results}: {types} = " if node.outputs else ""
        origin = _origin(node.origin) if origins else ""
        yield from ("  " + line for line in _call(node.op, node.inputs, start, origin))
    yield from _results(graph)


def _signature(graph: Program) -> list[str]:
    inputs = []
    for name, entry in graph.inputs.items():
        path = f" {json.dumps(entry.path)}" if entry.path else ""
        inputs.append(f"{show_name(name)}: {show_type(entry.tensor)} {entry.role.value}{path}")
    line = f"graph {show_name(graph.name)}({', '.join(inputs)}) {{"
    if len(line) <= WIDTH:
        return [line]
    return [f"graph {show_name(graph.name)}(", *(f"    {i}," for i in inputs), ") {"]


def _results(graph: Program) -> Iterator[str]:
    if graph.lanes is not None:
        yield f"  lanes {show_value(graph.lanes.fields)}"
    for target, name in graph.writes.items():
        yield f"  write {show_name(target)} <- %{show_name(name)}"
    yield "  return " + ", ".join("%" + show_name(o) for o in graph.outputs) if graph.outputs else "  return"
    yield "}"


def _call(op: Operator, inputs: Sequence[str], start: str, origin: str) -> Iterator[str]:
    if isinstance(op, Kernel):
        updated = dict(op.updates)
        yields = [
            f"%{show_name(y)}" + (f" over %{show_name(op.arguments[updated[i]])}" if i in updated else "")
            for i, y in enumerate(op.yields)
        ]
        lines = list(_block("kernel", op.arguments, inputs, op.statements, yields))
        yield f"{start}{lines[0]}{origin}"
        yield from lines[1:]
        return
    items = ["%" + show_name(i) for i in inputs]
    items += [f"{key}={_attribute(value)}" for key, value in op.attributes().items()]
    yield from f"{start}{text_name(op)}({', '.join(items)}){origin}".split("\n")


def _attribute(value: Any) -> str:
    """An attribute value; a body is a block of several lines, and several bodies are a list."""
    if isinstance(value, tuple) and value and all(isinstance(item, Body) for item in value):
        return f"[{', '.join(map(_attribute, value))}]"
    if not isinstance(value, Body):
        return show_value(value)
    yields = ["None" if y is None else "%" + show_name(y) for y in value.yields]
    return "\n".join(_block("body", value.arguments, (), value.statements, yields))


def _block(
    word: str, arguments: Sequence[str], inputs: Sequence[str], statements: Sequence[Statement], yields: Sequence[str]
) -> Iterator[str]:
    """`word(arguments) { statements; yield ... }`, with the operand of each argument where there are `inputs`."""
    names = [show_name(a) for a in arguments]
    if inputs:
        names = [f"{a}=%{show_name(i)}" for a, i in zip(names, inputs, strict=True)]
    yield f"{word}({', '.join(names)}) {{"
    for statement in statements:
        results = ", ".join("%" + show_name(o) for o in statement.outputs)
        start = f"{results} = " if results else ""
        yield from ("  " + line for line in _call(statement.op, statement.inputs, start, ""))
    yield f"  yield {', '.join(yields)}".rstrip()
    yield "}"


def text_name(op: Operator) -> str:
    """The name under which `make` builds an operator: its class's, or its label if one class has many names."""
    return getattr(type(op), "name", None) or op.label


def _origin(origin: Origin) -> str:
    if origin == Origin():
        return ""
    plain = not origin.module or MODULE.fullmatch(origin.module)
    if plain and (not origin.source or SOURCE.fullmatch(origin.source)):
        return f"  # {origin}"
    return f"  # {json.dumps(origin.module)} {json.dumps(origin.source)}"
