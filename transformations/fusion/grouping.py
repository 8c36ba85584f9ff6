"""Grouping: the data structure under all fusion passes, which records the leaf operators of each kernel.

The graph's kernels are opened into their leaves, every leaf with generated code becomes a group of its own, and passes
join groups. A join is refused if it would create a cycle, or if the joined body is not one loop nest
(`codegen.kernel.domain`). Movement operators and constants belong to no group: each reader copies them into its body.
Groups are kept in a topological order that is repaired locally at each join (Pearce & Kelly, "A dynamic topological
sort algorithm for directed acyclic graphs", JEA 2006), so a cycle is searched for only between two groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from daceml_train.analysis.reachability import required
from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph
from daceml_train.ops.elementwise import Cast, Elementwise, Full, Iota
from daceml_train.ops.kernel import Kernel, Statement, canonical, computed
from daceml_train.ops.movement import Expand, Permute, Reorder, View
from daceml_train.ops.operator import Operator, Origin
from daceml_train.ops.random import Uniform
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import Dim, Tensor

POINTWISE = (Elementwise, Cast, Reorder)
MOVEMENT = (View, Permute, Expand)
CONSTANT = (Full, Iota)


@dataclass(eq=False)
class Item:
    """An operator of the opened graph; `group` is None for movement and constants outside every group."""

    op: Operator
    inputs: list[str]
    outputs: tuple[str, ...]
    origin: Origin
    group: Group | None = None


@dataclass(eq=False)
class Group:
    """Operators of one kernel, in topological order; a vendor operator is a group that joins no other."""

    items: list[Item]
    fusible: bool
    position: int = 0
    readers: list[Item] | None = None
    """Operators outside the group that read one of its results, as far as known."""

    @property
    def reduces(self) -> bool:
        """Whether a reduction is among the operators."""
        return any(isinstance(i.op, Reduce) for i in self.items)

    @property
    def origin(self) -> Origin:
        """The origin of the last operator that has one, with the user's line if any operator has that."""
        known = [i.origin for i in reversed(self.items) if str(i.origin)]
        origin = next((origin for origin in known if origin.source), known[0] if known else Origin())
        return replace(origin, computes=tuple(dict.fromkeys(c for i in self.items for c in computed(i.op, i.origin))))


