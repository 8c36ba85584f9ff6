"""Lineage: an operator through the passes of a session: its replacements, the passes, its bytes, and its kernels.

Operators are identified by the arrays that they produce. An operator whose array is gone was merged into the readers of
that array; new operators from the same user line also represent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from daceml_train.analysis.memory import number
from daceml_train.codegen.cpu.compile import intact, library_path
from daceml_train.errors import CompilerError, DacemlError, Invalid
from daceml_train.exploration.session.session import Session
from daceml_train.exploration.session.state import State
from daceml_train.exploration.session.steps import Step
from daceml_train.exploration.views.details import Sources
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.leaves import leaves
from daceml_train.lowering.lower import lower
from daceml_train.lowering.program import CallLaunch, ControlLaunch, KernelLaunch, Program
from daceml_train.lowering.program import Launch as AnyLaunch
from daceml_train.ops.kernel import described
from daceml_train.passes.base import without_dead_code
from daceml_train.reporting.numbers import bytes_text

MOST = 12
"""The most operators that are listed where a name fits several, and arrays that are named of one operator."""


@dataclass(frozen=True)
class Launch:
    """What finally runs an operator: a kernel with its key and C++, or a library call."""

    name: str
    source: str
    library: Path | None
    """The compiled kernel, if it is in the cache."""


@dataclass(frozen=True)
class Lineage:
    """An operator's path through the steps of a session. `str()` is for people."""

    session: Session
    first: State
    nodes: tuple[Node, ...]
    """The operator at the start; several for one that a pass decomposes."""
    touched: tuple[tuple[Step, tuple[Node, ...]], ...]
    """The steps that changed it, and the operators that represented it afterwards."""
    levels: tuple[tuple[str, int], ...]
    """Bytes moved by the operators that represent it: at the start, and after each level."""
    last: tuple[Node, ...]
    launches: tuple[Launch, ...]
    reason: str = ""
    """Why it is not known what runs it."""

    def __str__(self) -> str:
        (node, *_), graph = self.nodes, self.first.graph
        lines = [_shown(node)]
        source = node.origin.source
        excerpt = Sources(self.session.subject.model).lines(source) if source else None
        text = excerpt["lines"][excerpt["line"] - excerpt["first"]].strip() if excerpt else ""
        lines += [f"  module  {node.origin.module or '(none)'}", f"  source  {f'{source}  {text}'.strip() or '(none)'}"]
        results, readers = graph.producers(), graph.readers()
        for name in dict.fromkeys(node.inputs):
            by = f"produced by {described(results[name].op)}" if name in results else _given(graph, name)
            lines.append(f"  reads   %{name}: {graph.tensors[name]}, {_bytes(graph, name)}, {by}")
        for name in node.outputs:
            by = ", ".join(dict.fromkeys(described(reader.op) for reader in readers[name])) or "nothing"
            lines.append(f"  writes  %{name}: {graph.tensors[name]}, {_bytes(graph, name)}, read by {by}")
        lines.append("  bytes moved")
        lines += [f"    {level:16} {moved:>15,}" for level, moved in self.levels]
        lines.append("  passes" if self.touched else "  no pass changes it")
        for step, nodes in self.touched:
            became = "; ".join(map(_shown, nodes[:3])) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
            lines.append(f"    {step.level}: {step.transformation}\n      {became or 'it is gone'}")
        lines.append("  runs as")
        for launch in self.launches:
            lines.append(f"    {launch.name}" + (f", {launch.library}" if launch.library else ""))
        if not self.launches:
            lines.append(f"    {self.reason or 'nothing: no result needs it, or it is a view or a constant'}")
        return "\n".join(lines)

    def write(self, folder: Path) -> list[Path]:
        """Write the C++ of the kernels into a folder; return the files."""
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for launch in self.launches:
            if launch.source:
                path = folder / f"{launch.name}.cpp"
                path.write_text(launch.source, encoding="utf-8")
                written.append(path)
        return written


def lineage(session: Session, name: str) -> Lineage:
    """The lineage of the operator `name`: an array that it produces, or its module or kind if that is unique.

    Raises `Invalid`, which lists the candidates, where it names none or several.
    """
    states = [session.start, *(step.after for step in session.history)]
    at, node = next(
        ((i, found) for i, state in enumerate(states) if (found := _named(state.graph, name)) is not None), (0, None)
    )
    if node is None:
        raise Invalid(f"no operator is called {name!r}", advice=_near(session.start.graph, name))
    steps = session.history[at:]
    names: tuple[str, ...] = node.outputs
    levels = [("at first", _moved(states[at], names))]
    touched = []
    for step in steps:
        before, after = step.before.graph, step.after.graph
        if after is not before:
            following = descend(before, after, names)
            nodes = _makers(after, following)
            if _what(_makers(before, names)) != _what(nodes):
                touched.append((step, nodes))
            names = following
        if levels[-1][0] == step.level:
            levels.pop()
        levels.append((step.level, _moved(step.after, names)))
    last = _makers(session.graph, names)
    try:
        launches, reason = _launches(session, last), ""
    except DacemlError as error:
        launches, reason = (), str(error)
    return Lineage(session, states[at], (node,), tuple(touched), tuple(levels), last, launches, reason)


