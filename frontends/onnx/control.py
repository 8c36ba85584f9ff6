"""The branches and loops of a model that become operators of the graph, and those that stay Python.

A branch or loop is captured if its body preserves shapes: then `torch.cond`, `scan` and `while_loop` support it, and so
do graphs. What changes shapes from step to step, produces sequences, or has data-dependent sizes stays Python's own
control flow, which unrolls or breaks the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
from onnx import numpy_helper

LONGEST = 1024
"""The maximum number of steps of a loop that data may end early: all of them run; those after the end do nothing."""

_SHAPED_BY_DATA = frozenset(["NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit", "RegexFullMatch"])
_SEQUENCES = ("Sequence", "Optional", "SplitToSequence", "ConcatFromSequence", "String")

Types = Mapping[str, onnx.TypeProto]


def chosen(
    node: onnx.NodeProto, types: Types, source: Sequence[str], known: Callable[[int], bool], value: Callable[[str], Any]
) -> str:
    """The name of the rule that captures a branch or loop; the operator's own if it stays Python.

    `source` are the lines generated for its bodies, `known(k)` says whether operand k is known to the host while a
    model is traced, `value` gives the value of a constant by name, None for others.
    """
    graphs = {a.name: a.g for a in node.attribute if a.HasField("g")}
    if any("as_host(" in line for line in source) or not all(map(_plain, graphs.values())):
        return str(node.op_type)
    match node.op_type:
        case "If" if not known(0) and _same_results(graphs["then_branch"], graphs["else_branch"], types):
            return "IfOnData"
        case "Scan" if _keeps(graphs["body"], 0, 0, _states(node), types):
            return "ScanInSteps"
        case "Loop":
            return _loop(node, graphs["body"], types, known, value)
    return str(node.op_type)


def _loop(
    node: onnx.NodeProto, body: onnx.GraphProto, types: Types, known: Callable[[int], bool], value: Callable[[str], Any]
) -> str:
    states = len(node.input) - 2
    if states < 1 or not _keeps(body, 2, 1, states, types):
        return "Loop"
    trips, go = (name or "" for name in (*node.input, "", "")[:2])
    endless = (not go or _is_true(value(go))) and _goes_on(body, value)
    if endless and trips and known(0):
        return "LoopInSteps"
    if len(node.output) > states:  # the stacked length depends on data
        return "Loop"
    steps = value(trips) if trips else None
    if steps is not None and 0 <= int(steps) <= LONGEST:
        return "LoopWithEnd"
    return "LoopOnData"


def _states(node: onnx.NodeProto) -> int:
    inputs = next(a.i for a in node.attribute if a.name == "num_scan_inputs")
    return len(node.input) - int(inputs)


def _is_true(value: Any) -> bool:
    return value is not None and bool(value)


def _goes_on(body: onnx.GraphProto, value: Callable[[str], Any]) -> bool:
    """Whether a body always requests another step: its condition is true, or the one that it receives."""
    producers = {name: node for node in body.node for name in node.output}
    initializers = {tensor.name: tensor for tensor in body.initializer}
    name = body.output[0].name
    while (producer := producers.get(name)) is not None and producer.op_type in ("Identity", "Cast") and producer.input:
        name = producer.input[0]
    if name == body.input[1].name:
        return True
    if name in initializers:
        return bool(numpy_helper.to_array(initializers[name]).all())
    if producer is not None and producer.op_type == "Constant" and producer.attribute[0].name == "value":
        return bool(numpy_helper.to_array(producer.attribute[0].t).all())
    return producer is None and _is_true(value(name))


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _plain(graph: onnx.GraphProto) -> bool:
    return not any(n.op_type in _SHAPED_BY_DATA or n.op_type.startswith(_SEQUENCES) for n in _nodes(graph))


def _type(value: onnx.ValueInfoProto, types: Types) -> onnx.TypeProto:
    declared = value.type
    if declared.HasField("tensor_type") and declared.tensor_type.HasField("shape"):
        return declared
    return types.get(value.name, declared)


def _same(a: onnx.TypeProto, b: onnx.TypeProto) -> bool:
    """Whether two values certainly have one element type and the same sizes."""
    if not (a.HasField("tensor_type") and b.HasField("tensor_type")):
        return False
    one, other = a.tensor_type, b.tensor_type
    if not one.elem_type or one.elem_type != other.elem_type or not (one.HasField("shape") and other.HasField("shape")):
        return False
    dims = list(one.shape.dim), list(other.shape.dim)
    return len(dims[0]) == len(dims[1]) and all(
        (x.HasField("dim_value") and y.HasField("dim_value") and x.dim_value == y.dim_value)
        or (bool(x.dim_param) and x.dim_param == y.dim_param)
        for x, y in zip(*dims, strict=True)
    )


def _same_results(a: onnx.GraphProto, b: onnx.GraphProto, types: Types) -> bool:
    pairs = zip(a.output, b.output, strict=False)
    return len(a.output) == len(b.output) and all(_same(_type(x, types), _type(y, types)) for x, y in pairs)


def _keeps(body: onnx.GraphProto, first_input: int, first_output: int, states: int, types: Types) -> bool:
    """Whether the states of a body keep their types."""
    before, after = body.input[first_input:][:states], body.output[first_output:][:states]
    return len(before) == len(after) == states > 0 and all(
        _same(_type(x, types), _type(y, types)) for x, y in zip(before, after, strict=True)
    )
