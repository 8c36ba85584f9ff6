"""A view as the JSON of an SDFG, which is what DaCe's viewer draws. No part of DaCe is imported for it.

One state; a library node per box, an access node per array of the batch and per result, an edge per pair of boxes. Each
element's `guid` is its key in the view. All names are data: the viewer draws them on a canvas.
"""

from __future__ import annotations

from typing import Any

from daceml_train.exploration.views.view import GraphView, caption
from daceml_train.reporting.numbers import bytes_text

_SHAPES = {"operator": "LibraryNode", "statement": "Tasklet"}
LONGEST = 60
"""The maximum number of characters of a label."""


def sdfg_of(view: GraphView) -> dict[str, Any]:
    """The SDFG of the boxes and edges that are drawn."""
    numbers = {key: place for place, key in enumerate([*view.boxes, *view.ends])}
    nodes = [_box(number, key, view) for key, number in numbers.items() if key in view.boxes]
    nodes += [_end(numbers[key], key, name) for key, name in view.ends.items()]
    edges: list[dict[str, Any]] = []
    for place, edge in enumerate(view.edges):
        source, target = nodes[numbers[edge.source]], nodes[numbers[edge.target]]
        leaving, entering = f"OUT_{place}", f"IN_{place}"
        for node, kind, connector in ((source, "out", leaving), (target, "in", entering)):
            if node["type"] != "AccessNode":
                node["attributes"][f"{kind}_connectors"][connector] = None
        label = f"{bytes_text(edge.bytes)} {edge.arrays[0]}" if len(edge.arrays) == 1 else f"{len(edge.arrays)} arrays"
        edges.append(
            {
                "type": "MultiConnectorEdge",
                "src": str(source["id"]),
                "dst": str(target["id"]),
                "src_connector": None if source["type"] == "AccessNode" else leaving,
                "dst_connector": None if target["type"] == "AccessNode" else entering,
                "attributes": {"data": _memlet(f"{edge.source} {edge.target}", _name(label), edge.bytes)},
            }
        )
    ids = [node["id"] for node in nodes]
    state = {
        "type": "SDFGState",
        "label": "step",
        "id": 0,
        "collapsed": False,
        "scope_dict": {"-1": ids},
        "nodes": nodes,
        "edges": edges,
        "attributes": {"guid": "state"},
    }
    arrays = {_name(name): _array() for name in view.ends.values()} | {
        e["attributes"]["data"]["attributes"]["data"]: _array() for e in edges
    }
    return {
        "type": "SDFG",
        "label": "",
        "id": None,
        "cfg_list_id": 0,
        "start_block": 0,
        "collapsed": False,
        "attributes": {
            "name": "step",
            "_arrays": arrays,
            "guid": "sdfg",
            "symbols": {},
            "constants_prop": {},
            "arg_names": [],
        },
        "nodes": [state],
        "edges": [],
        "source_files": [],
        "dace_version": "2.0.0b1",
    }


def _box(number: int, key: str, view: GraphView) -> dict[str, Any]:
    item = view.boxes[key]
    kind = _SHAPES.get(item.kind, "NestedSDFG")
    label = _short(caption(item))
    attributes: dict[str, Any] = {"label": label, "name": label, "guid": key, "in_connectors": {}, "out_connectors": {}}
    if kind == "Tasklet":
        attributes["code"] = {"string_data": item.label, "language": "CPP"}
    if kind == "NestedSDFG":
        attributes |= {"is_collapsed": True, "symbol_mapping": {}, "sdfg": _empty(key, number + 1)}
    node = {"type": kind, "label": label, "id": number, "scope_entry": None, "scope_exit": None}
    return {**node, "attributes": attributes, "classpath": ""}


def _end(number: int, key: str, name: str) -> dict[str, Any]:
    attributes = {"data": _name(name), "guid": key, "label": _short(name)}
    node = {"type": "AccessNode", "label": _short(name), "id": number, "scope_entry": None, "scope_exit": None}
    return {**node, "attributes": attributes}


def _empty(key: str, number: int) -> dict[str, Any]:
    """The content of a closed group, which the viewer does not draw."""
    return {
        "type": "SDFG",
        "label": "",
        "id": None,
        "cfg_list_id": number,
        "start_block": None,
        "collapsed": True,
        "attributes": {"name": "inside", "_arrays": {}, "guid": f"{key} inside", "symbols": {}, "constants_prop": {}},
        "nodes": [],
        "edges": [],
    }


def _memlet(key: str, label: str, size: int) -> dict[str, Any]:
    everything = {"type": "Range", "ranges": []}
    attributes = {
        "volume": str(size),
        "num_accesses": str(size),
        "subset": everything,
        "src_subset": everything,
        "dst_subset": None,
        "is_data_src": True,
        "data": label,
        "guid": key,
    }
    return {"type": "Memlet", "attributes": attributes}


def _array() -> dict[str, Any]:
    sizes: dict[str, Any] = {"strides": ["1"], "shape": ["1"], "offset": ["0"], "total_size": "1"}
    return {"type": "Array", "attributes": {**sizes, "dtype": "float32", "transient": False}}


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _name(text: str) -> str:
    """The name of data in the picture: the viewer takes what follows a period for a structure's member."""
    return _short(text).replace(".", "\N{ONE DOT LEADER}")
