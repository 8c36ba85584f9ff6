"""The two schedules of generated kernels, which this module registers with DaCe on import.

The classes that emit them are not registered: DaCe instantiates every registered one for each SDFG that it compiles,
the user's own included. `source` instantiates them.

    CPU_Blocks   the parallel map over blocks: `#pragma omp parallel for`, one block per thread
    CPU_Lanes    a map around one C++ tasklet: loops, the innermost one with `#pragma omp simd`; what all lanes share is
                 read before them

A write-conflict edge out of a lane map is a reduction into a scalar. It is accumulated in the element type of the
tasklet's connector over segments of at most `SEGMENT` lanes, and across them in the type of the scalar: float lanes
add to a double. The connector's prefix says how (`sum_`, `prod_`, `max_`, `min_`, `any_`, `all_`); `max` and `min`
keep NaN.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import dace
from dace import dtypes
from dace.codegen.target import TargetCodeGenerator
from dace.codegen.targets import cpp
from dace.sdfg import nodes
from dace.sdfg.state import LoopRegion

SEGMENT = 4096
"""The largest number of lanes that are accumulated in the narrow type."""
CHUNK = 128
"""Lanes between two prefetches."""

for _name in ("CPU_Blocks", "CPU_Lanes"):
    dtypes.ScheduleType.register(_name)
BLOCKS = dtypes.ScheduleType.CPU_Blocks
LANES = dtypes.ScheduleType.CPU_Lanes
dtypes.SCOPEDEFAULT_SCHEDULE[BLOCKS] = dtypes.ScheduleType.Sequential
dtypes.SCOPEDEFAULT_STORAGE[BLOCKS] = dtypes.StorageType.Register
dtypes.SCOPEDEFAULT_SCHEDULE[LANES] = dtypes.ScheduleType.Sequential
dtypes.SCOPEDEFAULT_STORAGE[LANES] = dtypes.StorageType.Register

COMBINE = {
    "sum": "{a} + {b}",
    "prod": "{a} * {b}",
    "max": "vm::max<{t}>({a}, {b})",
    "min": "vm::min<{t}>({a}, {b})",
    "any": "{a} || {b}",
    "all": "{a} && {b}",
}
"""Reduction -> the combination of two partial results of C++ type t."""
IDENTITY = {
    "sum": "0",
    "prod": "1",
    "max": "vm::lowest<{t}>()",
    "min": "vm::highest<{t}>()",
    "any": "false",
    "all": "true",
}
"""Reduction -> its neutral element."""
_NAME, _DEFINITION = re.compile(r"[A-Za-z_]\w*"), re.compile(r"const [\w:]+ (\w+) = (.*);$")
_OPERAND, _ROW = re.compile(r"[xy]\d+$"), re.compile(r"r\d+$|row_")
_CLAUSE = {"sum": "+", "prod": "*", "max": "max", "min": "min", "any": "||", "all": "&&"}


class BlockGenerator(TargetCodeGenerator):
    """Emits `CPU_Blocks` maps."""

    title, target_name, language = "blocks", "cpublocks", "cpp"

    def __init__(self, frame: Any, sdfg: Any) -> None:
        self.frame, self.dispatcher = frame, frame.dispatcher
        self.dispatcher.register_map_dispatcher(BLOCKS, self)

    def get_generated_codeobjects(self) -> list[Any]:
        """Nothing beside the frame."""
        return []

    def generate_scope(self, sdfg: Any, cfg: Any, scope: Any, state: int, functions: Any, out: Any) -> None:
        """The parallel loop, with DaCe's own code inside."""
        (entry,) = scope.source_nodes()
        (name,), ((first, last, _),) = entry.map.params, entry.map.range
        count = cpp.sym2cpp(last + 1 - first)
        out.write(
            f"#pragma omp parallel for num_threads(vm_team({count})) if(vm_team({count}) > 1) schedule(static, 1)"
        )
        out.write(f"for (int64_t {name} = 0; {name} < {count}; ++{name}) {{")
        self.frame.allocate_arrays_in_scope(sdfg, cfg, entry, functions, out)
        self.dispatcher.dispatch_subgraph(
            sdfg, cfg, scope, state, functions, out, skip_entry_node=True, skip_exit_node=True
        )
        self.frame.deallocate_arrays_in_scope(sdfg, cfg, entry, functions, out)
        out.write("}")


