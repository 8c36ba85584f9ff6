"""One trace for any number of rows, from traces for a few numbers.

PyTorch's batching rules read sizes as plain integers, so a trace with symbols specializes. Traces for different
numbers of rows differ in those integers alone: each of them is linear in the number of rows, which the first two
traces tell and the third one confirms.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from daceml_train.errors import Unsupported

COUNTS = (7, 11, 13)


def for_any_count(traces: Mapping[int, fx.GraphModule]) -> fx.GraphModule:
    """The trace in which integers that depend on the number of rows are computed from the first operand's size.

    Raises `Unsupported` where the operators depend on the number of rows.
    """
    counts = list(traces)
    nodes = [list(trace.graph.nodes) for trace in traces.values()]
    if len({tuple((n.op, n.target if n.op == "call_function" else "") for n in each) for each in nodes}) != 1:
        raise Unsupported("the operators of a cell depend on the number of its rows")
    module = traces[counts[0]]
    graph = module.graph
    first = nodes[0][0]
    with graph.inserting_after(next(n for n in reversed(nodes[0]) if n.op == "placeholder")):
        rows = graph.call_function(torch.ops.aten.sym_size.int, (first, 0))
        rows.meta["val"] = counts[0]
    sizes: dict[tuple[int, int], fx.Node] = {(1, 0): rows}
    last = rows

    def size(values: list[Any]) -> Any:
        nonlocal last
        if len(set(values)) == 1:
            return values[0]
        factor, rest = divmod(values[1] - values[0], counts[1] - counts[0])
        offset = values[0] - factor * counts[0]
        if rest or any(v != factor * n + offset for v, n in zip(values, counts, strict=True)):
            raise Unsupported("a size within a cell is not linear in the number of its rows")
        key = (factor, offset)
        if key not in sizes:
            with graph.inserting_after(last):
                last = result = graph.call_function(operator.mul, (rows, factor))
                if offset:
                    with graph.inserting_after(result):
                        last = result = graph.call_function(operator.add, (result, offset))
            sizes[key] = result
        return sizes[key]

    def joined(values: list[Any]) -> Any:
        one = values[0]
        if isinstance(one, fx.Node):
            return one
        if isinstance(one, list | tuple):
            parts = [joined(list(each)) for each in zip(*values, strict=True)]
            return type(one)(parts) if type(one) in (list, tuple) else parts
        if isinstance(one, dict):
            return {name: joined([v[name] for v in values]) for name in one}
        if isinstance(one, int) and not isinstance(one, bool):
            return size(values)
        same = len(set(map(repr, values))) == 1  # NaN is NaN
        if isinstance(one, float | bool | str) and not same:
            raise Unsupported("a constant within a cell depends on the number of its rows")
        return one

    for same in zip(*nodes, strict=True):
        node = same[0]
        node.args = joined([n.args for n in same])
        node.kwargs = joined([n.kwargs for n in same])
    graph.lint()
    module.recompile()
    return module
