"""The package's passes as transformations of DaCe, on SDFGs of operators (`sdfg.convert.to_sdfg`).

Importing this module defines one class per pass, `Daceml` plus the pass's name, with the pass's options as properties.
Afterward `sdfg.apply_transformations`, DaCe's optimizer and the viewers' backends list and apply them. A match is
located at its last operator; applying it converts the SDFG to a graph, applies the pass at that place, and writes the
result into the same SDFG. If several matches end at one operator, they are offered one after the other.
"""

from __future__ import annotations

import ast
import dataclasses
import weakref
from abc import abstractmethod
from typing import Any, ClassVar

from daceml_train.errors import Invalid, Refused
from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Candidate, Pass
from daceml_train.passes.options import option_types, read_option, restored, show_option
from daceml_train.sdfg.convert import OperatorNode, dace, from_sdfg, note_source, source_of, to_sdfg
from daceml_train.transformations import catalog

_xf: Any = dace.transformation.transformation
_Base: Any = _xf.SingleStateTransformation
PREFIX = "Daceml"
_PLAIN = (bool, int, float, str)

_found: weakref.WeakKeyDictionary[Any, tuple[Any, dict[Pass, dict[str, Candidate]]]] = weakref.WeakKeyDictionary()
"""SDFG -> its content when its matches were computed, and per pass, array -> the match that ends there."""


class OperatorTransformation(_Base):
    """Base of the generated classes: a match of `kind`, at one operator."""

    kind: ClassVar[type[Pass]]
    operator = _xf.PatternNode(OperatorNode)

    @classmethod
    def expressions(cls) -> list[Any]:
        """One operator: where the match ends."""
        return [dace.sdfg.utils.node_path_graph(cls.operator)]

    @property
    @abstractmethod
    def transformation(self) -> Pass:
        """The pass, with the options of this transformation."""

    def can_be_applied(self, graph: Any, expr_index: int, sdfg: Any, permissive: bool = False) -> bool:
        """Whether a match of the pass that is not refused ends at the operator."""
        return self.candidate(graph, sdfg) is not None

    def candidate(self, state: Any, sdfg: Any) -> Candidate | None:
        """The match that ends at the operator; None if there is none or it is refused."""
        if len(sdfg.nodes()) != 1:
            return None
        at = matches(self.transformation, sdfg)
        return next((at[e.data.data] for e in state.out_edges(self.operator) if e.data.data in at), None)

    def apply(self, graph: Any, sdfg: Any) -> None:
        """Apply the pass at this place. Raises `Refused` if the pass no longer matches."""
        found = self.candidate(graph, sdfg)
        if found is None:
            raise Refused(f"{self.transformation} does not apply at {self.operator}")
        put_into(sdfg, found.apply())

    def annotates_memlets(self) -> bool:
        """Memlets are those of `to_sdfg`."""
        return True


def matches(transformation: Pass, sdfg: Any) -> dict[str, Candidate]:
    """Array name in the SDFG -> the first match that ends with it and is not refused."""
    state = next(iter(sdfg.nodes()))
    content = (tuple(map(id, state.nodes())), sdfg.name)
    known, by_pass = _found.get(sdfg, (None, {}))
    if known != content:
        by_pass = {}
        _found[sdfg] = (content, by_pass)
    if transformation not in by_pass:
        by_pass[transformation] = _ends(transformation, sdfg)
    return by_pass[transformation]


def _ends(transformation: Pass, sdfg: Any) -> dict[str, Candidate]:
    try:
        graph = from_sdfg(sdfg)
    except Invalid:  # an SDFG of other nodes, or with expanded operators
        return {}
    names = dict(zip(graph.tensors, to_sdfg(graph).arrays, strict=True))
    ends: dict[str, Candidate] = {}
    for match in transformation.matches(graph):
        arrays = match.arrays or graph.nodes[-1].outputs
        if names[arrays[-1]] not in ends and match.refusal is None:
            ends[names[arrays[-1]]] = match
    return ends


def put_into(sdfg: Any, graph: Graph) -> None:
    """Replace the content of `sdfg` by the SDFG of `graph`."""
    result = to_sdfg(graph)
    if source := source_of(sdfg):
        note_source(result, source)
    (state,), (fresh,) = sdfg.nodes(), result.nodes()
    for node in list(state.nodes()):
        state.remove_node(node)
    for name in list(sdfg.arrays):
        sdfg.remove_data(name, validate=False)
    for name, description in result.arrays.items():
        sdfg.add_datadesc(name, description)
    for name, kind in result.symbols.items():
        if name not in sdfg.symbols:
            sdfg.add_symbol(name, kind)
    for node in fresh.nodes():
        state.add_node(node)
    for edge in fresh.edges():
        state.add_edge(edge.src, edge.src_conn, edge.dst, edge.dst_conn, edge.data)
    sdfg.global_code = result.global_code
    _found.pop(sdfg, None)


def _adapter(kind: type[Pass]) -> type[OperatorTransformation]:
    """The transformation class of a pass."""
    types = option_types(kind)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        plain = types[field.name] in _PLAIN
        default = field.default if plain else show_option(field.default)
        kind_of = types[field.name] if plain else str
        properties[field.name] = dace.properties.Property(dtype=kind_of, default=default, desc=f"Option {field.name}")

    def transformation(self: Any) -> Pass:
        given = {}
        for name, annotation in types.items():
            value = getattr(self, name)
            if annotation not in _PLAIN:
                value = restored(read_option(ast.parse(value, mode="eval").body, name), annotation)
            given[name] = value
        return kind(**given)

    body = {
        "__doc__": kind.__doc__,
        "__module__": __name__,
        "kind": kind,
        "transformation": property(transformation),
        "operator": _xf.PatternNode(OperatorNode),
        **properties,
    }
    result = type(PREFIX + kind.__name__, (OperatorTransformation,), body)
    adapter: type[OperatorTransformation] = dace.properties.make_properties(result)
    return adapter


TRANSFORMATIONS: dict[str, type[OperatorTransformation]] = {n: _adapter(kind) for n, kind in catalog.passes().items()}
"""Name of a pass -> its transformation class."""
globals().update({made.__name__: made for made in TRANSFORMATIONS.values()})
