"""Details of one box: the arrays it reads and writes, the user's source lines, and its generated C++."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from daceml_train.errors import DacemlError
from daceml_train.exploration.views.tree import Item, Tree
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.leaves import leaves
from daceml_train.graph.printer import show_operator
from daceml_train.lowering.lower import lower
from daceml_train.lowering.program import CallLaunch, KernelLaunch
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.operator import Origin
from daceml_train.reporting.numbers import number

_PYTORCH = Path(torch.__file__).parent
AROUND = 3
"""Source lines shown before and after the box's own."""
ROWS = 40
"""The maximum number of listed arrays."""


class Sources:
    """The user's source files, by the base names that operators carry: those of a model's classes and functions.

    An operator's line is never one of PyTorch's own, so that those files do not count. A name that several of the files
    have is not known.
    """

    def __init__(self, model: object = None) -> None:
        self.files: dict[str, str] = {}
        modules: Iterable[object] = model.modules() if hasattr(model, "modules") else ()
        for kind in {type(m) for m in modules} | ({type(model)} if model is not None else set()):
            self._add(kind)

    def _add(self, kind: type) -> None:
        for function in (vars(kind).get("forward"), vars(kind).get("__init__"), vars(kind).get("__call__")):
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if code is not None and not Path(code.co_filename).is_relative_to(_PYTORCH):
                name = Path(code.co_filename).name
                if self.files.setdefault(name, code.co_filename) != code.co_filename:
                    self.files[name] = ""

    def lines(self, source: str) -> dict[str, Any] | None:
        """The lines around `model.py:12`, or None where the file is not known."""
        name, _, line = source.rpartition(":")
        if not line.isdigit() or not self.files.get(name):
            return None
        file, at = self.files[name], int(line)
        all_lines = linecache.getlines(file)
        if not 0 < at <= len(all_lines):
            return None
        first = max(1, at - AROUND)
        shown = [text.rstrip("\n") for text in all_lines[first - 1 : at + AROUND]]
        return {"file": file, "line": at, "first": first, "lines": shown}


def details(tree: Tree, item: Item, sizes: Mapping[str, int], sources: Sources) -> dict[str, Any]:
    """Everything that a panel shows of a box."""
    graph = tree.graph
    nodes = [graph.nodes[n] for n in item.nodes]
    outputs = {name for node in nodes for name in node.outputs}
    read = dict.fromkeys(name for node in nodes for name in node.inputs if name not in outputs)
    inside = {name for node in nodes for name in node.inputs}
    results, own = set(graph.results), set(item.nodes)
    readers = {name for place, node in enumerate(graph.nodes) if place not in own for name in node.inputs}
    written = [
        name for name in dict.fromkeys(o for n in nodes for o in n.outputs) if name in readers or name in results
    ]
    lines = list(dict.fromkeys(node.origin.source for node in nodes if node.origin.source))
    told: dict[str, Any] = {
        "key": item.key,
        "label": item.label,
        "kind": item.kind,
        "module": item.module,
        "phase": item.phase,
        "bytes": item.bytes,
        "flops": item.flops,
        "seconds": item.seconds,
        "operators": len(nodes),
        "reads": [_array(graph, name, sizes) for name in read][:ROWS],
        "writes": [_array(graph, name, sizes) for name in written or outputs - inside][:ROWS],
        "lines": lines[:ROWS],
        "source": next((found for line in lines if (found := sources.lines(line))), None),
    }
    if item.kind in ("operator", "statement"):
        (node,) = nodes
        told["text"] = str(node)
        told["operator"] = body_text(node) if isinstance(node.op, Kernel) else show_operator(node.op)
        told["code"] = True
    return told


def body_text(node: Node) -> str:
    """The statements of a kernel, one per line."""
    assert isinstance(node.op, Kernel)
    head = ", ".join(f"{a} = %{name}" for a, name in zip(node.op.arguments, node.inputs, strict=True))
    results = ", ".join(f"%{name} = {y}" for name, y in zip(node.outputs, node.op.yields, strict=True))
    return "\n".join([head, *map(str, node.op.statements), results])


def code_of(graph: Graph, node: Node) -> str:
    """The C++ generated for one operator, bodies of control flow included, or its library calls; or the reason why it
    cannot be lowered.
    """
    alone = Graph("alone")
    for name in dict.fromkeys(node.inputs):
        alone.input(name, graph.tensors[name])
    try:
        alone.append(node.op, node.inputs, node.outputs, Origin())
        alone.outputs = list(node.outputs)
        program = lower(leaves(alone).graph)
    except DacemlError as error:
        return f"// not compiled on its own: {error}"
    launches = [(part, launch) for part in program.all for launch in part.launches]
    calls = [f"// library call: {launch.target}" for _, launch in launches if isinstance(launch, CallLaunch)]
    used = dict.fromkeys(
        part.codes[launch.code].source for part, launch in launches if isinstance(launch, KernelLaunch)
    )
    return "\n\n".join([*calls, *used]) or "// nothing runs: the result is a view or a constant"


def _array(graph: Graph, name: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    tensor, entry = graph.tensors[name], graph.inputs.get(name)
    size = number(tensor.bytes, sizes)
    row = {"name": name, "type": str(tensor), "bytes": size if isinstance(size, int) else None}
    return row | ({"role": entry.role.value, "path": entry.path} if entry is not None else {})
