"""Text: a readable form of a graph that is read back exactly.

    graph mlp(x: f32[8, s0] input, w: f32[16, s0] parameter "fc.weight", seen: i64[] buffer) {
      %permute: f32[s0, 16]@10 = permute(%w, dims=(1, 0))
      %matmul: f32[8, 16] = matmul(%x, %permute)  # fc model.py:12
      %kernel, %kernel_1: f32[8, 16], i64[] = kernel(x0=%matmul, x1=%seen) {
        %v0 = relu(%x0)
        %v1 = full(value=1, dtype=i64)
        %v2 = add(%x1, %v1)
        yield %v0, %v2 over %x1
      }
      lanes (2, 1.1, (("matmul", 1),), ())
      write seen <- %kernel_1
      return %kernel
    }

An attribute may be such a block, too: `backward=body(x, y, g) { ...; yield %v, None }`, written on several lines, or a
list of them: `cells=[body(x) { ... }, body(a, b) { ... }]`.
`lanes` says how operators may share cores, as in `graph.lanes`. Types of results may be left out; they are then
inferred. A comment after an operator is its origin: the module path and the source line. `grammar.py` says how
attribute values are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from daceml_train.errors import Invalid
from daceml_train.graph.grammar import Reader, show_type
from daceml_train.graph.graph import Graph, Input, Node, Role
from daceml_train.graph.lanes import Lanes
from daceml_train.graph.printer import MODULE, SOURCE, canonical_text, show, show_frame, show_operator
from daceml_train.ops.fallback import Body
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.operator import Operator, Origin, make
from daceml_train.tensor import Tensor

__all__ = ["canonical_text", "parse", "parse_frame", "parse_operator", "show", "show_frame", "show_operator"]


def parse(text: str) -> Graph:
    """Parse a graph. Raises `Invalid` naming the line where the text is malformed.

    Types in the text are checked against the operators; nothing in a text is ever executed.
    """
    read = Reader(text)
    try:
        graph = _graph(read)
        read.end()
        return graph
    except RecursionError:
        raise read.error("the text is nested too deeply") from None


def parse_operator(text: str) -> Operator:
    """Parse the output of `show_operator`. Raises `Invalid` naming the line."""
    read = Reader(text)
    try:
        op, inputs = _read_call(read)
        read.end()
    except RecursionError:
        raise read.error("the text is nested too deeply") from None
    if inputs:
        raise Invalid(f"the text of an operator has operands: {text!r}")
    return op


def parse_frame(lines: Sequence[str]) -> Graph:
    """Parse the output of `show_frame`: a graph's inputs, outputs and writes without operators. Raises `Invalid`."""
    read = Reader("\n".join(lines))
    graph = _read_signature(read)
    _read_end(read, graph, complete=False)
    read.end()
    return graph


def _graph(read: Reader) -> Graph:
    graph = _read_signature(read)
    while read.text not in ("return", "write", "lanes"):
        _node(read, graph)
    _read_end(read, graph, complete=True)
    return graph


def _read_signature(read: Reader) -> Graph:
    read.word("graph")
    graph = Graph(read.name())
    read.sign("(")
    while not read.take(")"):
        name = read.name()
        read.sign(":")
        tensor, role = read.type(), read.name()
        if role not in Role.__members__:
            raise read.error(f"{role!r} is not a role of an input: {', '.join(Role.__members__)}")
        entry = Input(tensor, Role[role], read.string() if read.kind == "string" else "")
        with read.located():
            graph.input(name, entry.tensor, entry.role, entry.path)
        if not read.take(","):
            read.sign(")")
            break
    read.sign("{")
    return graph


def _read_end(read: Reader, graph: Graph, complete: bool) -> None:
    """Read writes and outputs; with `complete`, the arrays must be defined."""

    def result() -> str:
        line, name = read.line, read.array()
        if complete and name not in graph.tensors:
            raise read.error(f"%{name} is not defined", line)
        return name

    if read.take("lanes"):
        graph.lanes = _lanes(read, graph, complete)
    while read.take("write"):
        line, target = read.line, read.name()
        read.sign("<-")
        if target not in graph.inputs:
            raise read.error(f"{target!r} is written but is not an input", line)
        graph.writes[target] = result()
    read.word("return")
    while read.text == "%":
        graph.outputs.append(result())
        if not read.take(","):
            break
    read.sign("}")


def _lanes(read: Reader, graph: Graph, complete: bool) -> Lanes:
    line = read.line
    with read.located(line):
        most, memory, threads, alone = read.value()
        lanes = Lanes(int(most), float(memory), tuple((str(name), int(count)) for name, count in threads), tuple(alone))
    for name in (*(name for name, _ in lanes.threads), *lanes.alone):
        if complete and name not in graph.tensors:
            raise read.error(f"%{name} is not defined", line)
    return lanes


