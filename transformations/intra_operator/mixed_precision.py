"""MixedPrecision: matmuls and convolutions in bfloat16, everything else in float32."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from daceml_train.analysis.aliases import is_alias
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul, MatmulAdd
from daceml_train.ops.convolution import Geometry
from daceml_train.ops.elementwise import Cast
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Measured, Pass, without_dead_code
from daceml_train.tensor import DType, hint

NARROW, WIDE = DType.bfloat16, DType.float32


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Multiply and convolve in bfloat16; parameters, their update, sums and everything else stay in float32.

        x, w -> [matmul] -> y     =>     x -> [cast] -> x', w -> [cast] -> w', x', w' -> [matmul] -> y' -> [cast] -> y

    Only the pipeline `MIXED_PRECISION` contains this pass, since it changes numbers, as `torch.autocast` does
    (Micikevicius et al., "Mixed Precision Training", 2018): the relative error of an operand is at most 2^-9.
    Parameters are the master copy in float32; a matmul produces the gradients of weights in bfloat16, which are
    accumulated and applied in float32. bfloat16 has the range of float32, so the loss needs no scaling. An array that
    a matmul reads is stored in bfloat16 only, and other readers see it rounded, so it takes half the memory.
    Exceptions are sums, since rounding in each block of a residual stream would accumulate, and results of the graph.
    Matmuls of fewer than `least` multiplications and grouped convolutions stay in float32. The pass is the last of its
    level; fusion then absorbs the casts.
    """

    level = "intra_operator"
    least: int = 1 << 16

    def run(self, graph: Graph) -> Graph:
        return narrowed(graph, chosen) if (chosen := self.chosen(graph)) else graph

    def matches(self, graph: Graph) -> list[Measured]:
        """Every matmul and convolution that is large enough, each as a match of its own."""
        chosen = self.chosen(graph)
        slow = len(chosen) > 16
        return [Measured(self, graph, str(n), n.outputs, partial(narrowed, graph, [n]), slow) for n in chosen]

    def chosen(self, graph: Graph) -> list[Node]:
        """The operators that are large enough."""
        return [node for node in graph.nodes if self.fits(graph, node)]

    def fits(self, graph: Graph, node: Node) -> bool:
        """Whether an operator is a large enough float32 matmul or convolution."""
        op = node.op
        if not isinstance(op, Matmul | MatmulAdd | Geometry) or (isinstance(op, Geometry) and op.groups > 1):
            return False
        types = [graph.tensors[name] for name in node.inputs]
        return all(t.dtype is WIDE for t in types) and hint(op.flops(*types)) >= 2 * self.least


def narrowed(graph: Graph, chosen: Collection[Node]) -> Graph:
    """The graph with these matmuls in bfloat16."""
    return _Narrowed(graph, chosen).run()


def factors(graph: Graph, node: Node) -> tuple[str, ...]:
    """The operands that a matmul reads in bfloat16: all except a matrix that is added to it."""
    added = isinstance(node.op, MatmulAdd) and graph.tensors[node.inputs[0]].rank > 1
    return node.inputs[1:] if added else node.inputs


class _Narrowed:
    def __init__(self, graph: Graph, chosen: Collection[Node]) -> None:
        self.graph, self.count = graph, len(chosen)
        self.chosen = {id(node) for node in chosen}
        self.producers = graph.producers()
        self.wanted: set[str] = set()
        """Arrays that matmuls read, and the arrays that those are views of."""
        for node in reversed(graph.nodes):
            if id(node) in self.chosen:
                self.wanted.update(factors(graph, node))
            elif is_alias(node.op) and node.outputs[0] in self.wanted:
                self.wanted.add(node.inputs[0])
        self.other = graph.empty()
        self.values = {name: self.other.value(name) for name in graph.inputs}
        """Arrays as float32 operators read them: rounded where they are stored in bfloat16."""
        self.exact: dict[str, Value] = {}
        """Wanted arrays as they were produced."""
        self.small: dict[str, Value] = {}

    def run(self) -> Graph:
        """The graph."""
        for node in self.graph.nodes:
            with self.other.at(node.origin):
                if id(node) in self.chosen:
                    self.product(node)
                else:
                    self.same(node)
        self.other.applied = self.graph.applied + self.count
        names = {old: value.name for old, value in (self.values | self.exact).items()}
        return without_dead_code(self.graph.finish(self.other, names))

    def same(self, node: Node) -> None:
        """Copy an operator; results that matmuls read are rounded, unless they are sums."""
        alias = is_alias(node.op)
        self.append(node, [self.values[name] for name in node.inputs])
        if alias and node.inputs[0] in self.exact:
            (name,) = node.outputs
            self.exact[name] = self.exact[node.inputs[0]].apply(node.op)
        elif not alias and node.op.label != "add":
            for name in self.wanted.intersection(node.outputs):
                self.round(name)

    def product(self, node: Node) -> None:
        """Emit a matmul in bfloat16; a matrix that is added to it is added in float32."""
        op, read = node.op, factors(self.graph, node)
        operands = [self.narrow(name) for name in read]
        if len(read) < len(node.inputs):
            (name,) = node.outputs
            matmul = operands[0].apply(Matmul(), operands[1]).cast(WIDE)
            self.values[name] = matmul + self.values[node.inputs[0]]
            if name in self.wanted:
                self.round(name)
            return
        names = [self.other.fresh(f"{name}_{NARROW.short}") for name in node.outputs]
        for name, value in zip(
            node.outputs, self.other.append(op, tuple(v.name for v in operands), names, node.origin), strict=True
        ):
            self.small[name] = value
            (self.values[name],) = self.other.append(Cast(WIDE), (value.name,), [self.free(name)], node.origin)

    def round(self, name: str) -> None:
        """Store an array in bfloat16; float32 readers see it rounded."""
        self.exact[name] = self.values[name]
        self.small[name] = self.values[name].cast(NARROW)
        self.values[name] = self.small[name].cast(WIDE)

    def narrow(self, name: str) -> Value:
        """An array in bfloat16: a view of its source's bfloat16 array, or an input's own copy."""
        if name not in self.small:
            node = self.producers.get(name)
            if node is not None and is_alias(node.op):
                self.small[name] = self.narrow(node.inputs[0]).apply(node.op)
            else:
                self.small[name] = self.values[name].cast(NARROW)
        return self.small[name]

    def append(self, node: Node, inputs: list[Value]) -> None:
        names = [self.free(name) for name in node.outputs]
        results = self.other.append(node.op, tuple(v.name for v in inputs), names, node.origin)
        self.values.update(zip(node.outputs, results, strict=True))

    def free(self, name: str) -> str:
        return name if name not in self.other.tensors else self.other.fresh(name)