def descend(before: Graph, after: Graph, names: Iterable[str]) -> tuple[str, ...]:
    """The arrays of `after` whose operators represent the producers of `names` in `before`."""
    producers, results, readers = before.producers(), after.producers(), before.readers()
    found: dict[str, None] = {}
    seen: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop(0)
        if name in seen:
            continue
        seen.add(name)
        if name in results:
            found[name] = None
        else:
            todo += [output for reader in readers.get(name, ()) for output in reader.outputs]
    origins = {producers[name].origin for name in names if name in producers}
    todo = list(found)
    while todo:
        for name in results[todo.pop()].inputs:
            if name in results and name not in producers and name not in found and results[name].origin in origins:
                found[name] = None
                todo.append(name)
    return tuple(found)


def _named(graph: Graph, name: str) -> Node | None:
    """The requested operator; None for none, `Invalid` for several."""
    wanted = name.removeprefix("%")
    if (result := graph.producers().get(wanted)) is not None:
        return result
    for fits in (
        [n for n in graph.nodes if n.origin.module == wanted],
        [n for n in graph.nodes if wanted in (n.op.label, described(n.op), n.origin.source)],
    ):
        if len(fits) == 1:
            return fits[0]
        if fits:
            candidates = "\n".join(f"  {_shown(n)}  {n.origin.module}" for n in fits[:MOST])
            more = f"\n  and {len(fits) - MOST} more" if len(fits) > MOST else ""
            raise Invalid(
                f"{len(fits)} operators are called {name!r}:\n{candidates}{more}", advice="name one by its array"
            )
    return None


def _near(graph: Graph, name: str) -> str:
    wanted = name.removeprefix("%").casefold()
    near = [n for n in graph.nodes if wanted in f"{n} {n.origin.module} {n.origin.source}".casefold()] or graph.nodes
    shown = ", ".join(f"%{n.outputs[0]} ({described(n.op)})" for n in near[:MOST])
    return f"there are {len(graph.nodes)}, such as {shown}"


def _makers(graph: Graph, names: Iterable[str]) -> tuple[Node, ...]:
    """The producers of these arrays, in the order of the graph."""
    wanted = set(names)
    return tuple(node for node in graph.nodes if not wanted.isdisjoint(node.outputs))


def _what(nodes: Sequence[Node]) -> list[object]:
    return [(node.op, node.inputs, node.outputs) for node in nodes]


def _moved(state: State, names: Iterable[str]) -> int:
    """Bytes moved by the producers of these arrays."""
    wanted = set(names)
    entries = zip(state.graph.nodes, state.traffic.entries, strict=True)
    return sum(number(entry.bytes) for node, entry in entries if not wanted.isdisjoint(node.outputs))


def _launches(session: Session, nodes: Sequence[Node]) -> tuple[Launch, ...]:
    """The kernels and calls of a session's graph that run these operators."""
    wanted = {name for node in nodes for name in node.outputs}
    lowered = leaves(session.graph)
    positions = {i for i, n in enumerate(session.graph.nodes) if not wanted.isdisjoint(n.outputs)}
    own = {n.outputs[0] for n, at in zip(lowered.graph.nodes, lowered.owners, strict=True) if at in positions}
    graph = without_dead_code(lowered.graph)
    program = lower(graph)
    found: dict[str, Launch] = {}
    for place, launch in zip(program.nodes, program.launches, strict=False):
        if place < 0 or graph.nodes[place].outputs[0] not in own:
            continue
        for part, inner in _inside(program, launch):
            if isinstance(inner, KernelLaunch):
                code = part.codes[inner.code]
                found[code.key] = Launch(f"kernel_{code.key}", code.source, _library(session, code.key))
            else:
                called = f"library call {inner.target}" if isinstance(inner, CallLaunch) else "a copy"
                found[called] = Launch(called, "", None)
    return tuple(found.values())


def _inside(program: Program, launch: AnyLaunch) -> Iterator[tuple[Program, AnyLaunch]]:
    """A launch and its program; of control flow, those of the bodies."""
    if not isinstance(launch, ControlLaunch):
        yield program, launch
        return
    for part in (part for body in launch.bodies for part in body.all):
        yield from ((part, inner) for inner in part.launches if not isinstance(inner, ControlLaunch))


def _library(session: Session, key: str) -> Path | None:
    try:
        path = library_path(key, session.options.cache.kernels)
    except CompilerError:
        return None
    return path if intact(path) else None


def _given(graph: Graph, name: str) -> str:
    entry = graph.inputs[name]
    return f"{entry.role.value} {entry.path}".strip()


def _bytes(graph: Graph, name: str) -> str:
    size = graph.tensors[name].bytes
    return bytes_text(size) if isinstance(size, int) else f"{size} bytes"


def _shown(node: Node) -> str:
    return f"{_names(node.outputs)} = {described(node.op)}({_names(node.inputs)})"


def _names(names: Sequence[str]) -> str:
    """Arrays by name, as many as fit on a line: an update of parameters reads dozens."""
    shown = [f"%{name}" for name in names]
    return ", ".join(shown if len(shown) <= MOST else [*shown[: MOST - 2], f"and {len(shown) - MOST + 2} more"])
