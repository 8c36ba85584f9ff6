"""The schedules of CUDA kernels, which this module registers with DaCe on import.

The classes that emit them are not registered: DaCe instantiates every registered one for each SDFG that it compiles,
the user's own included. `source` instantiates them.

    GPU_Blocks    the map over blocks: a `__global__` function, and its launch
    GPU_Lanes     a map over lanes, shared out over the threads of a team: fragment by fragment, in two unrolled loops,
                  first every load, then one C++ tasklet and the stores
    GPU_Team      the same for the first team of a block; registers that it reads are combined over the teams before
    GPU_Columns   a map over lanes, shared out over blocks: each slice of a block combines some partial results
    GPU_Once      a tasklet that all threads compute, and one stores
    GPU_Turn      a square of an array is copied into shared memory, read along the rows

A write-conflict edge out of a lane map is a reduction into a scalar: `reduced_v` over the lanes of a team's row, with
the same bits in every thread of it, and `total_v` over what this thread has seen. Its connector says how, as on the
CPU.
"""

from __future__ import annotations

from typing import Any

from dace import dtypes
from dace.codegen.dispatcher import DefinedType
from dace.codegen.prettycode import CodeIOStream
from dace.codegen.target import TargetCodeGenerator
from dace.codegen.targets import cpp
from dace.sdfg import nodes

from daceml_train.codegen.cpu.schedule import COMBINE, IDENTITY
from daceml_train.codegen.cuda.geometry import SIDE, SLICES, Geometry

for _name in ("GPU_Blocks", "GPU_Lanes", "GPU_Team", "GPU_Columns", "GPU_Once", "GPU_Turn"):
    dtypes.ScheduleType.register(_name)
    dtypes.SCOPEDEFAULT_SCHEDULE[dtypes.ScheduleType[_name]] = dtypes.ScheduleType.Sequential
    dtypes.SCOPEDEFAULT_STORAGE[dtypes.ScheduleType[_name]] = dtypes.StorageType.Register
for _name in ("GPU_Fragment", "GPU_Square"):
    dtypes.StorageType.register(_name)
BLOCKS, LANES, TEAM = (dtypes.ScheduleType[n] for n in ("GPU_Blocks", "GPU_Lanes", "GPU_Team"))
COLUMNS, ONCE, TURN = (dtypes.ScheduleType[n] for n in ("GPU_Columns", "GPU_Once", "GPU_Turn"))
FRAGMENT = dtypes.StorageType.GPU_Fragment
SQUARE = dtypes.StorageType.GPU_Square


class BlockGenerator(TargetCodeGenerator):
    """Emits `GPU_Blocks` maps; `kernels` collects the `__global__` functions."""

    title, target_name, language = "cudablocks", "cudablocks", "cpp"

    def __init__(self, frame: Any, sdfg: Any) -> None:
        self.frame, self.dispatcher = frame, frame.dispatcher
        self.kernels: list[tuple[str, int, str]] = []
        """Name, threads and body of each kernel."""
        self.dispatcher.register_map_dispatcher(BLOCKS, self)

    def get_generated_codeobjects(self) -> list[Any]:
        """Nothing beside the frame."""
        return []

    def generate_scope(self, sdfg: Any, cfg: Any, scope: Any, state: int, functions: Any, out: Any) -> None:
        """The launch, in place; the kernel's body apart, with DaCe's own code inside."""
        (entry,) = scope.source_nodes()
        (_, last, _) = entry.map.range[0]
        threads = entry.map.gpu_block_size[0]
        body = CodeIOStream()
        self.frame.allocate_arrays_in_scope(sdfg, cfg, entry, functions, body)
        self.dispatcher.dispatch_subgraph(
            sdfg, cfg, scope, state, functions, body, skip_entry_node=True, skip_exit_node=True
        )
        self.frame.deallocate_arrays_in_scope(sdfg, cfg, entry, functions, body)
        self.kernels.append((entry.map.label, threads, body.getvalue()))
        out.write(f"LAUNCH({entry.map.label}, {cpp.sym2cpp(last + 1)}, {threads})")


