"""The module tree of a graph: phases of the step, the user's modules, operators, and the statements of kernels.

Every item has a key that survives rewrites elsewhere in the graph: an open group stays open after a pass. Groups of
many children are split into parts, so that no level is long; views and constants, which move no bytes, are not drawn.
What only checks the data, such as the range of indices, is one group in its module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from daceml_train.analysis.aliases import is_alias, roots
from daceml_train.analysis.phases import PHASES, phases
from daceml_train.analysis.traffic import Traffic, traffic
from daceml_train.errors import DacemlError
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.requirement import Require
from daceml_train.reporting.numbers import number
from daceml_train.tensor import Dim

MOST = 50
"""The maximum number of children of a group; larger groups are split into parts."""


@dataclass(eq=False)
class Item:
    """One box: a phase, a module, a part of a long module, an operator, or a statement of a kernel's body.

    `nodes` are the positions of its operators in the graph; `seconds` is known where it was measured.
    """

    key: str
    kind: str
    label: str
    module: str
    phase: str
    nodes: tuple[int, ...] = ()
    children: list[Item] = field(default_factory=list)
    parent: Item | None = None
    bytes: int = 0
    flops: int = 0
    seconds: float | None = None
    opens: bool = False
    """Whether there is something inside to show."""

    @property
    def ancestors(self) -> Iterator[Item]:
        """The groups around it, innermost first."""
        at = self.parent
        while at is not None:
            yield at
            at = at.parent

    def walk(self) -> Iterator[Item]:
        """The item and all below it."""
        stack = [self]
        while stack:
            item = stack.pop()
            yield item
            stack += reversed(item.children)


@dataclass(eq=False)
class Tree:
    """The items of a graph; `root` is the whole step, `of_node` the operator items by position in the graph."""

    graph: Graph
    root: Item
    items: dict[str, Item]
    of_node: dict[int, Item]
    root_of: Mapping[str, str]
    """Array -> the array whose memory it is."""
    producer: Mapping[str, int]
    """Array -> the position of its producer."""
    readers: Mapping[str, Sequence[int]]
    """Array -> the positions of the drawn nodes that read it, or a view of it."""

    def under(self, module: str) -> Sequence[Item]:
        """The items of a module path, one per phase."""
        return [i for i in self.items.values() if i.kind == "module" and i.module == module]


def hidden(node: Node) -> bool:
    """Whether an operator is not drawn because it moves nothing of its own."""
    return is_alias(node.op) or isinstance(node.op, Full | Iota)


def tree_of(
    graph: Graph,
    sizes: Mapping[str, int] | None = None,
    seconds: Mapping[int, float] | None = None,
    results: int | None = None,
    counted: Traffic | None = None,
) -> Tree:
    """The tree of a graph, with bytes at `sizes` and measured `seconds` by position of the node; see `phases`.

    `counted` is the graph's traffic, if it is known: counting takes longer than all the rest.
    """
    counted, phase_of = counted or traffic(graph), phases(graph, results)
    updated = {value: graph.inputs[target].path.rpartition(".")[0] for target, value in graph.writes.items()}
    producer = {name: position for position, node in enumerate(graph.nodes) for name in node.outputs}
    copied: dict[int, list[Dim]] = {}
    for target, entry in counted.copies.items():
        copied.setdefault(producer.get(graph.writes[target], -1), []).append(entry.bytes)
    root = Item("step", "step", graph.name, "", "")
    groups: dict[tuple[str, str], Item] = {}
    of_node: dict[int, Item] = {}

    def group(phase: str, module: str) -> Item:
        found = groups.get((phase, module))
        if found is None:
            above = root if not module and len(set(phase_of)) == 1 else None
            if module:
                outer, _, label = module.rpartition(".")
                above, found = group(phase, outer), Item(f"{phase}/{module}", "module", label, module, phase)
            elif above is None:
                above, found = root, Item(phase, "phase", phase, "", phase)
            else:
                found = root
                root.phase = phase
            if found is not root:
                found.parent = above
                above.children.append(found)
            groups[phase, module] = found
        return found

    checks, folded = checking(graph), dict[str, Item]()
    known = dict(sizes or {})
    for phase in PHASES:  # in this order, whatever order the step runs in
        if phase in phase_of and len(set(phase_of)) > 1:
            group(phase, "")
    for position, (node, entry) in enumerate(zip(graph.nodes, counted.entries, strict=True)):
        if hidden(node):
            continue
        written = (updated[name] for name in node.outputs if name in updated)
        module = node.origin.module or next(written, "")
        above = group(phase_of[position], module)
        if position in checks:
            above = _checks_of(above, folded)
        item = Item(
            f"op:{node.outputs[0]}",
            "operator",
            label_of(node),
            module,
            phase_of[position],
            (position,),
            parent=above,
            bytes=_sum([entry.bytes, *copied.get(position, ())], known),
            flops=_sum([entry.flops], known),
            seconds=(seconds or {}).get(position),
            opens=isinstance(node.op, Kernel) or node.op.is_composite,
        )
        above.children.append(item)
        of_node[position] = item
    _settle(root)
    items, root_of = {item.key: item for item in root.walk()}, roots(graph)
    return Tree(graph, root, items, of_node, root_of, producer, _readers(graph, of_node, root_of))


def _readers(graph: Graph, shown: Iterable[int], root_of: Mapping[str, str]) -> dict[str, list[int]]:
    """By array, the positions of the operators among those `shown` that read it."""
    found = dict[str, list[int]]()
    for position in shown:
        for name in dict.fromkeys(root_of.get(i, i) for i in graph.nodes[position].inputs):
            found.setdefault(name, []).append(position)
    return found


def _checks_of(above: Item, folded: dict[str, Item]) -> Item:
    """The group of checks in a group; `folded` has those that exist, by key."""
    key = f"{above.key}#checks"
    if key not in folded:
        folded[key] = Item(key, "checks", "checks", above.module, above.phase, parent=above)
        above.children.append(folded[key])
    return folded[key]


def checking(graph: Graph) -> set[int]:
    """The positions of operators that only check data: their results reach others as conditions that must hold."""
    if not any(isinstance(node.op, Require) for node in graph.nodes):
        return set()
    needed, live = set(graph.results), set(graph.results)
    found = set()
    for position in reversed(range(len(graph.nodes))):
        node = graph.nodes[position]
        if isinstance(node.op, Require):
            found.add(position)
        elif not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
        elif not live.isdisjoint(node.outputs):
            found.add(position)
        if not live.isdisjoint(node.outputs):
            live.update(node.inputs)
    return found


def label_of(node: Node) -> str:
    """The label of an operator: the operators of a kernel, the first few of many."""
    if not isinstance(node.op, Kernel):
        return node.op.label
    names = [s.op.label for s in node.op.statements if not is_alias(s.op) and not isinstance(s.op, Full | Iota)]
    kinds = list(dict.fromkeys(names or [s.op.label for s in node.op.statements]))
    return " + ".join(kinds[:4]) + (f" + {len(kinds) - 4} more" if len(kinds) > 4 else "")


def body(tree: Tree, item: Item) -> tuple[Graph, list[Item]]:
    """The body of an operator, from inputs `in0, in1, ...`, and an item per operator in it that is drawn."""
    node = tree.graph.nodes[item.nodes[0]]
    inner = Graph("body")
    operands = [inner.input(f"in{i}", tree.graph.tensors[name]) for i, name in enumerate(node.inputs)]
    if isinstance(node.op, Kernel):
        names = dict(zip(node.op.arguments, (v.name for v in operands), strict=True))
        for s in node.op.statements:
            result = inner.append(s.op, tuple(names[i] for i in s.inputs))
            names.update(zip(s.outputs, (v.name for v in result), strict=True))
        inner.outputs = [names[y] for y in node.op.yields]
    else:
        inner.outputs = [v.name for v in node.op.lowered(inner, *operands)]
    parts = [
        Item(f"{item.key}/{n.outputs[0]}", "statement", n.op.label, item.module, item.phase, item.nodes, parent=item)
        for n in inner.nodes
        if not hidden(n)
    ]
    return inner, parts


def opened(tree: Tree, item: Item) -> tuple[Graph, list[Item]] | None:
    """`body`, or None where it has nothing to show."""
    if item.kind != "operator" or not item.opens:
        return None
    try:
        inner, parts = body(tree, item)
    except DacemlError:
        return None
    return (inner, parts) if 1 < len(parts) <= MOST * 4 else None


def _sum(amounts: Sequence[Dim], sizes: Mapping[str, int]) -> int:
    numbers = [number(amount, sizes) for amount in amounts]
    return sum(n for n in numbers if isinstance(n, int))


def _settle(root: Item) -> None:
    """Join chains of groups, split long ones, and add up the contents of groups, from the leaves on."""
    order = list(root.walk())
    for item in reversed(order):
        if item.kind == "operator":
            continue
        item.children = [_joined(child) for child in item.children if child.kind == "operator" or child.children]
        item.children = _cut(item)
        for child in item.children:
            child.parent = item
        item.opens = bool(item.children)
        _add_up(item)


def _add_up(item: Item) -> None:
    item.nodes = tuple(sorted(n for child in item.children for n in child.nodes))
    item.bytes = sum(child.bytes for child in item.children)
    item.flops = sum(child.flops for child in item.children)
    times = [child.seconds for child in item.children if child.seconds is not None]
    item.seconds = sum(times) if times else None


def _joined(item: Item) -> Item:
    """A module with a single operator or module is merged with it."""
    if item.kind != "module" or len(item.children) != 1:
        return item
    (only,) = item.children
    if only.kind == "module":
        only.label = f"{item.label}.{only.label}"
    elif only.kind == "operator":
        _, colon, operator = only.label.partition(": ")
        only.label = f"{item.label}.{only.label}" if colon and operator else f"{item.label}: {only.label}"
    return only


def _cut(item: Item) -> list[Item]:
    """The children, in parts of equal length if they are many."""
    children = item.children
    while len(children) > MOST:
        length = -(-len(children) // -(-len(children) // MOST))
        parts = []
        for start in range(0, len(children), length):
            held = children[start : start + length]
            label = f"{start + 1} to {start + len(held)} of {len(children)}"
            key = f"{item.key}#{length}.{start}"
            part = Item(key, "part", label, item.module, item.phase, children=held, parent=item, opens=True)
            for child in held:
                child.parent = part
            _add_up(part)
            parts.append(part)
        children = parts
    return children
