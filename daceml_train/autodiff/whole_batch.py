"""The loss of a whole batch from those of its micro-batches (parts), derived from the graphs of both.

A loss is often a quotient of sums over rows, such as a mean over the tokens that are not padding. Its denominator
depends on data alone, so it is computed for the whole batch first and becomes an input of each part's program; the
parts' losses then add up to that of the batch. If a constant factor suffices, as for a mean over all rows, the graph is
unchanged. The rules of single operators are in `autodiff.row_rules`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from daceml_train.analysis.sizes import bind
from daceml_train.autodiff.row_rules import DIRECT, FIXED, Applied, Kind, Undecided, results, sources
from daceml_train.errors import BudgetInfeasible
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.elementwise import Full
from daceml_train.ops.loss import CrossEntropy, MSELoss, NLLLoss
from daceml_train.ops.operator import Operator, Value
from daceml_train.ops.reduction import Mean, wide
from daceml_train.tensor import Tensor, simplify

ADVICE = 'state how the loss reduces over the batch, as for gradient accumulation in PyTorch: reduction="mean" or "sum"'


@dataclass(frozen=True)
class Batch:
    """The graphs of a part and of the whole batch, with the values of their size symbols."""

    part: Graph
    whole: Graph
    part_sizes: Mapping[str, int]
    whole_sizes: Mapping[str, int]
    count: int
    varying: Collection[str]
    """Inputs of the part that are not data: trained parameters, mutable buffers, random numbers."""


@dataclass
class Split:
    """How the losses of the parts add up: each times `share`, or, if there is a `graph`, that graph's without a factor.

    `graph` has the additional inputs `denominators`; each is the value of the named array of `whole` on the whole
    batch.
    """

    share: float | None
    graph: Graph | None = None
    whole: Graph | None = None
    denominators: dict[str, str] = field(default_factory=dict)


def split_loss(batch: Batch) -> Split:
    """How the first output, the loss, of the parts adds up. Raises `BudgetInfeasible` with the reason and
    the user's line if that cannot be decided.
    """
    batch = replace(batch, part=quotients(batch.part), whole=quotients(batch.whole))
    walk = _Walk(batch)
    loss = walk.run()
    if loss.form == "open" or loss.form == "rows":
        why = loss.why or "it has a value for each row"
        raise BudgetInfeasible(
            f"micro-batches cannot tell the loss of a whole batch from its parts: {why}", advice=ADVICE
        )
    if loss.form == "fixed":
        loss = Kind("sum", None if loss.factor is None else loss.factor / batch.count)
    if loss.factor is not None:
        return Split(float(loss.factor))
    return Split(None, *walk.rewritten())


def quotients(graph: Graph) -> Graph:
    """The graph with means expressed as sums divided by counts."""
    other = graph.empty()
    now = {name: name for name in graph.inputs}
    for node in graph.nodes:
        inputs = tuple(now[i] for i in node.inputs)
        with other.at(node.origin):
            outputs = _quotient(other, node.op, [other.value(i) for i in inputs])
            outputs = other.append(node.op, inputs) if outputs is None else outputs
        now.update(zip(node.outputs, (value.name for value in outputs), strict=True))
    return graph.finish(other, now)


def _quotient(graph: Graph, op: Operator, operands: Sequence[Value]) -> Sequence[Value] | None:
    """The results of a mean or of a mean loss, so expressed; None for another operator."""
    match op:
        case CrossEntropy(reduction="mean") | NLLLoss(reduction="mean"):
            first, *more = graph.emit(dataclasses.replace(op, reduction="sum"), *operands)
            total = more[-1]
            return [(first.cast(total.dtype) / total).cast(first.dtype), *more]
        case MSELoss(reduction="mean"):
            (squares,) = graph.emit(dataclasses.replace(op, reduction="none"), *operands)
            return _quotient(graph, Mean(tuple(range(len(squares.shape)))), [squares])
        case Mean():
            return op.lowered(graph, *operands)
    return None


@dataclass
class _Walk:
    """Walks both graphs in parallel and records the changes that the part's graph needs."""

    batch: Batch
    kinds: dict[str, Kind] = field(default_factory=dict)
    varying: set[str] = field(default_factory=set)
    taken: dict[tuple[int, int], str] = field(default_factory=dict)
    """(node, operand) -> the array whose whole-batch value replaces the operand."""
    shared: set[tuple[int, int]] = field(default_factory=set)
    """(node, operand) that counts once for all parts: each part adds its share."""
    constants: dict[int, Any] = field(default_factory=dict)
    """Node -> its constant on the whole batch."""
    rows: int = 0

    def run(self) -> Kind:
        """The kind of the loss."""
        batch = self.batch
        self.rows = self._inputs()
        if not self.alike():
            why = "a part does not run the same operators as the whole batch"
            raise BudgetInfeasible(
                f"micro-batches cannot tell the loss of a whole batch from its parts: {why}", advice=ADVICE
            )
        self.nodes()
        return self.kinds[batch.part.outputs[0]]

    def alike(self) -> bool:
        """Whether both graphs have the same operators on the same arrays."""
        part, whole = self.batch.part.nodes, self.batch.whole.nodes
        return len(part) == len(whole) and all(
            type(a.op) is type(b.op) and a.op.label == b.op.label and a.inputs == b.inputs and a.outputs == b.outputs
            for a, b in zip(part, whole, strict=True)
        )

    def nodes(self) -> None:
        """Record the kinds of all arrays that nodes produce."""
        for position, (part, other) in enumerate(zip(self.batch.part.nodes, self.batch.whole.nodes, strict=True)):
            self._node(position, part, other)

    def _inputs(self) -> int:
        """Record the kinds of inputs; returns the number of rows of a part."""
        batch, rows = self.batch, 0
        if list(batch.part.inputs) != list(batch.whole.inputs):
            raise BudgetInfeasible(
                "micro-batches: a part does not take the same inputs as the whole batch", advice=ADVICE
            )
        for name in batch.part.inputs:
            part, whole = self._sizes(name)
            self.kinds[name] = FIXED
            if part != whole:
                rows = part[0]
                self.kinds[name] = Kind("rows")
        self.varying.update(batch.varying)
        return rows

    def _sizes(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        part = bind(self.batch.part.tensors[name].shape, self.batch.part_sizes)
        return part, bind(self.batch.whole.tensors[name].shape, self.batch.whole_sizes)

    def _node(self, position: int, node: Node, other: Node) -> None:
        for k, name in enumerate(node.outputs):
            read = [node.inputs[i] for i in sources(node.op, len(node.inputs), k)]
            if not self.varying.isdisjoint(read) or getattr(node.op, "random", False):
                self.varying.add(name)
        applied = Applied(
            bind(node.op, self.batch.part_sizes),
            bind(other.op, self.batch.whole_sizes),
            tuple(self.kinds[name] for name in node.inputs),
            tuple(self._sizes(name)[0] for name in node.inputs),
            tuple(self._sizes(name)[0] for name in node.outputs),
            tuple(self._sizes(name)[1] for name in node.outputs),
            self.rows,
            self.batch.count,
        )
        outputs, refused = None, ""
        for choice in self._choices(node, applied):
            kinds = list(applied.operands)
            for k, kind in choice.items():
                kinds[k] = kind
            try:
                outputs = self._kinds(replace(applied, operands=tuple(kinds)), node, other)
            except Undecided as error:
                refused = refused or str(error)
                continue
            for k, kind in choice.items():
                if kind.form == "fixed":
                    self.taken[position, k] = node.inputs[k]
                else:
                    self.shared.add((position, k))
            break
        if outputs is None:
            earlier = next((kind.why for kind in applied.operands if kind.form == "open"), "")
            where = f" (at {node.origin})" if str(node.origin) else ""
            outputs = [Kind("open", why=earlier or f"{node.op.label}{where} {refused}")] * len(node.outputs)
        if isinstance(applied.op, Full) and isinstance(applied.whole, Full) and applied.op.value != applied.whole.value:
            self.constants[position] = applied.whole.value
        self.kinds.update(zip(node.outputs, outputs, strict=True))

    def _kinds(self, applied: Applied, node: Node, other: Node) -> list[Kind]:
        """The kinds of an operator's results, by its rule or through its lowering."""
        forms = {kind.form for kind in applied.operands}
        if not node.op.is_composite or isinstance(node.op, DIRECT) or "open" in forms or forms <= {"fixed"}:
            return results(applied)
        batch = self.batch
        part = bind(tuple(batch.part.tensors[name] for name in node.inputs), batch.part_sizes)
        whole = bind(tuple(batch.whole.tensors[name] for name in other.inputs), batch.whole_sizes)
        return _through_lowering(applied, part, whole)

    def _choices(self, node: Node, applied: Applied) -> Iterator[dict[int, Kind]]:
        """Interpretations of the operands, in the order of trial: as they are; a fixed value next to sums as a share of
        it; sums over data as their whole-batch values.
        """
        yield {}
        forms = [kind.form for kind in applied.operands]
        if node.op.label in ("add", "sub", "where") and "sum" in forms:
            share = {
                k: Kind("sum", None if kind.factor is None else kind.factor / self.batch.count)
                for k, kind in enumerate(applied.operands)
                if kind.form == "fixed" and not (node.op.label == "where" and k == 0)
            }
            if share:
                yield share
        data = [
            k
            for k, name in enumerate(node.inputs)
            if forms[k] in ("sum", "open") and name not in self.varying and self._sizes(name)[0] == self._sizes(name)[1]
        ]
        whole = Kind("fixed", None)
        for k in reversed(data):
            yield {k: whole}
        if len(data) > 1:
            yield dict.fromkeys(data, whole)

    def rewritten(self) -> tuple[Graph, Graph, dict[str, str]]:
        """The part's graph with whole-batch values as inputs, the whole batch's graph, and the array of the latter for
        each of these inputs.
        """
        graph, count = self.batch.part, self.batch.count
        other = graph.empty()
        denominators: dict[str, str] = {}
        for array in dict.fromkeys(self.taken.values()):
            tensor = Tensor(self._sizes(array)[0], graph.tensors[array].dtype)
            name = f"{array}_of_the_batch"
            while name in graph.tensors or name in other.tensors:
                name += "_"
            other.input(name, tensor, Role.state)
            denominators[name] = array
        of_array = {array: name for name, array in denominators.items()}
        grown, now = self._grown_sizes(), {name: name for name in graph.inputs}
        changed: dict[str, str] = {}
        for position, node in enumerate(graph.nodes):  # updates of buffers do not affect the loss and are unchanged
            outputs = other.append(node.op, tuple(now[name] for name in node.inputs), origin=node.origin)
            now.update(zip(node.outputs, (value.name for value in outputs), strict=True))
            places = [k for k in range(len(node.inputs)) if (position, k) in self.taken or (position, k) in self.shared]
            if not places and position not in self.constants and changed.keys().isdisjoint(node.inputs):
                continue
            op, inputs = node.op, [changed.get(name, now[name]) for name in node.inputs]
            for k in places:
                if (position, k) in self.taken:
                    inputs[k] = of_array[node.inputs[k]]
                else:
                    with other.at(node.origin):
                        inputs[k] = _scaled(other.value(inputs[k]), 1 / count).name
            if position in self.constants:
                assert isinstance(op, Full)
                op = replace(op, value=self._constant(op.value, self.constants[position], grown))
            outputs = other.append(op, tuple(inputs), origin=node.origin)
            changed.update(zip(node.outputs, (value.name for value in outputs), strict=True))
        graph.finish(other, now)
        other.outputs[0] = changed.get(graph.outputs[0], other.outputs[0])
        if self.kinds[graph.outputs[0]].form == "fixed":
            other.outputs[0] = _scaled(other.value(other.outputs[0]), 1 / count).name
        return other, self.batch.whole, denominators

    def _grown_sizes(self) -> dict[Any, Any]:
        """Symbol of a number of rows -> that of the whole batch."""
        found = {}
        for name, entry in self.batch.part.inputs.items():
            if self.kinds[name].form == "rows" and not isinstance(entry.tensor.shape[0], int):
                found.update({s: s * self.batch.count for s in entry.tensor.shape[0].free_symbols})
        return found

    def _constant(self, part: Any, whole: Any, grown: Mapping[Any, Any]) -> Any:
        """The constant on the whole batch, if it scales for all sizes of the graph."""
        if not hasattr(part, "free_symbols") or not part.free_symbols:
            return whole
        result = simplify(part.subs(grown, simultaneous=True))
        if bind(result, self.batch.part_sizes) != whole:
            why = f"{part} is not {self.batch.count} times as much on the whole batch"
            raise BudgetInfeasible(
                f"micro-batches cannot tell the loss of a whole batch from its parts: {why}", advice=ADVICE
            )
        return result


def _scaled(value: Value, factor: float) -> Value:
    return (wide(value) * factor).cast(value.dtype)


def _through_lowering(applied: Applied, part: Sequence[Tensor], whole: Sequence[Tensor]) -> list[Kind]:
    """The kinds of a composite's results, derived from its lowering. Raises `Undecided`."""
    graphs, outputs = [], []
    for op, tensors in ((applied.op, part), (applied.whole, whole)):
        graph = Graph(op.label)
        operands = [graph.input(f"x{k}", tensor) for k, tensor in enumerate(tensors)]
        outputs.append([value.name for value in op.lowered(graph, *operands)])
        graphs.append(graph)
    walk = _Walk(Batch(graphs[0], graphs[1], {}, {}, applied.count, tuple(graphs[0].inputs)))
    walk.rows = applied.rows
    walk.kinds.update(zip(graphs[0].inputs, applied.operands, strict=True))
    walk.varying.update(graphs[0].inputs)
    if not walk.alike() or outputs[0] != outputs[1]:
        raise Undecided("does not compute the same for a part as for the whole batch")
    walk.nodes()
    if walk.taken or walk.shared or walk.constants:
        raise Undecided("depends on the number of rows")
    return [walk.kinds[name] for name in outputs[0]]
