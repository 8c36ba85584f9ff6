"""CompressSaved: arrays saved for the backward pass are stored in a smaller type."""

from __future__ import annotations

from dataclasses import dataclass, replace

from daceml_train.analysis.aliases import is_alias
from daceml_train.analysis.reachability import ancestors
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.elementwise import Cast, Full, Iota
from daceml_train.ops.kernel import Kernel, Statement, canonical
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Pass, without_dead_code
from daceml_train.tensor import DType, hint
from daceml_train.transformations.global_movement.scalar_updates import as_kernel

STORED = {"bfloat16": DType.bfloat16, "float16": DType.float16}
"""Types in which arrays can be saved."""

_ORDER = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
"""Comparisons. Of a rounded number with one that is not rounded, their result is any."""


@dataclass(frozen=True)
class CompressSaved(Pass):
    """Save arrays for the backward pass in a 16-bit type and convert them back where it reads them.

        x -> [f] -> a -> [g] -> y, ..., a, dy -> [h] -> da
            =>     x -> [f] -> a -> [g] -> y, a -> [cast] -> k, ..., k -> [cast] -> a', a', dy -> [h] -> da

    No built-in pipeline contains this pass, since it changes gradients. The forward pass, and with it the loss of a
    step, is unchanged to the bit. The relative error of a saved number is at most 2^-8 in `bfloat16`, which has the
    range of float32, and at most 2^-11 in `float16`, where numbers above 65504 become infinite and those below 6e-5
    lose digits. So the error of a gradient that is linear in saved values, such as that of a weight, is at most that
    share of the sum of its terms' magnitudes. The pass converts float32 arrays of at least `min_bytes`, but none that
    the backward pass compares with other arrays, as the gradient of a maximum does. It runs after the
    fusion level, whose kernels absorb the casts; library calls read float32, so the whole array is converted back for
    them, briefly. It works on whole training steps: under `optimize`, the saved arrays are chosen before there are
    kernels.
    """

    level = "fusion"
    dtype: str = "bfloat16"
    min_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        if self.dtype not in STORED:
            raise Invalid(f"compress_saved stores in {' or '.join(STORED)}, given {self.dtype!r}")

    def run(self, graph: Graph) -> Graph:
        roles = {graph.inputs[name].role for name in graph.writes if name in graph.inputs}
        if Role.parameter not in roles or graph.kept or not graph.outputs:
            return graph  # no whole step
        early = of_loss(graph)
        kept = self.kept(graph, early)
        kept -= _compared(graph, early, kept)
        return _Stored(graph, early, kept, STORED[self.dtype]).run() if kept else graph

    def kept(self, graph: Graph, early: set[str]) -> set[str]:
        """The arrays that the forward pass produces and the backward pass reads, also through aliases."""
        source: dict[str, str] = {}
        found: set[str] = set()
        for node in graph.nodes:
            if early.isdisjoint(node.outputs):
                found.update(source.get(name, "") for name in node.inputs)
            elif is_alias(node.op):
                source[node.outputs[0]] = source.get(node.inputs[0], "")
            else:
                source.update((name, self.fitting(graph, node, name)) for name in node.outputs)
        return found - {""}

    def fitting(self, graph: Graph, node: Node, name: str) -> str:
        """The array, if it is one to be stored in another type, else an empty string."""
        tensor = graph.tensors[name]
        constant = isinstance(node.op, Full | Iota)
        return name if tensor.dtype is DType.float32 and hint(tensor.bytes) >= self.min_bytes and not constant else ""


def of_loss(graph: Graph) -> set[str]:
    """The forward pass: what the loss (the first output) is computed from, and what is produced along with it."""
    return ancestors(graph.nodes, graph.outputs[:1])


def _compared(graph: Graph, early: set[str], kept: set[str]) -> set[str]:
    """Those of `kept` that the backward pass compares with what is no constant, also after elementwise operators."""
    none: frozenset[str] = frozenset()
    read = {name: frozenset((name,)) for name in kept}
    """Per array, those of `kept` that it is computed from elementwise."""
    constant = {name for node in graph.nodes if not node.inputs for name in node.outputs}
    found: set[str] = set()
    for node in graph.nodes:
        if is_alias(node.op):
            read[node.outputs[0]] = read.get(node.inputs[0], none)
            if node.inputs[0] in constant:
                constant.add(node.outputs[0])
            continue
        kernel = as_kernel(node)
        if kernel is None or not early.isdisjoint(node.outputs):
            continue
        pairs = list(zip(kernel.arguments, node.inputs, strict=True))
        values = {argument: read.get(name, none) for argument, name in pairs}
        fixed = {argument for argument, name in pairs if name in constant}
        for s in kernel.statements:
            sources = none.union(*(values[i] for i in s.inputs))
            if s.op.label in _ORDER and fixed.isdisjoint(s.inputs):
                found |= sources
            if fixed.issuperset(s.inputs):
                fixed.update(s.outputs)
            values.update((o, sources) for o in s.outputs)
        read.update((n, values[y]) for n, y in zip(node.outputs, kernel.yields, strict=True))
    return found