class ThreadGenerator(TargetCodeGenerator):
    """Emits the code of the threads of a block, their registers and shared memory."""

    title, target_name, language = "cudathreads", "cudathreads", "cpp"

    def __init__(self, frame: Any, sdfg: Any, geometry: Geometry, conditions: dict[str, str], narrow: bool) -> None:
        self.frame, self.geometry, self.conditions = frame, geometry, conditions
        self.integer = "uint32_t" if narrow else "int64_t"
        """The integer type of divisions of lane indices: 64-bit divisions cost many instructions."""
        emitters = {LANES: self.lanes, TEAM: self.team, COLUMNS: self.columns, ONCE: self.once, TURN: self.turn}
        self.emitters = emitters
        for schedule in emitters:
            frame.dispatcher.register_map_dispatcher(schedule, self)
        for storage in (FRAGMENT, SQUARE):
            frame.dispatcher.register_array_dispatcher(storage, self)
            generic = frame.dispatcher.get_generic_node_dispatcher()  # required, although maps emit their own accesses
            for other in dtypes.StorageType:
                frame.dispatcher.register_copy_dispatcher(storage, other, None, generic)
                frame.dispatcher.register_copy_dispatcher(other, storage, None, generic)

    def get_generated_codeobjects(self) -> list[Any]:
        """Nothing beside the frame."""
        return []

    # ---- registers and shared memory ------------------------------------------------------------------------------
    def allocate_array(
        self,
        sdfg: Any,
        cfg: Any,
        dfg: Any,
        state_id: int,
        node: Any,
        desc: Any,
        functions: Any,
        declared: Any,
        *_: Any,
    ) -> None:
        """Fragments of each thread, or an array of the block."""
        name, kind = node.data, desc.dtype.ctype
        if desc.storage == SQUARE:
            declared.write(f"__shared__ {kind} {name}[{SIDE * (SIDE + 1)}];")
        else:
            declared.write(f"vm::Pack<{kind}, V> {name}[PASSES] = {{}};")
        self.frame.dispatcher.defined_vars.add(name, DefinedType.Pointer, dtypes.pointer(desc.dtype).ctype)

    def declare_array(self, *_: Any, **__: Any) -> None:
        """Nothing, since allocation declares."""

    def deallocate_array(self, *_: Any, **__: Any) -> None:
        """Nothing, since registers and shared memory end with the kernel."""

    # ---- maps -----------------------------------------------------------------------------------------------------
    def generate_scope(self, sdfg: Any, cfg: Any, scope: Any, state: int, functions: Any, out: Any) -> None:
        """One map around one tasklet."""
        (entry,) = scope.source_nodes()
        (tasklet,) = (n for n in scope.nodes() if isinstance(n, nodes.Tasklet))
        lines = self.emitters[entry.map.schedule](_Map(sdfg, cfg.state(state), entry, tasklet))
        out.write("\n".join(["{", *lines, "}"]), cfg, state, entry)

    def once(self, m: _Map) -> list[str]:
        """All threads compute local values; one thread writes memory."""
        guarded = [e for e in m.writes if not m.local(e)]
        lines = [m.read(e) for e in m.reads] + m.declarations() + m.code
        lines += [f"{e.data.data} = {e.src_conn};" for e in m.writes if m.local(e)]
        if guarded:
            lines.append(f"if ({self.conditions[m.entry.map.label]}) {{")
            lines += [*(f"{m.element(e)} = {e.src_conn};" for e in guarded), "}"]
        return lines

    def turn(self, m: _Map) -> list[str]:
        """Warps read along the rows; a barrier before for those that still read the last square, and one after."""
        *_, lane, row = m.entry.map.params
        *_, (row_first, row_last, _) = m.entry.map.range
        (read,), (write,) = m.reads, m.writes
        return [
            "__syncthreads();",
            f"const int64_t {row} = {cpp.sym2cpp(row_first)} + vm_thread() % {SIDE};",
            f"for (int64_t {lane} = lane_begin + vm_thread() / {SIDE}; {lane} < lane_end; {lane} += THREADS / {SIDE})",
            f"    if ({row} < {cpp.sym2cpp(row_last + 1)}) {m.element(write)} = {m.element(read)};",
            "__syncthreads();",
        ]

    def columns(self, m: _Map) -> list[str]:
        """A lane for each thread of a slice; the first slice has the totals."""
        lines = [f"const int64_t lane = lane_begin + vm_thread() % {SIDE};", *m.decode("lane", self.integer)]
        shared = [e for e in m.reads if e.dst_conn.startswith("parts_")]
        for e in shared:
            kind, total, array = m.type_in(e), e.dst_conn, m.sdfg.arrays[e.data.data]
            how = self.conditions[total]
            step = cpp.sym2cpp(array.strides[0])
            index = [0, *e.data.subset.min_element()[1:]]
            where = cpp.sym2cpp(sum(i * s for i, s in zip(index, array.strides, strict=True)))
            name = how.removeprefix("vm::").removesuffix("_")
            lines += [
                f"{kind} {total} = {IDENTITY[name].format(t=kind)};",
                "if (lane < lane_end) {",
                "#pragma unroll 4",
                f"for (int64_t i = vm_thread() / {SIDE}; i < part_end; i += {SLICES})",
                f"    {total} = {how}::of({total}, {e.data.data}[i * ({step}) + {where}]);",
                "}",
                f"{total} = vm::over_slices<{how}, {SLICES}, {SIDE}>({total});",
            ]
        lines.append(f"if (lane < lane_end && vm_thread() < {SIDE}) {{")
        lines += [m.read(e) for e in m.reads if e not in shared] + m.declarations() + m.code
        lines += [f"{m.element(e)} = {e.src_conn};" for e in m.writes]
        return [*lines, "}"]

    def team(self, m: _Map) -> list[str]:
        """The first team's lanes; registers that it reads are first combined over the teams."""
        lines = []
        for e in m.reads:
            if e.dst_conn.startswith("near_") and m.register(e):
                kind = e.dst_conn.split("_", 1)[1]
                lines.append(f"vm::over_teams<{functor(kind)}, TEAMS, TEAM>({e.data.data});")
        return [*lines, "if (vm_team() == 0) {", *self.lanes(m), "}"]

    def lanes(self, m: _Map) -> list[str]:
        """Loads of all fragments, then the tasklet and the stores of each, then reductions."""
        resident, full = self.geometry.resident, self.geometry.full
        same = [e for e in m.reads if m.step(e) is None and not m.outer(e) and not m.kept(e)]
        packed = [e for e in m.reads if m.step(e) is not None and not m.kept(e)]
        lines = [m.read(e) for e in same]
        for e in m.reduced:
            kind, kept = e.src_conn.split("_", 1)
            wide = m.sdfg.arrays[e.data.data].dtype.ctype
            lines.append(f"{wide} whole_of_{kept} = {IDENTITY[kind].format(t=wide)};")
        if resident:
            lines += ["{", "const int64_t pass = lane_begin;"]
        else:
            lines.append("for (int64_t pass = lane_begin; pass < lane_end; pass += CAPACITY) {")
        for e in m.reduced:
            kind, kept = e.src_conn.split("_", 1)
            lines.append(f"{m.type_out(e)} {kind}_of_{kept} = {IDENTITY[kind].format(t=m.type_out(e))};")
        lines += [f"vm::Pack<{m.type_in(e)}, V> in_{e.dst_conn}[PASSES];" for e in packed]
        each = [
            "#pragma unroll",
            "for (int k = 0; k < PASSES; ++k) {",
            "const int64_t lane = pass + (int64_t)(k * TEAM + vm_member()) * V;",
            "{" if full else "if (lane < lane_end) {",
            *m.decode("lane", self.integer),
        ]
        if packed:
            lines += each
            for e in packed:
                lines += self.load(m, e)
            lines.append("}}")
        lines += each
        lines += [m.read(e) for e in m.reads if e not in same and e not in packed and not m.kept(e)]
        stores = [e for e in m.writes if e.data.wcr is None]
        lines += [f"vm::Pack<{m.type_out(e)}, V> out_{e.src_conn};" for e in stores if not m.kept(e)]
        inner = m.entry.map.params[-1]
        lines += [f"const int64_t first = {inner};", "#pragma unroll", "for (int v = 0; v < V; ++v) {"]
        guard = self.geometry.ragged
        lines.append("if (lane + v < lane_end) {" if guard else "{")
        lines.append(f"const int64_t {inner} = first + v;")
        for e in m.reads:
            if e in packed:
                lines.append(f"const {m.type_in(e)} {e.dst_conn} = in_{e.dst_conn}[k][v];")
            elif m.kept(e):
                shown = f"{e.data.data}[k][v]" if m.register(e) else m.element(e)
                lines.append(f"const {m.type_in(e)} {e.dst_conn} = {shown};")
        lines += m.declarations() + m.code
        for e in m.writes:
            if e.data.wcr is not None:
                kind, kept = e.src_conn.split("_", 1)
                total = f"{kind}_of_{kept}"
                lines.append(f"{total} = {COMBINE[kind].format(t=m.type_out(e), a=total, b=e.src_conn)};")
            else:
                lines.append(f"{f'{e.data.data}[k]' if m.kept(e) else f'out_{e.src_conn}'}[v] = {e.src_conn};")
        lines.append("}}")
        for e in stores:
            if not m.kept(e):
                lines += self.store(m, e)
        lines.append("}}")
        for e in m.reduced:
            kind, kept = e.src_conn.split("_", 1)
            wide = m.sdfg.arrays[e.data.data].dtype.ctype
            more = COMBINE[kind].format(t=wide, a=f"whole_of_{kept}", b=f"({wide}){kind}_of_{kept}")
            lines.append(f"whole_of_{kept} = {more};")
        return [*lines, "}", *self.reduce(m)]

    def load(self, m: _Map, e: Any) -> list[str]:
        """A fragment from memory: at once where it is contiguous, else element by element."""
        step, name, rest = m.step(e), f"in_{e.dst_conn}[k]", "lane_end - lane"
        if step == 1:
            return [f"vm::load<WIDE, RAGGED>({name}, {m.address(e)}, {rest});"]
        guard = "if (lane + v < lane_end) " if self.geometry.ragged else ""
        text = f"{name}[v] = ({m.address(e)})[v * ({cpp.sym2cpp(step)})];"
        return ["#pragma unroll", f"for (int v = 0; v < V; ++v) {guard}{text}"]

    def store(self, m: _Map, e: Any) -> list[str]:
        """A fragment to memory."""
        step, name = m.step(e), f"out_{e.src_conn}"
        if step == 1:
            return [f"vm::store<WIDE, RAGGED>({m.address(e)}, {name}, lane_end - lane);"]
        guard = "if (lane + v < lane_end) " if self.geometry.ragged else ""
        text = f"({m.address(e)})[v * ({cpp.sym2cpp(step or 0)})] = {name}[v];"
        return ["#pragma unroll", f"for (int v = 0; v < V; ++v) {guard}{text}"]

    def reduce(self, m: _Map) -> list[str]:
        """Over the team for values of a row, those of one kind together; totals stay each thread's own."""
        lines, together = [], dict[tuple[str, str], list[Any]]()
        for e in m.reduced:
            kind, kept = e.src_conn.split("_", 1)
            wide, target = m.sdfg.arrays[e.data.data].dtype.ctype, e.data.data
            if target.startswith("total_"):
                lines.append(f"{target} = {COMBINE[kind].format(t=wide, a=target, b=f'whole_of_{kept}')};")
            else:
                together.setdefault((kind, wide), []).append((kept, target))
        for (kind, wide), pairs in together.items():
            lines.append(f"{{ {wide} row[{len(pairs)}] = {{{', '.join(f'whole_of_{kept}' for kept, _ in pairs)}}};")
            lines.append(f"vm::over_group<{functor(kind)}, TEAM, TEAMS>(row);")
            for i, (_, target) in enumerate(pairs):
                lines.append(f"{target} = {COMBINE[kind].format(t=wide, a=target, b=f'row[{i}]')};")
            lines.append("}")
        return lines


