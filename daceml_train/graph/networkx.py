"""A graph as a `networkx.DiGraph`, for algorithms, drawings and files that are NetworkX's.

Nodes have the attributes `kind` ("input" or "operator"), `arrays` (what the node produces), `module` and `source` (the
user's module path and source line); operators also `label`, `operator` (the text with attributes) and `inputs`
(operands, in order), inputs `role` and, if the step writes them, `becomes`, the array that they hold afterwards. An
edge has `arrays`, the names that its reader takes from its producer, and `bytes`, the size of these arrays: an integer,
or an expression over size symbols. The graph's own attributes are its name, `outputs` and `writes`.
"""

from __future__ import annotations

from typing import Any

import networkx as nx

from daceml_train.graph.printer import Program, show_operator
from daceml_train.tensor import simplify


def to_networkx(graph: Program) -> nx.DiGraph:
    """The graph as NetworkX's: a node per operator and per input, an edge per pair of which one reads the other.

    An operator without results is called by its label and its position in the graph: `assert#12`.
    """
    result = nx.DiGraph(name=graph.name, outputs=tuple(graph.outputs), writes=dict(graph.writes))
    producer = {name: name for name in graph.inputs}
    for name, entry in graph.inputs.items():
        attributes: dict[str, Any] = {"kind": "input", "arrays": (name,), "role": entry.role.value}
        if name in graph.writes:
            attributes["becomes"] = graph.writes[name]
        result.add_node(name, module=entry.path, source="", **attributes)
    for position, node in enumerate(graph.nodes):
        key = node.outputs[0] if node.outputs else f"{node.op.label}#{position}"
        result.add_node(
            key,
            kind="operator",
            arrays=node.outputs,
            module=node.origin.module,
            source=node.origin.source,
            label=node.op.label,
            operator=show_operator(node.op),
            inputs=node.inputs,
        )
        producer.update(dict.fromkeys(node.outputs, key))
        read: dict[str, list[str]] = {}
        for name in dict.fromkeys(node.inputs):
            read.setdefault(producer[name], []).append(name)
        for source, names in read.items():
            size = simplify(sum(graph.tensors[name].bytes for name in names))
            result.add_edge(source, key, arrays=tuple(names), bytes=size)
    return result
