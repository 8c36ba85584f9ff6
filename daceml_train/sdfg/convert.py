"""The graph as an SDFG of library nodes, for viewers and for DaCe's own tools, and back without loss.

One state if there is no control flow, else a chain of states and regions (`sdfg.regions`); one `OperatorNode` per
node, with the operator's text as a property, so that files keep it; one array per tensor, with symbolic sizes and
strides. Arrays are in SSA form: a write `p <- q` remains a pair, which the SDFG stores with its signature as comments
in its global code. Importing this module imports DaCe, quietly: import DaCe's names from here, so that a notebook does
not display the viewer's script (`import dace` alone does, and asks the network).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import keyword
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import networkx as nx
import sympy

from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid, Refused
from daceml_train.graph.grammar import Reader, show_type
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.printer import show_frame, show_operator
from daceml_train.graph.text import parse_frame, parse_operator
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.movement import View
from daceml_train.ops.operator import Operator, Origin
from daceml_train.sdfg.regions import Found, RegionReader, Writer
from daceml_train.tensor import Dim, DType, Tensor


@contextlib.contextmanager
def _no_notebook() -> Iterator[None]:
    """A context in which notebook detection reports that the code does not run in a notebook."""
    shell = builtins.__dict__.pop("get_ipython", None)
    try:
        yield
    finally:
        if shell is not None:
            builtins.__dict__["get_ipython"] = shell


with _no_notebook(), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from DaCe's own code, which would be errors under `python -W error`
    import dace as dace  # re-exported
    import dace.codegen.codegen
    import dace.codegen.targets.cpu
    import dace.library
    from dace.properties import ListProperty, Property
    from dace.transformation.transformation import ExpandTransformation

_FRAME, _NAME, _CONTROL, _SOURCE = "// frame: ", "// name: ", "// control: ", "// source: "
"""Prefixes of comments in the global code: a line of the graph's frame, an array's name in SDFG and graph, properties
of control flow that the regions do not express, or what the SDFG was made from.
"""
_PLAIN = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TYPES = {dtype: getattr(dace, "bool_" if dtype is DType.bool else dtype.name) for dtype in DType}


@dace.library.expansion
class ExpandOperatorNode(ExpandTransformation):
    """Expand an operator: composite -> the operators it lowers to, kernel -> its body, as a nested SDFG."""

    environments: ClassVar[list[Any]] = []

    @staticmethod
    def expansion(node: OperatorNode, state: dace.SDFGState, sdfg: dace.SDFG) -> dace.SDFG:
        """The nested SDFG. Raises `Refused` for a leaf: leaves are compiled outside of this SDFG."""
        return to_sdfg(node.opened())


@dace.library.node
class OperatorNode(dace.nodes.LibraryNode):
    """One operator. Connectors are `_in0, _in1, ...` and `_out0, ...`, in the order of its operands and results."""

    implementations: ClassVar[dict[str, Any]] = {"operators": ExpandOperatorNode}
    default_implementation = "operators"

    operator = Property(dtype=str, default="", desc="The operator with its attributes, as in graph texts")
    operands = ListProperty(element_type=str, default=[], desc="Types of the operands")
    results = ListProperty(element_type=str, default=[], desc="Types of the results")
    module = Property(dtype=str, default="", desc="Path of the module in the user's model")
    source = Property(dtype=str, default="", desc="The user's source line")

    @classmethod
    def new(cls, operator: str, operands: int = 1) -> OperatorNode:
        """A library node for an operator in the notation of graph texts, such as `gelu()`, to be put into a state."""
        op = _operator(operator)
        result = cls(
            re.sub(r"\W", "_", op.label),
            inputs={f"_in{i}": None for i in range(operands)},
            outputs={f"_out{i}": None for i in range(len(op.results))},
        )
        result.label, result.operator = op.label, operator
        return result

    @classmethod
    def of(cls, node: Node, graph: Graph) -> OperatorNode:
        """The library node for a node of a graph."""
        label = f"{node.op.label} ({node.origin.module})" if node.origin.module else node.op.label
        result = cls(
            re.sub(r"\W", "_", node.op.label),
            inputs={f"_in{i}": None for i in range(len(node.inputs))},
            outputs={f"_out{i}": None for i in range(len(node.outputs))},
        )
        result.label = label
        result.operator = show_operator(node.op)
        result.operands = [show_type(graph.tensors[i]) for i in node.inputs]
        result.results = [show_type(graph.tensors[o]) for o in node.outputs]
        result.module, result.source = node.origin.module, node.origin.source
        file, _, line = node.origin.source.rpartition(":")
        if file and line.isdigit():
            result.debuginfo = dace.dtypes.DebugInfo(int(line), filename=file)
        return result

    @property
    def op(self) -> Operator:
        """The operator."""
        return _operator(self.operator)

    def opened(self) -> Graph:
        """The definition of the operator, as a graph from `_in0, ...` to `_out0, ...`. Raises `Refused` for a leaf."""
        op = self.op
        graph = Graph(re.sub(r"\W", "_", op.label))
        operands = [graph.input(f"_in{i}", Reader(text).type()) for i, text in enumerate(self.operands)]
        with graph.at(Origin(self.module, self.source)):
            if isinstance(op, Kernel):
                names = dict(zip(op.arguments, (v.name for v in operands), strict=True))
                for statement in op.statements:
                    outputs = graph.append(statement.op, tuple(names[i] for i in statement.inputs))
                    names.update(zip(statement.outputs, (v.name for v in outputs), strict=True))
                results = [names[y] for y in op.yields]
            elif op.is_composite:
                results = [v.name for v in op.lowered(graph, *operands)]
            else:
                raise Refused(
                    f"{op.label} is a leaf, which has no expansion to a nested SDFG",
                    where=f"{self.module} {self.source}".strip(),
                    advice="compile the graph with daceml_train.optimize",
                )
            for position, name in enumerate(results):  # a view of the same shape is the identity
                graph.append(View(graph.tensors[name].shape), (name,), (f"_out{position}",))
                graph.outputs.append(f"_out{position}")
        return graph


@functools.lru_cache(maxsize=4096)
def _operator(text: str) -> Operator:
    return parse_operator(text)


def to_sdfg(graph: Graph) -> dace.SDFG:
    """The SDFG of `graph`. Inputs and results are not transient."""
    names = _identifiers(graph)
    sdfg = dace.SDFG(re.sub(r"\W", "_", graph.name, flags=re.ASCII) or "graph")
    comments = [_FRAME + line for line in show_frame(graph)]
    comments += [f"{_NAME}{short} {json.dumps(name)}" for name, short in names.items() if short != name]
    sdfg.append_global_code("\n".join(comments) + "\n")
    symbols = {s for tensor in graph.tensors.values() for s in tensor.symbols}
    for symbol in sorted(symbols, key=lambda s: str(s.name)):
        if not _PLAIN.fullmatch(str(symbol.name)):
            raise Invalid(f"DaCe accepts no size that is called {symbol.name!r}")
        sdfg.add_symbol(str(symbol.name), dace.int64)
    kept = {*graph.inputs, *graph.results}
    for name, tensor in graph.tensors.items():
        shape, strides = (_sizes(tensor.shape), _sizes(tensor.strides)) if tensor.rank else ((1,), (1,))
        sdfg.add_array(names[name], shape, _TYPES[tensor.dtype], strides=strides, transient=name not in kept)

    def put(state: dace.SDFGState, node: Node, graph: Graph, names: Mapping[str, str], access: dict[str, Any]) -> None:
        result = OperatorNode.of(node, graph)
        state.add_node(result)
        for position, name in enumerate(node.inputs):
            if name not in access:
                access[name] = _access(state, names[name])
            state.add_edge(access[name], None, result, f"_in{position}", _whole(sdfg, names[name]))
        for position, name in enumerate(node.outputs):
            access[name] = _access(state, names[name])
            state.add_edge(result, f"_out{position}", access[name], None, _whole(sdfg, names[name]))

    def declare(name: str, tensor: Tensor) -> None:
        shape, strides = (_sizes(tensor.shape), _sizes(tensor.strides)) if tensor.rank else ((1,), (1,))
        sdfg.add_array(name, shape, _TYPES[tensor.dtype], strides=strides, transient=True)

    writer = Writer(dace, sdfg, sdfg, put, declare, {*names.values(), *(str(s.name) for s in symbols)})
    writer.nodes(graph, names)
    if not graph.nodes:
        writer.state("operators")
    if writer.records:
        sdfg.append_global_code("".join(f"{_CONTROL}{record}\n" for record in writer.records))
    return sdfg


def from_sdfg(sdfg: dace.SDFG) -> Graph:
    """The graph that `to_sdfg` converted, with the changes made to the SDFG since.

    A copy between arrays is the identity. Raises `Invalid` for an SDFG with any other content, and for an array whose
    description contradicts its operator.
    """
    comments = _comments(sdfg)
    frame = [line.removeprefix(_FRAME) for line in comments if line.startswith(_FRAME)]
    if not frame:
        raise Invalid(f"SDFG {sdfg.name!r} is not one of operators", advice="to_sdfg creates such SDFGs")
    pairs = (line.removeprefix(_NAME).split(" ", 1) for line in comments if line.startswith(_NAME))
    names = {short: str(json.loads(name)) for short, name in pairs}
    graph = parse_frame(frame)
    records = [json.loads(line.removeprefix(_CONTROL)) for line in comments if line.startswith(_CONTROL)]
    reader = RegionReader(dace, lambda state: _found(sdfg, state), {record["label"]: record for record in records})
    for op, inputs, outputs, origin in reader.operators(sdfg):
        read, result = tuple(names.get(i, i) for i in inputs), tuple(names.get(o, o) for o in outputs)
        if op is None:
            op = View(graph.tensors[read[0]].shape)
        try:
            graph.append(op, read, result, origin)
        except Invalid as error:
            raise Invalid(f"SDFG {sdfg.name!r}: {error.message}", where=str(origin), advice=error.advice) from None
    verify(graph)
    _check_descriptions(sdfg, graph, names)
    return graph


def note_source(sdfg: dace.SDFG, source: str) -> None:
    """Keep one line of text in the SDFG that says where it comes from; files and copies of the SDFG have it, too."""
    sdfg.append_global_code(f"{_SOURCE}{source}\n")


def source_of(sdfg: dace.SDFG) -> str:
    """The line that `note_source` put into an SDFG; empty if there is none."""
    found = [line.removeprefix(_SOURCE) for line in _comments(sdfg) if line.startswith(_SOURCE)]
    return found[-1] if found else ""


def _comments(sdfg: dace.SDFG) -> list[str]:
    return sdfg.global_code["frame"].as_string.splitlines() if "frame" in sdfg.global_code else []


def _found(sdfg: dace.SDFG, state: dace.SDFGState) -> Iterator[Found]:
    """The operators of a state and, with None for an operator, its copies."""
    for moved in _in_order(sdfg, state):
        if not isinstance(moved, OperatorNode):
            yield None, [moved.src.data], [moved.dst.data], Origin()
            continue
        reads: dict[str, str] = {}
        makes: dict[str, str] = {}
        for edges, connectors, named in (
            (state.in_edges(moved), moved.in_connectors, reads),
            (state.out_edges(moved), moved.out_connectors, makes),
        ):
            for edge in edges:
                connector = edge.dst_conn if edge.dst is moved else edge.src_conn
                named[connector] = _array_of(sdfg, edge, moved)
            if missing := [c for c in connectors if c not in named]:
                raise Invalid(f"nothing is connected to {', '.join(missing)} of {moved.label} in SDFG {sdfg.name!r}")
        inputs, outputs = ([edges[c] for c in sorted(edges, key=_position)] for edges in (reads, makes))
        yield moved.op, inputs, outputs, Origin(moved.module, moved.source)


def _array_of(sdfg: dace.SDFG, edge: Any, node: OperatorNode) -> str:
    """The array that an edge of an operator moves. Raises `Invalid` unless it is a whole one."""
    name, memlet = edge.data.data, edge.data
    whole = name is not None and memlet.subset == dace.subsets.Range.from_array(sdfg.arrays[name])
    if not whole or memlet.wcr is not None:
        raise Invalid(f"{node.label} of SDFG {sdfg.name!r} moves {memlet}, operators read and write whole arrays")
    return str(name)


def _position(connector: str) -> int:
    return int(connector.lstrip("_inout"))


def _in_order(sdfg: dace.SDFG, state: dace.SDFGState) -> Iterator[Any]:
    """Operators and the edges of copies in topological order, with ties in the order of insertion."""
    nodes = [node for node in state.nodes() if not isinstance(node, dace.nodes.AccessNode)]
    for node in nodes:
        if not isinstance(node, OperatorNode):
            raise Invalid(f"SDFG {sdfg.name!r} holds {node}, which is no operator", advice="it may have been expanded")
    copies = [e for e in state.edges() if not {type(e.src), type(e.dst)} & {OperatorNode}]
    for edge in copies:
        ends = [sdfg.arrays[end.data] for end in (edge.src, edge.dst)]
        if not edge.data.is_empty() and edge.data.subset != dace.subsets.Range.from_array(sdfg.arrays[edge.data.data]):
            raise Invalid(f"SDFG {sdfg.name!r} copies {edge.data}, only whole arrays are copied")
        if ends[0].dtype != ends[1].dtype or not _equal(ends[0].shape, ends[1].shape):
            raise Invalid(f"SDFG {sdfg.name!r} copies {edge.src.data} to {edge.dst.data}, which is of another type")
    moved = [*nodes, *copies]
    reads = [[e.data.data for e in state.in_edges(n)] for n in nodes] + [[e.src.data] for e in copies]
    makes = [[e.data.data for e in state.out_edges(n)] for n in nodes] + [[e.dst.data] for e in copies]
    producer = {name: index for index, results in enumerate(makes) for name in results}
    order = nx.DiGraph()
    order.add_nodes_from(range(len(moved)))
    order.add_edges_from(
        (producer[name], index) for index, names in enumerate(reads) for name in names if name in producer
    )
    try:
        yield from (moved[index] for index in nx.lexicographical_topological_sort(order))
    except nx.NetworkXUnfeasible:
        cycle = " -> ".join(str(getattr(moved[index], "label", "copy")) for index, _ in nx.find_cycle(order))
        raise Invalid(f"operators of SDFG {sdfg.name!r} read each other's results: {cycle}") from None


def _check_descriptions(sdfg: dace.SDFG, graph: Graph, names: Mapping[str, str]) -> None:
    """Raise `Invalid` for an array that is described otherwise than its operator makes it."""
    for short, array in sdfg.arrays.items():
        tensor = graph.tensors.get(names.get(short, short))
        if tensor is None:
            continue
        shape, strides = (_sizes(tensor.shape), _sizes(tensor.strides)) if tensor.rank else ((1,), (1,))
        same = array.dtype == _TYPES[tensor.dtype] and _equal(array.shape, shape) and _equal(array.strides, strides)
        if not same:
            given = f"{array.dtype}{list(array.shape)} in strides {list(array.strides)}"
            raise Invalid(
                f"SDFG {sdfg.name!r} describes {short} as {given}, its operator makes {tensor}",
                advice="sizes, types and strides follow from operators: insert one that makes what is wanted",
            )


def _equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether sizes are the same, those of a file, whose symbols are other objects, included."""
    return len(a) == len(b) and all(
        x == y or str(sympy.sympify(str(x)) - sympy.sympify(str(y))) == "0" for x, y in zip(a, b, strict=True)
    )