def _node(read: Reader, graph: Graph) -> None:
    line = read.line
    outputs, types = _read_left(read)
    op, inputs = _read_call(read)
    origin = _read_origin(read.comment)
    with read.located(line):
        for name in inputs:
            if name not in graph.tensors:
                raise Invalid(f"{op.label} reads %{name}, which is not defined above")
        results = list(op.infer(*(graph.tensors[i] for i in inputs)))
        if len(results) != len(outputs):
            raise Invalid(f"{op.label} produces {len(results)} arrays, not {len(outputs)}")
        if types and [show_type(t) for t in types] != [show_type(t) for t in results]:
            shown, expected = (", ".join(map(show_type, t)) for t in (types, results))
            raise Invalid(f"{op.label} produces {expected}, not {shown}")
        for name, tensor in zip(outputs, results, strict=True):
            if name in graph.tensors:
                raise Invalid(f"%{name} is written twice")
            graph.tensors[name] = tensor
    graph.nodes.append(Node(op, inputs, outputs, origin))


def _read_left(read: Reader) -> tuple[tuple[str, ...], list[Tensor]]:
    outputs: list[str] = []
    types: list[Tensor] = []
    while read.text == "%":
        outputs.append(read.array())
        if not read.take(","):
            break
    if outputs:
        if read.take(":"):
            types.append(read.type())
            while read.take(","):
                types.append(read.type())
        read.sign("=")
    return tuple(outputs), types


def _read_call(read: Reader) -> tuple[Operator, tuple[str, ...]]:
    line, name = read.line, read.name()
    read.sign("(")
    if name == Kernel.name:
        return _read_kernel(read)
    inputs: list[str] = []
    attributes: dict[str, Any] = {}
    while not read.take(")"):
        if read.text == "%":
            if attributes:
                raise read.error("operands must precede attributes")
            inputs.append(read.array())
        else:
            key = read.name()
            read.sign("=")
            if key in attributes:
                raise read.error(f"attribute {key!r} is given twice")
            attributes[key] = _read_attribute(read)
        if not read.take(","):
            read.sign(")")
            break
    with read.located(line):
        return make(name, **attributes), tuple(inputs)


def _read_attribute(read: Reader) -> Any:
    if read.take("body"):
        return _read_body(read)
    if not read.take("["):
        return read.value()
    bodies: list[Body] = []
    while not read.take("]"):
        read.word("body")
        bodies.append(_read_body(read))
        if not read.take(","):
            read.sign("]")
            break
    return tuple(bodies)


def _read_kernel(read: Reader) -> tuple[Kernel, tuple[str, ...]]:
    arguments, inputs = _read_arguments(read)
    comment = read.comment
    statements = _read_statements(read)
    yields: list[str] = []
    updates: list[tuple[int, int]] = []
    while read.text == "%":
        yields.append(read.array())
        if read.take("over"):
            line, target = read.line, read.array()
            if target not in arguments:
                raise read.error(f"%{target} is not an argument of the kernel", line)
            updates.append((len(yields) - 1, arguments.index(target)))
        if not read.take(","):
            break
    read.sign("}")
    read.comment = comment
    return Kernel(tuple(arguments), statements, tuple(yields), tuple(updates)), tuple(inputs)


def _read_body(read: Reader) -> Body:
    read.sign("(")
    arguments, inputs = _read_arguments(read)
    if inputs:
        raise read.error("a body has no operands")
    statements = _read_statements(read)
    yields: list[str | None] = []
    while read.text != "}":
        yields.append(None if read.take("None") else read.array())
        if not read.take(","):
            break
    read.sign("}")
    return Body(tuple(arguments), statements, tuple(yields))


def _read_arguments(read: Reader) -> tuple[list[str], list[str]]:
    """Read names of arguments and, if present, operands, up to `{`."""
    arguments: list[str] = []
    inputs: list[str] = []
    while not read.take(")"):
        arguments.append(read.name())
        if read.take("="):
            inputs.append(read.array())
        if not read.take(","):
            read.sign(")")
            break
    if inputs and len(inputs) != len(arguments):
        raise read.error("either every argument has an operand, or none has")
    read.sign("{")
    return arguments, inputs


def _read_statements(read: Reader) -> tuple[Statement, ...]:
    """Read the statements of a block, and the word `yield` after them."""
    statements: list[Statement] = []
    while not read.take("yield"):
        line = read.line
        outputs, types = _read_left(read)
        if types:
            raise read.error("a body has no types", line)
        op, operands = _read_call(read)
        statements.append(Statement(op, operands, outputs))
    return tuple(statements)


def _read_origin(comment: str) -> Origin:
    quoted = re.fullmatch(r"""("(?:[^"\\]|\\.)*") ("(?:[^"\\]|\\.)*")""", comment)
    if quoted:
        try:
            return Origin(json.loads(quoted[1]), json.loads(quoted[2]))
        except ValueError:
            return Origin()
    words = comment.split(" ")
    source = words.pop() if SOURCE.fullmatch(words[-1]) else ""
    if words and (len(words) > 1 or not MODULE.fullmatch(words[0])):
        return Origin()  # a comment that is no origin
    return Origin(words[0] if words else "", source)