class LaneGenerator(TargetCodeGenerator):
    """Emits complete `CPU_Lanes` maps: the loops and the tasklet inside."""

    title, target_name, language = "lanes", "cpulanes", "cpp"

    def __init__(self, frame: Any, sdfg: Any) -> None:
        self.frame = frame
        frame.dispatcher.register_map_dispatcher(LANES, self)

    def get_generated_codeobjects(self) -> list[Any]:
        """Nothing beside the frame."""
        return []

    def generate_scope(self, sdfg: Any, cfg: Any, scope: Any, state: int, functions: Any, out: Any) -> None:
        """Loops over the map's ranges; the innermost one is vectorized and, if it reduces, cut into segments."""
        graph = cfg.state(state)
        (entry,) = scope.source_nodes()
        (tasklet,) = (n for n in scope.nodes() if isinstance(n, nodes.Tasklet))
        reads = [e for e in graph.in_edges(tasklet) if e.data.data is not None]
        writes = [e for e in graph.out_edges(tasklet) if e.data.data is not None]
        reduced = [e for e in writes if e.data.wcr is not None]
        written = {e.data.data for e in writes}
        ranges = list(zip(entry.map.params, entry.map.range, strict=True))
        outer, inner = _by_depth(sdfg, tasklet, reads, written, entry.map.params)
        lines = list(outer[0])
        for depth, (name, (first, last, _)) in enumerate(ranges[:-1], 1):
            lines.append(f"for (int64_t {name} = {cpp.sym2cpp(first)}; {name} < {cpp.sym2cpp(last + 1)}; ++{name}) {{")
            lines += outer[depth]
        name, (first, last, _) = ranges[-1]
        begin, end = cpp.sym2cpp(first), cpp.sym2cpp(last + 1)
        if reduced:
            lines.append(f"for (int64_t segment = {begin}; segment < {end}; segment += {SEGMENT}) {{")
            lines.append(f"const int64_t segment_end = vm_least(segment + {SEGMENT}, {end});")
            begin, end = "segment", "segment_end"
        clause = ""
        for e in reduced:
            kind, kept = e.src_conn.split("_", 1)
            kind_type = tasklet.out_connectors[e.src_conn].ctype
            lines.append(f"{kind_type} {kind}_of_{kept} = {IDENTITY[kind].format(t=kind_type)};")
            clause += f" reduction({_CLAUSE[kind]}:{kind}_of_{kept})"
            if _keeps_nan(kind, kind_type):
                lines.append(f"int nan_in_{kept} = 0;")
                clause += f" reduction(|:nan_in_{kept})"
        ahead = [] if reduced else _ahead(sdfg, cfg, reads, writes, name)
        if ahead:
            lines.append(f"for (int64_t chunk = {begin}; chunk < {end}; chunk += {CHUNK}) {{")
            lines.append(f"const int64_t chunk_end = vm_least(chunk + {CHUNK}, {end});")
            lines += ahead
            begin, end = "chunk", "chunk_end"
        lines.append(f"#pragma omp simd{clause}")
        lines.append(f"for (int64_t {name} = {begin}; {name} < {end}; ++{name}) {{")
        lines += inner[0]
        for e in writes:
            lines.append(f"{tasklet.out_connectors[e.src_conn].ctype} {e.src_conn};")
        lines += inner[1]
        for e in writes:
            if e.data.wcr is None:
                lines.append(f"{_element(sdfg, e.data)} = {e.src_conn};")
                continue
            kind, kept = e.src_conn.split("_", 1)
            kind_type, total = tasklet.out_connectors[e.src_conn].ctype, f"{kind}_of_{kept}"
            if _keeps_nan(kind, kind_type):
                sign = ">" if kind == "max" else "<"
                lines.append(f"{total} = {e.src_conn} {sign} {total} ? {e.src_conn} : {total};")
                lines.append(f"nan_in_{kept} |= {e.src_conn} != {e.src_conn};")
            else:
                lines.append(f"{total} = {COMBINE[kind].format(t=kind_type, a=total, b=e.src_conn)};")
        lines += ["}"] * (1 + bool(ahead))
        for e in reduced:
            kind, kept = e.src_conn.split("_", 1)
            kind_type, total, target = tasklet.out_connectors[e.src_conn].ctype, f"{kind}_of_{kept}", e.data.data
            if _keeps_nan(kind, kind_type):
                lines.append(f"{total} = nan_in_{kept} ? vm::nan<{kind_type}>() : {total};")
            wide = sdfg.arrays[target].dtype.ctype
            lines.append(f"{target} = {COMBINE[kind].format(t=wide, a=target, b=f'({wide}){total}')};")
        lines += ["}"] * (len(ranges) - 1 + bool(reduced))
        out.write("\n".join(["{", *lines, "}"]), cfg, state, entry)


