"""Control flow of a graph in DaCe's form: branches as `ConditionalBlock`, loops as `LoopRegion`, and the reverse.

A region contains states of library nodes, as the rest of the SDFG does. States that only copy surround them: the
carried values of a loop have arrays of their own, which `enter` initializes and `advance` replaces; `load` extracts
the slice of a step, and `store` writes results. Names and attributes that this structure does not express are in a
comment (`record`) per operator of control flow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daceml_train.errors import Invalid
from daceml_train.graph.bodies import bodies
from daceml_train.graph.grammar import Reader, show_size
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.control import Cond, ControlFlow, Scan, While
from daceml_train.ops.fallback import Body
from daceml_train.ops.kernel import Statement
from daceml_train.ops.levels import Levels
from daceml_train.ops.operator import Operator, Origin
from daceml_train.sdfg.level_regions import level_attributes, levels_of, write_levels
from daceml_train.tensor import Tensor

OPERATORS = "operators"
"""The prefix of labels of states with library nodes."""
_MOVES = ("enter", "leave", "load", "store", "advance", "start")
"""The prefixes of labels of states that only copy, around and in regions."""
_SIDES = ("then", "orelse")
GOES_ON = "_goes_on"
"""The suffix of labels of branches that are the body of a loop, after its condition."""


@dataclass
class Writer:
    """Fills a region of an SDFG with a graph's nodes, in a chain of states and regions."""

    dace: Any
    sdfg: Any
    region: Any
    put: Callable[[Any, Node, Graph, Mapping[str, str], dict[str, Any]], None]
    """Adds the library node of a node to a state: (state, node, graph, names, access nodes of the state)."""
    declare: Callable[[str, Tensor], None]
    """Adds a transient array."""
    taken: set[str]
    records: list[str] = field(default_factory=list)
    last: Any = None

    def block(self, result: Any, assignments: Mapping[str, str] | None = None) -> Any:
        """Append a state or region, before which symbols are assigned."""
        self.region.add_node(result, is_start_block=self.last is None, ensure_unique_name=True)
        if self.last is not None:
            self.region.add_edge(self.last, result, self.dace.InterstateEdge(assignments=dict(assignments or {})))
        self.last = result
        return result

    def state(self, label: str) -> Any:
        """Append a new state."""
        return self.block(self.dace.SDFGState(label, self.sdfg))

    def inside(self, region: Any) -> Writer:
        """A writer for a nested region."""
        return Writer(self.dace, self.sdfg, region, self.put, self.declare, self.taken, self.records)

    def fresh(self, base: str, tensor: Tensor) -> str:
        """A new transient array."""
        name, count = base, 0
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        self.declare(name, tensor)
        return name

    def nodes(self, graph: Graph, names: Mapping[str, str]) -> None:
        """Write all nodes of a graph, whose arrays are named `names` here."""
        state, access = None, dict[str, Any]()
        for node in graph.nodes:
            if isinstance(node.op, ControlFlow):
                self.control(graph, node, node.op, names)
                state = None
                continue
            if state is None:
                state, access = self.state(OPERATORS), {}
            self.put(state, node, graph, names, access)

    def move(self, label: str, pairs: Sequence[tuple[str, str, str | None, str | None]]) -> None:
        """A state that copies (source, target, subset of source, subset of target); None is the whole array."""
        if not pairs:
            return
        state = self.state(label)
        for source, target, cut, place in pairs:
            memlet = self.dace.Memlet(data=source, subset=cut or self._whole(source), other_subset=place)
            if place is None:
                memlet.other_subset = self.dace.subsets.Range.from_string(self._whole(target))
            ends = [self.dace.nodes.AccessNode(name) for name in (source, target)]
            for end in ends:
                state.add_node(end)
            state.add_edge(ends[0], None, ends[1], None, memlet)

    def _whole(self, name: str) -> str:
        return ", ".join(f"0:{size}" for size in self.sdfg.arrays[name].shape)

    def of_rows(self, name: str, rows: str) -> str:
        """The subset of an array with these rows, or this one."""
        rest = [f"0:{size}" for size in self.sdfg.arrays[name].shape[1:]]
        return ", ".join([rows, *rest])

    # ---- operators --------------------------------------------------------------------------------------------------
    def control(self, graph: Graph, node: Node, op: ControlFlow, names: Mapping[str, str]) -> None:
        """A branch or loop."""
        label = f"{op.label}_{len(self.records)}"
        position = len(self.records)
        self.records.append("")
        types = [graph.tensors[i] for i in node.inputs]
        inner = bodies(op, types)
        operands, results = [names[i] for i in node.inputs], [names[o] for o in node.outputs]
        match op:
            case Cond():
                local = self._branches(label, inner, operands, results)
            case Scan():
                local = self._scan(label, op, inner[0], operands, results)
            case While():
                local = self._while(label, op, inner, operands, results)
            case Levels():
                local = write_levels(self, label, op, inner, operands, results)
            case _:
                raise Invalid(f"{op.label} has no form in an SDFG", where=str(node.origin))
        simple: dict[str, Any] = (
            level_attributes(op)
            if isinstance(op, Levels)
            else {
                k: v if isinstance(v, bool | int) else show_size(v)
                for k, v in op.attributes().items()
                if not isinstance(v, Body)
            }
        )
        record = {
            "label": label,
            "operator": op.label,
            "attributes": simple,
            "inputs": operands,
            "outputs": results,
            "module": node.origin.module,
            "source": node.origin.source,
            "bodies": [
                {"arguments": body.arguments, "yields": body.yields, "names": {s: n for n, s in found.items()}}
                for body, found in zip(op.bodies, local, strict=True)
            ],
        }
        self.records[position] = json.dumps(record)

    def locals(self, label: str, body: Graph, arguments: Sequence[str]) -> dict[str, str]:
        """The names of the arrays of a body: given ones for its arguments, new ones for its own arrays.

        An array that occurs twice is copied, so every array has one name in the body.
        """
        found: dict[str, str] = {}
        seen: set[str] = set()
        copies: list[tuple[str, str, None, None]] = []
        for name, given in zip(body.inputs, arguments, strict=True):
            found[name] = given
            if given in seen:
                found[name] = self.fresh(f"{label}_again", body.tensors[name])
                copies.append((given, found[name], None, None))
            seen.add(given)
        for name, tensor in body.tensors.items():
            if name not in found:
                found[name] = self.fresh(f"{label}_" + re.sub(r"\W", "_", name, flags=re.ASCII), tensor)
        self.move("enter", copies)
        return found

    def _branches(
        self, label: str, inner: Sequence[Graph], operands: Sequence[str], results: Sequence[str]
    ) -> list[dict[str, str]]:
        region = self.dace.sdfg.state
        local = [self.locals(f"{label}_{side}", b, operands[1:]) for b, side in zip(inner, _SIDES, strict=True)]
        result = self.block(region.ConditionalBlock(label))
        for body, names, side, condition in zip(inner, local, _SIDES, (f"{operands[0]}[0]", None), strict=True):
            branch = region.ControlFlowRegion(f"{label}_{side}", self.sdfg)
            result.add_branch(None if condition is None else self.dace.properties.CodeBlock(condition), branch)
            writer = self.inside(branch)
            writer.nodes(body, names)
            writer.move("store", [(names[y], r, None, None) for y, r in zip(body.outputs, results, strict=True)])
        return local

    def _states(self, label: str, body: Graph, count: int) -> tuple[list[str], list[str]]:
        """Arrays for the carried values of a loop, in the current and in the next step."""
        types = [body.tensors[name] for name in list(body.inputs)[:count]]
        now = [self.fresh(f"{label}_state{i}", t) for i, t in enumerate(types)]
        return now, [self.fresh(f"{label}_next{i}", t) for i, t in enumerate(types)]

    def _scan(
        self, label: str, op: Scan, body: Graph, operands: Sequence[str], results: Sequence[str]
    ) -> list[dict[str, str]]:
        count, step, trips = op.carried, f"{label}_step", show_size(op.trips)
        now, following = self._states(label, body, count)
        cut_types = [body.tensors[name] for name in list(body.inputs)[count : count + op.sliced]]
        cut = [self.fresh(f"{label}_slice{i}", t) for i, t in enumerate(cut_types)]
        self.move("enter", [(x, s, None, None) for x, s in zip(operands, now, strict=False)])
        first, holds, onward = (f"{step} = 0", f"{step} < {trips}", f"{step} = {step} + 1")
        if op.reverse:
            first, holds, onward = (f"{step} = {trips} - 1", f"{step} >= 0", f"{step} = {step} - 1")
        names = self.locals(label, body, [*now, *cut, *operands[count + op.sliced :]])
        loop = self.block(self.dace.sdfg.state.LoopRegion(label, holds, step, first, onward, sdfg=self.sdfg))
        writer = self.inside(loop)
        sliced = operands[count : count + op.sliced]
        writer.move("load", [(x, c, self.of_rows(x, step), None) for x, c in zip(sliced, cut, strict=True)])
        writer.nodes(body, names)
        stacks = zip(body.outputs[count:], results[count:], strict=True)
        writer.move(
            "store",
            [(names[y], n, None, None) for y, n in zip(body.outputs, following, strict=False)]
            + [(names[y], r, None, self.of_rows(r, step)) for y, r in stacks],
        )
        writer.move("advance", [(n, s, None, None) for n, s in zip(following, now, strict=True)])
        self.move("leave", [(s, r, None, None) for s, r in zip(now, results, strict=False)])
        return [names]

    def _while(
        self, label: str, op: While, inner: Sequence[Graph], operands: Sequence[str], results: Sequence[str]
    ) -> list[dict[str, str]]:
        region = self.dace.sdfg.state
        now, following = self._states(label, inner[1], op.carried)
        going = self.fresh(f"{label}_going", inner[0].tensors[inner[0].outputs[0]])
        self.move("enter", [(x, s, None, None) for x, s in zip(operands, now, strict=False)])
        start = self.state("start")
        tasklet = start.add_tasklet("start", {}, {"go"}, "go = True")
        start.add_edge(tasklet, "go", start.add_access(going), None, self.dace.Memlet(f"{going}[0]"))
        arguments = [*now, *operands[op.carried :]]
        asked = self.locals(f"{label}_condition", inner[0], arguments)
        names = self.locals(label, inner[1], arguments)
        loop = self.block(region.LoopRegion(label, f"{going}[0]", sdfg=self.sdfg))
        writer = self.inside(loop)
        writer.nodes(inner[0], asked)
        writer.move("store", [(asked[inner[0].outputs[0]], going, None, None)])
        block = writer.block(region.ConditionalBlock(f"{label}{GOES_ON}"))
        branch = region.ControlFlowRegion(f"{label}_body", self.sdfg)
        block.add_branch(self.dace.properties.CodeBlock(f"{going}[0]"), branch)
        step = self.inside(branch)
        step.nodes(inner[1], names)
        step.move("store", [(names[y], n, None, None) for y, n in zip(inner[1].outputs, following, strict=True)])
        step.move("advance", [(n, s, None, None) for n, s in zip(following, now, strict=True)])
        self.move("leave", [(s, r, None, None) for s, r in zip(now, results, strict=True)])
        return [asked, names]