class Grouping:
    """The groups of a graph while it is edited; `build` returns the graph with one kernel per group."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tensors: dict[str, Tensor] = dict(graph.tensors)
        self.visible = frozenset(graph.results)
        self.producer: dict[str, Item] = {}
        self.readers: dict[str, dict[Item, None]] = {name: {} for name in graph.tensors}
        self.order: list[Group | None] = []
        self.overwriter: dict[str, Item] = {}
        """Input -> the operator that stores a result over it. It is kept unchanged, after all readers of the input."""
        self.applied = 0
        """The number of joins and copies performed."""
        self._fresh = 0
        self._unfit: dict[tuple[Kernel, tuple[Tensor, ...]], str | None] = {}
        self._checked: tuple[Group | None, Group | None, set[int] | None] = (None, None, None)
        for node in graph.nodes:
            if isinstance(node.op, Kernel) and not node.op.updates:
                self._open(node.op, node.inputs, node.outputs, node.origin)
            else:
                self._add(Item(node.op, list(node.inputs), node.outputs, node.origin))

    # ---- construction -------------------------------------------------------------------------------------------
    def _register(self, item: Item) -> None:
        types = item.op.infer(*(self.tensors[i] for i in item.inputs))
        for name, tensor in zip(item.outputs, types, strict=True):
            self.producer[name] = item
            self.tensors[name] = tensor
            self.readers.setdefault(name, {})
        for name in item.inputs:
            self.readers[name][item] = None

    def _append(self, group: Group) -> None:
        group.position = len(self.order)
        self.order.append(group)
        for item in group.items:
            item.group = group

    def _add(self, item: Item) -> None:
        self._register(item)
        self.overwriter.update((self.source(item.inputs[argument])[0], item) for _, argument in item.op.updates)
        if not isinstance(item.op, (*MOVEMENT, *CONSTANT)):
            self._append(Group([item], isinstance(item.op, (*POINTWISE, Reduce, Uniform))))

    def _open(self, kernel: Kernel, inputs: tuple[str, ...], outputs: tuple[str, ...], origin: Origin) -> None:
        names = dict(zip(kernel.arguments, inputs, strict=True))
        results = dict(zip(kernel.yields, outputs, strict=True))
        items = []
        for statement in kernel.statements:
            for name in statement.outputs:
                names[name] = results.get(name) or self.fresh(statement.op.label)
            result = tuple(names[o] for o in statement.outputs)
            item = Item(statement.op, [names[i] for i in statement.inputs], result, origin)
            self._register(item)
            if not isinstance(item.op, CONSTANT):
                items.append(item)
        if items:
            self._append(Group(items, fusible=True))

    def fresh(self, base: str) -> str:
        """A name that no array has."""
        while True:
            self._fresh += 1
            name = f"{base}.{self._fresh}"
            if name not in self.tensors:
                return name

    # ---- structure ----------------------------------------------------------------------------------------------
    def groups(self) -> Iterator[Group]:
        """All groups in topological order; groups may be joined during the iteration."""
        position = 0
        while position < len(self.order):
            group = self.order[position]
            if group is not None:
                yield group
            position += 1

    def source(self, name: str) -> tuple[str, list[Item]]:
        """The array that `name` shows through unowned movement, and that movement, last first."""
        path = []
        while (item := self.producer.get(name)) is not None and item.group is None and isinstance(item.op, MOVEMENT):
            path.append(item)
            name = item.inputs[0]
        return name, path

    def reads(self, group: Group) -> dict[str, None]:
        """Arrays that a group reads from outside, as its operators name them."""
        return {
            name: None
            for item in group.items
            for name in item.inputs
            if (producer := self.producer.get(name)) is None or producer.group is not group
        }

    def predecessors(self, group: Group) -> dict[Group, None]:
        """Groups whose results this one reads."""
        found: dict[Group, None] = {}
        for name in self.reads(group):
            producer = self.producer.get(self.source(name)[0])
            if producer is not None and producer.group is not None and producer.group is not group:
                found[producer.group] = None
        return found

    def consumers(self, name: str) -> Iterator[Item]:
        """Operators of groups that read an array, directly or through unowned movement."""
        for reader in self.readers[name]:
            if reader.group is not None:
                yield reader
            else:
                for output in reader.outputs:
                    yield from self.consumers(output)

    def successors(self, group: Group) -> dict[Group, None]:
        """Groups that read this one's results, or overwrite what it reads."""
        if group.readers is None:
            found = [r for item in group.items for name in item.outputs for r in self.consumers(name)]
            if self.overwriter:
                bases = (self.source(name)[0] for name in self.reads(group))
                found += [self.overwriter[base] for base in bases if base in self.overwriter]
            group.readers = [r for r in dict.fromkeys(found) if r.group is not group]
        return {r.group: None for r in group.readers if r.group is not None and r.group is not group}

    def made(self, group: Group) -> tuple[str, ...]:
        """The arrays of the original graph that a group produces."""
        names = self.graph.tensors
        return tuple(name for item in group.items for name in item.outputs if name in names)

    def seen_outside(self, name: str, groups: Iterable[Group]) -> bool:
        """Whether an array produced in `groups` is a result of the graph or read outside them."""
        inside = set(map(id, groups))

        def seen(array: str) -> bool:
            if array in self.visible:
                return True
            for reader in self.readers[array]:
                if reader.group is not None:
                    if id(reader.group) not in inside:
                        return True
                elif any(map(seen, reader.outputs)):
                    return True
            return False

        return seen(name)

    # ---- bodies -------------------------------------------------------------------------------------------------
    def body(
        self, *groups: Group, copies: frozenset[Item] = frozenset()
    ) -> tuple[tuple[str, ...], list[Statement], list[str]]:
        """Arguments, statements and yields of the groups as one body, including the movement between them.

        `copies` are operators of other groups that this body recomputes where it needs them.
        """
        inside = {id(g) for g in groups}
        statements: list[Statement] = []
        arguments: dict[str, None] = {}
        results: set[str] = set()

        def need(name: str) -> None:
            if name in results or name in arguments:
                return
            base, path = self.source(name)
            producer = self.producer.get(base)
            if producer is not None and (producer.group is None or producer in copies):  # a constant is always copied
                add(producer)
            elif producer is None or id(producer.group) not in inside:
                arguments[name] = None
                return
            for item in reversed(path):
                add(item)

        def add(item: Item) -> None:
            if item.outputs[0] in results:
                return
            for name in item.inputs:
                need(name)
            statements.append(Statement(item.op, tuple(item.inputs), item.outputs))
            results.update(item.outputs)

        for group in groups:
            for item in group.items:
                add(item)
        yields = [name for g in groups for item in g.items for name in item.outputs if self.seen_outside(name, groups)]
        permuted: dict[str, Statement] = {}
        for name in tuple(arguments):  # an update could not replace an array that is, permuted, another operand as well
            base, path = self.source(name)
            if path and base in arguments and all(isinstance(item.op, Permute) for item in path):
                del arguments[name]
                permuted.update((i.outputs[0], Statement(i.op, tuple(i.inputs), i.outputs)) for i in reversed(path))
        return tuple(arguments), [*permuted.values(), *statements], yields

    def kernel(
        self, *groups: Group, copies: frozenset[Item] = frozenset()
    ) -> tuple[Kernel, tuple[str, ...], list[str]]:
        """The groups as one canonical kernel without dead statements, the arrays it reads, and those it produces."""
        arguments, statements, yields = self.body(*groups, copies=copies)
        kept, read = required(statements, yields)
        arguments = tuple(a for a in arguments if a in read)
        kernel, _ = canonical(arguments, kept, yields)
        return kernel, arguments, yields

    def bytes(self, names: Iterable[str]) -> Dim:
        """Bytes of the arrays that `names` alias, each counted once."""
        total: Dim = 0
        for name in dict.fromkeys(self.source(n)[0] for n in names):
            total = total + self.tensors[name].bytes
        return total

    def cost(self, *groups: Group) -> Dim:
        """Bytes that the groups would read and write as one kernel."""
        arguments, _, yields = self.body(*groups)
        return self.bytes(arguments) + self.bytes(yields)

    def stored(self, group: Group) -> Dim:
        """Bytes of the arrays that a group stores for others."""
        names = (name for item in group.items for name in item.outputs)
        return self.bytes(name for name in names if self.seen_outside(name, [group]))

    # ---- edits --------------------------------------------------------------------------------------------------
    def refusal(self, first: Group, second: Group, limit: int) -> str | None:
        """Why two groups (in topological order) cannot be one kernel, or None."""
        if not (first.fusible and second.fusible):
            other = second if first.fusible else first
            if other.items[0].op.updates:
                return f"{other.items[0].outputs[0]} is stored over what it replaces"
            return f"{other.items[0].op.label} is a library call"
        if len(first.items) + len(second.items) > limit:
            return f"the kernel would have more than {limit} operators"
        if self.ties(first, second):
            return f"{first.items[-1].outputs[0]} is a scalar that other kernels would wait for"
        between = self.between(first, second)
        self._checked = first, second, between
        if between is None:
            return f"{second.items[-1].outputs[0]} also depends on {first.items[-1].outputs[0]} through other operators"
        kernel, arguments, _ = self.kernel(first, second)
        return self.unfit(kernel, arguments)

    def ties(self, first: Group, second: Group) -> bool:
        """Whether scalars that the whole step reads, such as the learning rate, would wait for arrays of `second`."""
        scalar = all(self.tensors[name].rank == 0 for item in first.items for name in (*item.inputs, *item.outputs))
        if not scalar or all(self.tensors[name].rank == 0 for name in self.reads(second)):
            return False
        outputs = (name for item in first.items for name in item.outputs)
        return any(r.group is not first and r.group is not second for name in outputs for r in self.consumers(name))

    def unfit(self, kernel: Kernel, arguments: Iterable[str]) -> str | None:
        """Why a body is not one loop nest, or None; cached, since networks repeat their blocks."""
        key = kernel, tuple(self.tensors[a] for a in arguments)
        if key not in self._unfit:
            try:
                analyze(*key)
                self._unfit[key] = None
            except Refused as refused:
                self._unfit[key] = refused.message
        return self._unfit[key]

    def between(self, first: Group, second: Group) -> set[int] | None:
        """Groups (by id) after `first` and before `second` that depend on `first`; None if `second` depends on one."""
        found: set[int] = set()
        todo = [first]
        last = second.position
        while todo:
            group = todo.pop()
            if group.readers is None:
                self.successors(group)
            for reader in group.readers or ():
                successor = reader.group
                if successor is None or successor is first or id(successor) in found:
                    continue
                if successor is second and group is not first:
                    return None
                if successor.position < last:
                    found.add(id(successor))
                    todo.append(successor)
        return found

    def join(self, first: Group, second: Group) -> Group:
        """Join two groups, `first` before `second`; the caller has checked `refusal`."""
        dependants = self._checked[2] if self._checked[:2] == (first, second) else self.between(first, second)
        assert dependants is not None
        self.applied += 1
        low, high = first.position, second.position
        region = [g for g in self.order[low : high + 1] if g is not None and g is not first and g is not second]
        joined = Group([*first.items, *second.items], fusible=True)
        for item in joined.items:
            item.group = joined
        if first.readers is not None and second.readers is not None:
            joined.readers = [r for r in dict.fromkeys([*first.readers, *second.readers]) if r.group is not joined]
        early = [g for g in region if id(g) not in dependants]
        late = [g for g in region if id(g) in dependants]
        placed: list[Group | None] = [*early, joined, *late]
        placed += [None] * (high + 1 - low - len(placed))
        self.order[low : high + 1] = placed
        for position, group in enumerate(placed, low):
            if group is not None:
                group.position = position
        return joined

    def refusal_of_copies(self, group: Group, items: frozenset[Item]) -> str | None:
        """Why `group` cannot recompute the results of `items` instead of reading them, or None."""
        for base in {self.source(name)[0] for item in items for name in item.inputs} & self.overwriter.keys():
            over = self.overwriter[base]
            if over.group is not None and over.group.position < group.position:
                return f"{over.outputs[0]} overwrites {base} earlier"
        kernel, arguments, _ = self.kernel(group, copies=items)
        return self.unfit(kernel, arguments)

    def refusal_of_result(self, group: Group, name: str) -> str | None:
        """Why `group` cannot also store array `name`, which it computes internally, or None."""
        arguments, statements, yields = self.body(group)
        kernel, _ = canonical(arguments, statements, [*yields, name])
        return self.unfit(kernel, arguments)

    def copy_into(self, group: Group, name: str) -> None:
        """Let `group` recompute array `name`; the caller has checked `refusal_of_copies`."""
        self.applied += 1
        base, path = self.source(name)
        producer = self.producer[base]
        renamed: dict[str, str] = {}
        copies = []
        for item in (producer, *reversed(path)):
            outputs = tuple(self.fresh(item.op.label) for _ in item.outputs)
            renamed.update(zip(item.outputs, outputs, strict=True))
            copy = Item(item.op, [renamed.get(i, i) for i in item.inputs], outputs, item.origin)
            self._register(copy)
            for operand in item.inputs:
                self._forget_readers(operand)
            copy.group = group
            copies.append(copy)
        for item in group.items:
            if name in item.inputs:
                item.inputs = [renamed[name] if i == name else i for i in item.inputs]
                del self.readers[name][item]
                self.readers[renamed[name]][item] = None
        group.items[:0] = copies
        group.readers = None
        self._forget_readers(name)

    def _forget_readers(self, name: str) -> None:
        producer = self.producer.get(self.source(name)[0])
        if producer is not None and producer.group is not None:
            producer.group.readers = None

    # ---- result -------------------------------------------------------------------------------------------------
    def build(self, only: Group | None = None) -> Graph:
        """The graph with one node per group. A group of one operator remains that operator unless it reads constants,
        which a kernel contains in its body; where `only` one group was edited, the others do not change.
        """
        other = self.graph.empty()
        other.applied += self.applied

        def need(name: str) -> None:
            if name not in other.tensors:
                item = self.producer[name]
                for operand in item.inputs:
                    need(operand)
                other.append(item.op, tuple(item.inputs), item.outputs, item.origin)

        for group in list(self.groups()):
            if len(group.items) == 1 and (not self._inlines(group.items[0]) or only not in (None, group)):
                item = group.items[0]
                if not group.fusible or self.seen_outside(item.outputs[0], [group]):
                    for name in item.inputs:
                        need(name)
                    other.append(item.op, tuple(item.inputs), item.outputs, item.origin)
                continue
            kernel, arguments, yields = self.kernel(group)
            if yields:
                for name in arguments:
                    need(name)
                other.append(kernel, arguments, yields, group.origin)
        for name in self.visible:
            need(name)
        return self.graph.finish(other, {})

    def _inlines(self, item: Item) -> bool:
        """Whether a single operator reads constants, which a kernel would contain in its body."""
        return (
            item.group is not None
            and item.group.fusible
            and any(
                (producer := self.producer.get(name)) is not None and isinstance(producer.op, CONSTANT)
                for name in item.inputs
            )
        )