def _keeps_nan(kind: str, ctype: str) -> bool:
    return kind in ("max", "min") and ctype in ("float", "double")


def _ahead(sdfg: Any, cfg: Any, reads: Any, writes: Any, lane: str) -> list[str]:
    """Prefetches of the cache lines of operands and results that a chunk of lanes will soon need.

    Hardware prefetchers of some processors do not keep up if much is computed per element: GELU's derivative takes
    1.5 ns per element from memory, 0.9 ns with these prefetches and 0.9 ns from cache; sums take the same time either
    way. Only arrays that differ from row to row are prefetched; the rest is in cache.
    """
    requests: dict[str, str] = {}
    in_rows = isinstance(cfg, LoopRegion)
    for memlet, wanted in [(e.data, 0) for e in reads] + [(e.data, 1) for e in writes]:
        if not _OPERAND.match(memlet.data):
            continue
        where = _place(sdfg, memlet)
        symbols = {str(s): s for s in where.free_symbols}
        dense = lane in symbols and where.coeff(symbols[lane]) == 1
        if dense and (not in_rows or any(map(_ROW.match, symbols))):
            text = cpp.sym2cpp(where.subs(symbols[lane], dace.symbolic.symbol("chunk")))
            requests[memlet.data] = f"vm_ahead<{wanted}>(&{memlet.data}[{text}], chunk_end - chunk);"
    return list(requests.values())


def _read(sdfg: Any, tasklet: Any, edge: Any) -> str:
    """The statement that reads the operand of an edge."""
    return f"const {tasklet.in_connectors[edge.dst_conn].ctype} {edge.dst_conn} = {_element(sdfg, edge.data)};"


def _by_depth(
    sdfg: Any, tasklet: Any, reads: Any, written: set[str], params: Sequence[str]
) -> tuple[list[list[str]], tuple[list[str], list[str]]]:
    """The reads and definitions of a tasklet by the loop that they depend on; the reads and the code of the last one.

    What the innermost loop does not change is read and computed once, outside of it: stores keep gcc from that, and
    a value that is computed before the loops is provably the same for all lanes. An array that the tasklet writes is
    read where it is written.
    """
    depth = {name: place for place, name in enumerate(params, 1)}
    innermost = len(params)
    outer: list[list[str]] = [[] for _ in params]
    loads: list[str] = []
    code: list[str] = []

    def found(text: str) -> int:
        return max((depth.get(name, 0) for name in _NAME.findall(text)), default=0)

    for e in reads:
        place = innermost if e.data.data in written else found(_element(sdfg, e.data))
        depth[e.dst_conn] = place
        (loads if place == innermost else outer[place]).append(_read(sdfg, tasklet, e))
    for line in tasklet.code.as_string.splitlines():
        defined = _DEFINITION.match(line)
        place = found(defined[2]) if defined else innermost
        if defined:
            depth[defined[1]] = place
        (code if place == innermost else outer[place]).append(line)
    return outer, (loads, code)


def _element(sdfg: Any, memlet: Any) -> str:
    """The C++ expression of one element of an array, or of a scalar."""
    array = sdfg.arrays[memlet.data]
    if not hasattr(array, "strides") or type(array).__name__ == "Scalar":
        return str(memlet.data)
    return f"{memlet.data}[{cpp.sym2cpp(_place(sdfg, memlet))}]"


def _place(sdfg: Any, memlet: Any) -> Any:
    """The offset in an array of the element that a memlet refers to."""
    strides, none = sdfg.arrays[memlet.data].strides, dace.symbolic.pystr_to_symbolic("0")
    return sum((i * s for i, s in zip(memlet.subset.min_element(), strides, strict=True)), none)
