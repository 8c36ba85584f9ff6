"""View: which boxes of a graph's tree are drawn, the edges between them, and the picture as a viewer's SDFG.

A view is opened group by group. It never shows more than `LIMIT` boxes: opening one closes those that were opened
longest ago.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from daceml_train.analysis.traffic import Traffic
from daceml_train.exploration.views.tree import Item, Tree, hidden, opened, tree_of
from daceml_train.graph.graph import Graph, Role
from daceml_train.reporting.numbers import bytes_text, number

LIMIT = 200
"""The maximum number of boxes."""
FIRST = 24
"""Boxes up to which a graph opens by itself."""
ENDS = 12
"""The maximum number of batch inputs and results that are drawn as arrays."""


@dataclass
class Edge:
    """Arrays that one box produces and another reads."""

    source: str
    target: str
    arrays: list[str] = field(default_factory=list)
    bytes: int = 0


@dataclass
class GraphView:
    """The boxes and edges that are drawn, by key. `open` holds the keys of opened groups, oldest first."""

    tree: Tree
    open: list[str]
    sizes: Mapping[str, int] = field(default_factory=dict)
    results: int | None = None
    boxes: dict[str, Item] = field(default_factory=dict, init=False)
    edges: list[Edge] = field(default_factory=list, init=False)
    ends: dict[str, str] = field(default_factory=dict, init=False)
    """Keys of the arrays that are drawn -> array."""
    _of_node: dict[int, Item] = field(default_factory=dict, init=False)
    _inside: dict[str, tuple[Graph, list[Item]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.open = [key for key in dict.fromkeys(self.open) if key in self.tree.items]
        self._draw()
        while len(self.boxes) > LIMIT - ENDS and self.open:
            self.open.pop(0)
            self._draw()
        self._connect()

    # ---- opening and closing --------------------------------------------------------------------------------------
    def opening(self, key: str) -> GraphView:
        """The view with one more group open, and those around it."""
        item = self.tree.items.get(key)
        if item is None:
            return self
        around = [above.key for above in item.ancestors if above.parent is not None]
        rest = [k for k in self.open if k != key and k not in around]
        return GraphView(
            self.tree, [*rest, *reversed(around), *([key] if item.opens else [])], self.sizes, self.results
        )

    def closing(self, key: str) -> GraphView:
        """The view with a group closed."""
        return GraphView(self.tree, [k for k in self.open if k != key], self.sizes, self.results)

    def revealing(self, arrays: Iterable[str]) -> GraphView:
        """The view with the groups around the producers of these arrays open."""
        view = self
        for item in list(dict.fromkeys(self._items_of(arrays)))[:8]:
            if item.parent is not None and item.parent.key not in view.open:
                view = view.opening(item.parent.key)
        return view

    def over(
        self, graph: Graph, seconds: Mapping[int, float] | None = None, counted: Traffic | None = None
    ) -> GraphView:
        """The view of another graph, as far open as this one; `counted` as for `tree_of`."""
        return GraphView(
            tree_of(graph, self.sizes, seconds, self.results, counted), self.open, self.sizes, self.results
        )

    # ---- queries --------------------------------------------------------------------------------------------------
    def keys_of(self, arrays: Iterable[str]) -> list[str]:
        """The producers' boxes of these arrays; for an array that is not drawn, its readers' boxes."""
        found = [self._of_node[n] for item in self._items_of(arrays) for n in item.nodes if n in self._of_node]
        return list(dict.fromkeys(item.key for item in found))

    def _items_of(self, arrays: Iterable[str]) -> Iterable[Item]:
        of_node = self.tree.of_node
        for name in arrays:
            root = self.tree.root_of.get(name, name)
            position = self.tree.producer.get(root)
            if position in of_node:
                yield of_node[position]
            else:
                yield from (of_node[place] for place in self.tree.readers.get(root, ()))

    def arrays_of(self, key: str) -> list[str]:
        """The arrays that a box produces."""
        if key in self.ends:
            return [self.ends[key]]
        item = self.boxes.get(key) or self.tree.items.get(key)
        return [name for n in (item.nodes if item else ()) for name in self.tree.graph.nodes[n].outputs]

    def search(self, text: str, most: int = 50) -> list[Item]:
        """Groups and operators whose label, module, array or source line contains a text."""
        wanted = text.strip().casefold()
        found = []
        for item in self.tree.items.values() if wanted else ():
            node = self.tree.graph.nodes[item.nodes[0]] if item.kind == "operator" else None
            texts = [item.label, item.module, *(node.outputs if node else ()), *([node.origin.source] if node else ())]
            if item.parent is not None and any(wanted in part.casefold() for part in texts):
                found.append(item)
        return found[:most]

    # ---- drawing --------------------------------------------------------------------------------------------------
    def _draw(self) -> None:
        self.boxes, self._of_node, self._inside = {}, {}, {}
        shown, stack = set(self.open), [self.tree.root]
        while stack:
            item = stack.pop()
            if item.kind == "operator" and item.key in shown and (inside := opened(self.tree, item)):
                self._inside[item.key] = inside
                self.boxes.update((part.key, part) for part in inside[1])
                self._of_node[item.nodes[0]] = inside[1][-1]
            elif item.children and (item.key in shown or item.parent is None):
                stack += reversed(item.children)
            else:
                self.boxes[item.key] = item
                self._of_node.update(dict.fromkeys(item.nodes, item))

    def _connect(self) -> None:
        graph, root_of = self.tree.graph, self.tree.root_of
        edges: dict[tuple[str, str], Edge] = {}
        producers: dict[str, str] = {}
        batch = [name for name, entry in graph.inputs.items() if entry.role in (Role.input, Role.cotangent)]
        self.ends = {f"array:{name}": name for name in [*batch[:ENDS], *graph.outputs[:1]]}
        producers.update((name, key) for key, name in self.ends.items() if name in graph.inputs)

        def join(name: str, source: str | None, target: str) -> None:
            if source is None or source == target:
                return
            edge = edges.setdefault((source, target), Edge(source, target))
            if name not in edge.arrays:
                edge.arrays.append(name)
                edge.bytes += self.bytes_of(name)

        for position, node in enumerate(graph.nodes):
            if hidden(node) or position not in self._of_node:
                continue
            item = self.tree.of_node[position]
            if item.key in self._inside:
                self._join_body(item, producers, join)
                continue
            key = self._of_node[position].key
            for name in dict.fromkeys(root_of.get(i, i) for i in node.inputs):
                join(name, producers.get(name), key)
            producers.update(dict.fromkeys(node.outputs, key))
        for key, name in self.ends.items():
            if name in graph.outputs:
                join(name, producers.get(root_of.get(name, name)), key)
        self.edges = list(edges.values())

    def _join_body(self, item: Item, producers: dict[str, str], join: Any) -> None:
        inner, parts = self._inside[item.key]
        node = self.tree.graph.nodes[item.nodes[0]]
        outer = {f"in{i}": self.tree.root_of.get(name, name) for i, name in enumerate(node.inputs)}
        drawn = {part.key.rsplit("/", 1)[1]: part.key for part in parts}
        produced: dict[str, tuple[str, str | None]] = {n: (name, producers.get(name)) for n, name in outer.items()}
        for statement in inner.nodes:
            if hidden(statement):
                source = produced.get(statement.inputs[0], ("", None)) if statement.inputs else ("", None)
                produced.update(dict.fromkeys(statement.outputs, source))
                continue
            key = drawn[statement.outputs[0]]
            for name in statement.inputs:
                array, source_key = produced.get(name, ("", None))
                join(array, source_key, key)
            produced.update((name, (f"{item.key}/{name}", key)) for name in statement.outputs)
        for name, result in zip(node.outputs, inner.outputs, strict=True):
            source_key = produced.get(result, ("", None))[1]
            if source_key is not None:
                producers[name] = source_key

    def bytes_of(self, name: str) -> int:
        """Bytes of an array; 0 for values inside a kernel, which have no memory."""
        tensor = self.tree.graph.tensors.get(name)
        size = number(tensor.bytes, self.sizes) if tensor is not None else 0
        return size if isinstance(size, int) else 0

    # ---- as data --------------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        """Boxes, edges and the tree of groups as plain data for a page."""
        return {
            "boxes": [_told(item) for item in self.boxes.values()],
            "ends": [
                {"key": key, "label": name, "type": str(self.tree.graph.tensors[name])}
                for key, name in self.ends.items()
            ],
            "edges": [
                {
                    "source": e.source,
                    "target": e.target,
                    "bytes": e.bytes,
                    "count": len(e.arrays),
                    "arrays": self._types(e.arrays[:6]),
                }
                for e in self.edges
            ],
            "outline": self.outline(),
            "open": list(self.open),
            "bytes": self.tree.root.bytes,
            "flops": self.tree.root.flops,
            "seconds": self.tree.root.seconds,
            "operators": len(self.tree.of_node),
            "nodes": len(self.tree.graph.nodes),
        }

    def _types(self, names: Iterable[str]) -> list[str]:
        tensors = self.tree.graph.tensors
        return [f"{name}: {tensors[name]}" for name in names if name in tensors]

    def outline(self, most: int = LIMIT) -> list[dict[str, Any]]:
        """The rows of the tree as far as it is open: each item with its depth."""
        rows: list[dict[str, Any]] = []
        shown, stack = set(self.open), [(child, 0) for child in reversed(self.tree.root.children)]
        while stack and len(rows) < most:
            item, depth = stack.pop()
            rows.append({**_told(item), "depth": depth, "open": item.key in shown})
            if item.key in shown:
                inside = self._inside.get(item.key)
                stack += [(child, depth + 1) for child in reversed(inside[1] if inside else item.children)]
        return rows


def view_of(
    graph: Graph,
    sizes: Mapping[str, int] | None = None,
    seconds: Mapping[int, float] | None = None,
    results: int | None = None,
    counted: Traffic | None = None,
) -> GraphView:
    """The initial view of a graph: group by group, forward pass first, the levels that fit into `FIRST` boxes."""
    tree = tree_of(graph, sizes, seconds, results, counted)
    shown: list[str] = []
    count, level = len(tree.root.children), list(tree.root.children)
    while level:
        following: list[Item] = []
        for item in level:
            more = len(item.children) - 1
            if item.children and item.phase != "update" and item.kind != "checks" and count + more <= FIRST:
                count += more
                shown.append(item.key)
                following += item.children
        level = following
    return GraphView(tree, shown, dict(sizes or {}), results)


def _told(item: Item) -> dict[str, Any]:
    known = {"seconds": item.seconds} if item.seconds is not None else {}
    return {
        "key": item.key,
        "kind": item.kind,
        "label": item.label,
        "module": item.module,
        "phase": item.phase,
        "bytes": item.bytes,
        "flops": item.flops,
        "opens": item.opens,
        "operators": len(item.nodes),
        **known,
    }


def caption(item: Item) -> str:
    """The text of a box: the end of the module's path, the operator, the bytes."""
    if item.kind == "statement":
        return item.label
    path = ".".join(item.module.split(".")[-2:])
    operator = item.label.rpartition(": ")[2] if item.kind in ("operator", "part", "phase", "checks") else ""
    count = f"{len(item.nodes)} operators, " if item.kind != "operator" else ""
    return f"{': '.join(part for part in (path, operator) if part)} · {count}{bytes_text(item.bytes)}"
