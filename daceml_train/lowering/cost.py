"""Cost: a description of each launch of a program, with its bytes and operations as expressions over sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from daceml_train.analysis.aliases import is_alias
from daceml_train.analysis.chunks import update_chains
from daceml_train.analysis.network import sent_by
from daceml_train.analysis.traffic import Entry, total, traffic
from daceml_train.codegen.cuda.launch import CudaPart
from daceml_train.graph.graph import Graph
from daceml_train.lowering.naming import names
from daceml_train.lowering.program import CallLaunch, ControlLaunch, CopyLaunch, KernelLaunch, Launch, Program
from daceml_train.ops.collective import Start
from daceml_train.ops.kernel import described
from daceml_train.ops.movement import Concat
from daceml_train.ops.operator import Operator
from daceml_train.tensor import Dim, Tensor, simplify

_KINDS = {KernelLaunch: "kernel", CallLaunch: "call", CopyLaunch: "copy", ControlLaunch: "control"}


@dataclass(frozen=True)
class Cost:
    """One launch: the operators in it, the user's module and line, bytes read and written, operations.

    `kind` is `kernel`, `call`, `copy` or `control`, whose bodies' bytes all count as read.
    """

    kind: str
    operators: str
    module: str
    source: str
    read: Dim = 0
    written: Dim = 0
    flops: Dim = 0
    reordered: Dim = 0
    """Bytes that a library moves between layouts within the call."""
    name: str = ""
    """What it computes, and where: `layer1.0.bn2 + relu`; see `lowering.naming`."""
    network: Dim = 0
    """Bytes that each of the processes that train together sends."""

    @property
    def bytes(self) -> Dim:
        """Bytes read, written and reordered."""
        return self.read + self.written + self.reordered


def costs(graph: Graph, program: Program) -> list[Cost]:
    """The cost of each launch of a graph's program.

    Of several launches for one node, the last one computes it; the others copy operands. The launches of a chunked
    gradient each take a share of its cost, and those of a kernel in two parts what they touch.
    """
    launches, nodes = program.launches, program.nodes
    entries = traffic(graph).entries
    last = {node: index for index, node in enumerate(nodes) if node >= 0}
    parted = {p for c in update_chains(graph).values() for p in (c.gradient, c.rows, c.update)}
    count, done = Counter(nodes), Counter[int]()
    named = names(graph)
    results = []
    for index, (launch, node) in enumerate(zip(launches, nodes, strict=True)):
        if node in parted:
            whole = _computed(launch, graph.nodes[node].op, entries[node], named[node])
            results.append(_share(whole, done[node], count[node]))
            done[node] += 1
        elif node >= 0 and last[node] == index:
            cost = _computed(launch, graph.nodes[node].op, entries[node], named[node])
            results.append(replace(cost, network=sent_by(graph, (graph.nodes[node],))))
            if isinstance(op := graph.nodes[node].op, Start):
                results[-1] = replace(results[-1], operators=f"start {op.kind}")
            if isinstance(op, Concat) and op.placed:  # every launch copies some of the operands
                own = _moved(launch)
                results[-1] = replace(results[-1], read=own.read, written=own.written)
            if _is_second(program, launch):
                results[-2:] = _halves(program, launch, results[-1])
        else:
            results.append(_moved(launch))
    return results


def _is_second(program: Program, launch: Launch) -> bool:
    """Whether a launch is the second one of a kernel."""
    part = program.codes[launch.code] if isinstance(launch, KernelLaunch) else None
    return isinstance(part, CudaPart) and part.number == 1


def _halves(program: Program, second: Launch, whole: Cost) -> tuple[Cost, Cost]:
    """The costs of a kernel's two launches: the second one's is what it touches."""
    assert isinstance(second, KernelLaunch)
    own = second.places[: len(second.places) - len(program.codes[second.code].scratch)]
    sizes = [(i in second.writes, Tensor(place.shape, place.dtype).bytes) for i, place in enumerate(own)]
    read, written = (total(size for w, size in sizes if w is wanted) for wanted in (False, True))
    first = replace(whole, read=simplify(whole.read - read), written=simplify(whole.written - written))
    return first, replace(whole, read=read, written=written, flops=0)


def _share(whole: Cost, k: int, parts: int) -> Cost:
    """One of `k` equal shares of a cost."""

    def part(size: Dim) -> Dim:
        return size * (k + 1) // parts - size * k // parts if isinstance(size, int) else size / parts

    read, written, flops = part(whole.read), part(whole.written), part(whole.flops)
    return replace(whole, read=read, written=written, flops=flops, reordered=part(whole.reordered))


def _computed(launch: Launch, op: Operator, entry: Entry, name: str) -> Cost:
    read, written = sum(entry.reads.values(), start=entry.inner), sum(entry.writes.values(), start=0)
    kind = _KINDS[type(launch)]
    where, operators = entry.origin, "copy" if is_alias(op) else described(op)
    return Cost(kind, operators, where.module, where.source, read, written, entry.flops, entry.reorders, name)


def _moved(launch: Launch) -> Cost:
    """The cost of a copy, or of an operand that must be materialized."""
    match launch:
        case CopyLaunch(pairs=pairs):
            size = total(Tensor(place.shape, place.dtype).bytes for place, _ in pairs)
            return Cost("copy", "copy", "", launch.origin, size, size)
        case KernelLaunch(places=places, writes=writes):
            size = total(Tensor(places[i].shape, places[i].dtype).bytes for i in writes)
            read = len(places) > len(writes)
            return Cost("kernel", "copy" if read else "constant", "", launch.origin, size if read else 0, size)
    return Cost("call", launch.target if isinstance(launch, CallLaunch) else "", "", launch.origin)