# ---- reading --------------------------------------------------------------------------------------------------------
Found = tuple[Operator | None, list[str], list[str], Origin]
"""An operator with the arrays, by their names in the SDFG, that it reads and makes; None stands for a copy."""


@dataclass(frozen=True)
class RegionReader:
    """Reads operators from regions; `state` returns those of a state in order, `records` has those of control flow."""

    dace: Any
    state: Callable[[Any], Iterator[Found]]
    records: Mapping[str, Mapping[str, Any]]

    def operators(self, region: Any) -> Iterator[Found]:
        """The operators of a region in execution order."""
        kinds = self.dace.sdfg.state
        block = region.start_block if region.nodes() else None
        while block is not None:
            if isinstance(block, kinds.SDFGState):
                if not block.label.startswith(_MOVES):
                    yield from self.state(block)
            elif block.label in self.records:
                yield self._control(block, self.records[block.label])
            elif not block.label.endswith(GOES_ON):
                raise Invalid(f"the SDFG holds the region {block.label}, which is no operator's")
            following = region.successors(block)
            block = following[0] if following else None

    def _control(self, block: Any, record: Mapping[str, Any]) -> Found:
        kinds = self.dace.sdfg.state
        if isinstance(block, kinds.ConditionalBlock):
            regions = [branch for _, branch in block.branches]
        else:
            regions = [block]
        if record["operator"] == While.name:
            (inner,) = (b for b in block.nodes() if b.label.endswith(GOES_ON))
            regions.append(inner.branches[0][1])
        if record["operator"] == Levels.name:
            regions = [b for b in block.nodes() if not isinstance(b, kinds.SDFGState)]  # in the order of kinds
        found = [self._body(region, entry) for region, entry in zip(regions, record["bodies"], strict=True)]
        if record["operator"] == Levels.name:
            levels = levels_of(found, record["attributes"])
            return levels, record["inputs"], record["outputs"], Origin(record["module"], record["source"])
        given = {k: Reader(v).size() if isinstance(v, str) else v for k, v in record["attributes"].items()}
        op: ControlFlow
        match record["operator"]:
            case "cond":
                op = Cond(*found)
            case "scan":
                op = Scan(found[0], **given)
            case _:
                op = While(found[0], found[1], **given)
        return op, record["inputs"], record["outputs"], Origin(record["module"], record["source"])

    def _body(self, region: Any, entry: Mapping[str, Any]) -> Body:
        names = entry["names"]
        statements = []
        for op, inputs, outputs, _ in self.operators(region):
            if op is None or not {*inputs, *outputs} <= names.keys():
                raise Invalid(f"region {region.label} holds arrays or copies of others than its own operators")
            statements.append(Statement(op, tuple(names[i] for i in inputs), tuple(names[o] for o in outputs)))
        return Body(tuple(entry["arguments"]), tuple(statements), tuple(entry["yields"]))