def functor(kind: str) -> str:
    """The reduction of `native/kernel.cuh` of a kind."""
    return f"vm::{kind}_" if kind in ("max", "min") else f"vm::{kind}"


class _Map:
    """A map around one tasklet, and how its edges touch arrays."""

    def __init__(self, sdfg: Any, state: Any, entry: Any, tasklet: Any) -> None:
        self.sdfg, self.entry, self.tasklet = sdfg, entry, tasklet
        self.reads = [e for e in state.in_edges(tasklet) if e.data.data is not None]
        self.writes = [e for e in state.out_edges(tasklet) if e.data.data is not None]
        self.reduced = [e for e in self.writes if e.data.wcr is not None]
        self.code = tasklet.code.as_string.splitlines()

    def type_in(self, e: Any) -> str:
        """The C++ type of what an edge brings."""
        return str(self.tasklet.in_connectors[e.dst_conn].ctype)

    def type_out(self, e: Any) -> str:
        """The C++ type of what an edge takes away."""
        return str(self.tasklet.out_connectors[e.src_conn].ctype)

    def local(self, e: Any) -> bool:
        """Whether an edge touches a scalar of the thread."""
        return type(self.sdfg.arrays[e.data.data]).__name__ == "Scalar"

    def register(self, e: Any) -> bool:
        """Whether an edge touches fragments."""
        return bool(self.sdfg.arrays[e.data.data].storage == FRAGMENT)

    def kept(self, e: Any) -> bool:
        """Whether an edge touches fragments or shared memory."""
        return self.sdfg.arrays[e.data.data].storage in (FRAGMENT, SQUARE)

    def _depends(self, e: Any, parameters: list[str]) -> list[Any]:
        """The strides of the dimensions that an edge indexes by these loops."""
        if self.local(e):
            return []
        index = zip(e.data.subset.min_element(), self.sdfg.arrays[e.data.data].strides, strict=True)
        return [s for i, s in index if {str(f) for f in getattr(i, "free_symbols", ())} & set(parameters)]

    def step(self, e: Any) -> Any:
        """Elements between neighboring lanes; None if all lanes of a fragment share one."""
        found = self._depends(e, self.entry.map.params[-1:])
        return found[0] if found else None

    def outer(self, e: Any) -> bool:
        """Whether what an edge touches differs from fragment to fragment."""
        return bool(self._depends(e, self.entry.map.params[:-1]))

    def address(self, e: Any) -> str:
        """The address of the element of an edge."""
        array = self.sdfg.arrays[e.data.data]
        where = sum(i * s for i, s in zip(e.data.subset.min_element(), array.strides, strict=True))
        return f"{e.data.data} + {cpp.sym2cpp(where)}"

    def element(self, e: Any) -> str:
        """The element of an edge."""
        return e.data.data if self.local(e) else f"*({self.address(e)})"

    def read(self, e: Any) -> str:
        """Read into the connector; a whole array is passed as a pointer."""
        kind = self.type_in(e)
        if kind.endswith("*"):
            return f"const {kind} {e.dst_conn} = {e.data.data};"
        return f"const {kind} {e.dst_conn} = {self.element(e)};"

    def declarations(self) -> list[str]:
        """The connectors that the code writes."""
        return [f"{self.type_out(e)} {e.src_conn};" for e in self.writes]

    def decode(self, lane: str, integer: str) -> list[str]:
        """The loops' variables from a position among all lanes."""
        parameters, lines = self.entry.map.params, []
        for name in reversed(parameters[1:]):
            parts = f"({integer}){lane}", f"({integer}){name}_size"
            lines.append(f"const int64_t {name} = {' % '.join(parts)};")
            lines.append(f"const int64_t before_{name} = {' / '.join(parts)};")
            lane = f"before_{name}"
        return [*lines, f"const int64_t {parameters[0]} = {lane};"]