def plain(node: Node) -> Kernel | None:
    """The node as a kernel with distinct arguments, if it is a kernel or a single elementwise operator."""
    kernel = as_kernel(node)
    return kernel if kernel is not None and len(set(kernel.arguments)) == len(kernel.arguments) else None


class _Stored:
    """The graph in which nodes that are not `early` read `kept` arrays through another type."""

    def __init__(self, graph: Graph, early: set[str], kept: set[str], dtype: DType) -> None:
        self.graph, self.early, self.kept, self.dtype = graph, early, kept, dtype
        self.producers = graph.producers()
        self.other = graph.empty()
        self.now = {name: self.other.value(name) for name in graph.inputs}
        self.small: dict[str, Value] = {}
        """Array, or alias of one, that the backward pass reads -> its saved form."""
        self.wide: dict[str, Value] = {}
        """... -> the saved form converted back."""

    def run(self) -> Graph:
        """The graph."""
        for node in self.graph.nodes:
            with self.other.at(node.origin):
                if self.early.isdisjoint(node.outputs):
                    self.late(node)
                else:
                    self.forward(node)
        self.other.applied = self.graph.applied + len(self.kept)
        return without_dead_code(self.graph.finish(self.other, {old: v.name for old, v in self.now.items()}))

    def forward(self, node: Node) -> None:
        """Copy a node of the forward pass, which also produces the arrays to save."""
        inputs = tuple(self.now[i].name for i in node.inputs)
        stored = [name for name in node.outputs if name in self.kept]
        kernel = plain(node) if stored else None
        if kernel is None:
            self.append(node, node.op, inputs)
            self.small.update((name, self.now[name].cast(self.dtype)) for name in stored)
            return
        results = [kernel.yields[node.outputs.index(name)] for name in stored]
        casts = [Statement(Cast(self.dtype), (value,), (f"stored{k}",)) for k, value in enumerate(results)]
        yields = (*kernel.yields, *(cast.outputs[0] for cast in casts))
        op, _ = canonical(kernel.arguments, (*kernel.statements, *casts), yields)
        self.append(node, replace(op, updates=kernel.updates), inputs, stored)

    def append(self, node: Node, op: object, inputs: tuple[str, ...], stored: list[str] | None = None) -> None:
        """Add a node under its old names, followed by `stored` results in the other type."""
        names = [name if name not in self.other.tensors else self.other.fresh(name) for name in node.outputs]
        more = [self.other.fresh(f"{name}_stored") for name in stored or ()]
        results = self.other.append(op, inputs, [*names, *more], node.origin)  # type: ignore[arg-type]
        self.now.update(zip(node.outputs, results, strict=False))
        self.small.update(zip(stored or (), results[len(node.outputs) :], strict=True))

    def late(self, node: Node) -> None:
        """Copy a node of the backward pass: a kernel converts its operands itself, others read converted arrays."""
        small = [self.waiting(name) for name in node.inputs]
        if is_alias(node.op) and small[0] is not None:  # recreated in the other type where it is read
            if node.outputs[0] in self.graph.results:
                self.now[node.outputs[0]] = self.brought(node.outputs[0])
            return
        kernel = plain(node) if any(small) else None
        if kernel is None:
            inputs = tuple(self.brought(name).name for name in node.inputs)
            self.append(node, node.op, inputs)
            return
        widened = {a: f"{a}_wide" for a, value in zip(kernel.arguments, small, strict=True) if value is not None}
        casts = [Statement(Cast(DType.float32), (a,), (wide,)) for a, wide in widened.items()]
        body = [replace(s, inputs=tuple(widened.get(i, i) for i in s.inputs)) for s in kernel.statements]
        yields = tuple(widened.get(y, y) for y in kernel.yields)
        op, _ = canonical(kernel.arguments, (*casts, *body), yields)
        given = (value or self.now[name] for name, value in zip(node.inputs, small, strict=True))
        self.append(node, replace(op, updates=kernel.updates), tuple(value.name for value in given))

    def waiting(self, name: str) -> Value | None:
        """The saved form of an array, if it has one."""
        node = self.producers.get(name)
        if name not in self.small and node is not None and is_alias(node.op):
            source = self.waiting(node.inputs[0])
            if source is not None:
                self.small[name] = source.apply(node.op)
        return self.small.get(name)

    def brought(self, name: str) -> Value:
        """An array in its original type, as the backward pass reads it."""
        if name not in self.wide:
            small = self.waiting(name)
            if small is None:
                return self.now[name]
            self.wide[name] = small.cast(DType.float32)
        return self.wide[name]