def _identifiers(graph: Graph) -> dict[str, str]:
    """Array name -> a name that DaCe accepts, unchanged where possible."""
    taken = {str(s.name) for tensor in graph.tensors.values() for s in tensor.symbols}
    names: dict[str, str] = {}
    for name in graph.tensors:
        if _PLAIN.fullmatch(name) and not keyword.iskeyword(name) and name not in taken:
            names[name] = name
    taken |= names.keys()
    for name in graph.tensors:
        if name not in names:
            base = "_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            count = 0
            while (short := f"{base}_{count}" if count else base) in taken:
                count += 1
            names[name] = short
            taken.add(short)
    return names


def _sizes(sizes: Sequence[Dim]) -> list[Any]:
    return [size if isinstance(size, int) else _size(size) for size in sizes]


@functools.lru_cache(maxsize=4096)
def _size(size: sympy.Expr) -> Any:
    """A size over DaCe's symbols."""
    return size.xreplace({s: dace.symbol(str(s.name), dace.int64) for s in size.free_symbols})


def _access(state: dace.SDFGState, name: str) -> dace.nodes.AccessNode:
    node = dace.nodes.AccessNode(name)  # `state.add_access` would record a source line of this package
    state.add_node(node)
    return node


def _whole(sdfg: dace.SDFG, name: str) -> dace.Memlet:
    return dace.Memlet.from_array(name, sdfg.arrays[name])
