"""FuseMatmulEpilogue: elementwise operators on the result of a packed matmul run in the matmul's kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.matmul_epilogue import matmul_kernel
from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.elementwise import Cast, Elementwise
from daceml_train.ops.kernel import Kernel, Statement, canonical
from daceml_train.ops.operator import Value
from daceml_train.ops.packed import has_product
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, Tensor


@dataclass(frozen=True)
class FuseMatmulEpilogue(Rewrite):
    """Apply elementwise operators as a packed matmul's epilogue, while a tile of its result is in cache.

    x, p -> [packed matmul] -> t;  t, others -> [f] -> y     =>     x, p, others -> [packed matmul; f] -> y

    Every other operand has the result's layout, is one number per column, or is a scalar. Bytes: t is neither
    written nor read.
    """

    level = "layout"
    targets = ("cpu",)

    def run(self, graph: Graph) -> Graph:
        while (after := super().run(graph)) is not graph:  # an epilogue may be extended by the next operator
            graph = after
        return graph

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Kernel | Elementwise | Cast) or has_product(node.op):
            return None
        results = [name for name in dict.fromkeys(node.inputs) if (p := uses.producers.get(name)) and has_product(p.op)]
        fits = [name for name in results if uses.only_reader(name, node) and node.inputs.count(name) == 1]
        if not results:
            return None
        name = (fits or results)[0]
        return {"made": name, "matmul": uses.producers[name], "alone": bool(fits)}

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        yield match.bindings["alone"], f"%{match.bindings['made']} has another reader"
        yield len(match.root.outputs) == 1, f"{match.root.op.label} has {len(match.root.outputs)} results"
        yield not match.root.op.updates, f"{match.root.op.label} stores its result over an operand"
        tensors = match.uses.graph.tensors
        kernel, inputs = _joined(match.bindings["matmul"], match.root)
        try:
            matmul_kernel(kernel, [_layout(tensors[n]) for n in inputs], [_layout(tensors[match.root.outputs[0]])])
        except Refused as refusal:
            yield False, refusal.message

    def traffic(self, match: Match) -> Dim:
        return -2 * match.uses.bytes(match.bindings["made"])

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        kernel, inputs = _joined(match.bindings["matmul"], match.root)
        return builder.emit(kernel, *(values[name] for name in inputs))


def _kernel(node: Node) -> Kernel:
    """A node as a kernel."""
    if isinstance(node.op, Kernel):
        return node.op
    arguments = tuple(f"x{i}" for i in range(len(node.inputs)))
    results = tuple(f"v{i}" for i in range(len(node.outputs)))
    return Kernel(arguments, (Statement(node.op, arguments, results),), results)


def _joined(first: Node, second: Node) -> tuple[Kernel, tuple[str, ...]]:
    """The kernel that computes one node and then another, which reads its result, and its operands."""
    statements: list[Statement] = []
    seen: dict[str, str] = {}
    for number, node in enumerate((first, second)):
        kernel = _kernel(node)
        names = dict(zip(kernel.arguments, (seen.get(n, n) for n in node.inputs), strict=True))
        for statement in kernel.statements:
            names |= {name: f"{number}.{name}" for name in statement.outputs}
            inputs, outputs = (tuple(names[n] for n in group) for group in (statement.inputs, statement.outputs))
            statements.append(Statement(statement.op, inputs, outputs))
        seen |= dict(zip(node.outputs, (names[y] for y in kernel.yields), strict=True))
    operands = tuple(dict.fromkeys(n for n in (*first.inputs, *second.inputs) if n not in first.outputs))
    return canonical(operands, statements, [seen[second.outputs[0]]])[0], operands


def _layout(tensor: Tensor) -> Layout:
    return Layout(tensor.shape, tensor.strides, tensor.dtype)
