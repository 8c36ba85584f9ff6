"""The launches of a CUDA kernel's SDFG: the content of a map over blocks, and the memlets of its tasklets."""

from __future__ import annotations

from typing import Any

import dace
from dace import subsets
from dace.memlet import Memlet
from dace.sdfg.state import LoopRegion

from daceml_train.codegen.cpu.emitter import TYPES, Code, Over, after, element, sym
from daceml_train.codegen.cpu.sdfg import Builder
from daceml_train.codegen.cuda.geometry import SIDE
from daceml_train.codegen.cuda.plan import CudaPlan
from daceml_train.codegen.cuda.schedule import BLOCKS, FRAGMENT, LANES, ONCE, SQUARE
from daceml_train.codegen.kernel.arrays import Array


class Launches(Builder):
    """The base of a builder of CUDA kernels. `kernel` begins a launch, `launch` ends it.

    `conditions` maps labels to the condition under which a thread stores a value that is stored once.
    """

    plan: CudaPlan

    def __init__(self, plan: CudaPlan, name: str) -> None:
        self.geometry, self.conditions = plan.geometry, dict[str, str]()
        self.early: list[str] = []
        """Values of the current kernel that its threads compute first."""
        self.holding: set[str] = set()
        """Arguments that are already in registers."""
        super().__init__(plan, name)

    def compute_early(self, block: Any) -> None:
        """Fill the first state of a launch."""
        raise NotImplementedError

    # ---- descriptors and memlets ----------------------------------------------------------------------------------
    def use(self, sdfg: Any, name: str) -> None:
        """Declare a planned array in an SDFG, once."""
        if name in sdfg.arrays:
            return
        array = self.arrays[name]
        shape = [self._extent(array, a) for a in array.axes]
        if name in self.plan.fragments:
            sdfg.add_array(name, shape or [1], TYPES[array.dtype], storage=FRAGMENT, transient=True)
        elif name in self.plan.squares:
            strides = (SIDE + 1, 1)
            sdfg.add_array(name, (SIDE, SIDE), TYPES[array.dtype], SQUARE, transient=True, strides=strides)
        else:
            sdfg.add_array(name, shape or [1], TYPES[array.dtype], strides=self._strides(array) or [1])

    def _extent(self, array: Array, axis: str) -> Any:
        known = {"block": sym("tiles") * sym("parts"), "part": sym("parts")}
        return known[axis] if axis in known else self.sizes[axis]

    def _strides(self, array: Array) -> list[Any]:
        if array.pointer[0] != "scratch":
            return super()._strides(array)
        strides: list[Any] = []
        step: Any = 1
        for axis in reversed(array.axes):
            strides.append(step)
            step = step * self._extent(array, axis)
        return strides[::-1]

    def at(self, name: str, **replaced: Any) -> Memlet:
        """The element of a planned array at the current loop indices."""
        index: list[Any] = []
        for axis in self.arrays[name].axes:
            where = replaced.get(axis, sym(axis))
            if name in self.plan.squares:
                where = where - sym("lane_group" if axis in self.loops.lane_set else "row_group")
            index.append(where)
        return element(name, subsets.Range([(i, i, 1) for i in index or [0]]))

    def lanes(self) -> Over:
        """The loops of a lane map. `lane_begin` to `lane_end` are distributed over blocks, teams and threads."""
        axes = self.loops.lane_axes
        if len(axes) == 1:
            return [(axes[0].name, sym("lane_begin"), sym("lane_end"))]
        return [(a.name, 0, self.sizes[a.name]) for a in axes]

    # ---- launches -------------------------------------------------------------------------------------------------
    def kernel(self, label: str, count: Any, threads: int, mapping: dict[str, Any]) -> Any:
        """A nested SDFG for the blocks of a launch; `launch` inserts it into the outer one."""
        self.early, self.holding = [], set()
        block = dace.SDFG(f"{self.name}_{label}")
        after(block, "first")
        self.launching = (label, count, threads, mapping)
        return block

    def launch(self, block: Any) -> None:
        """Finish the nested SDFG of a launch, and pass every array that it uses whole."""
        label, count, threads, mapping = self.launching
        self.compute_early(block)
        part = dace.symbolic.int_floor(sym("block"), sym("tiles"))
        mapping = {"part": part, "tiles": sym("tiles"), "parts": sym("parts"), **mapping}
        entry = self.nest(block, label, mapping, count, BLOCKS)
        if entry is not None:  # else every value it would compute is computed at its uses
            entry.map.gpu_block_size = [threads, 1, 1]

    def loop(self, region: Any, variable: str, first: str, last: str, step: str, unroll: int | None = None) -> Any:
        """A loop after all blocks of a region; without `unroll`, the compiler decides how often it is unrolled."""
        result = LoopRegion(
            f"{variable}{region.number_of_nodes()}",
            f"{variable} < {last}",
            variable,
            f"{variable} = {first}",
            f"{variable} = {variable} + {step}",
            unroll=unroll is not None,
            unroll_factor=unroll or 0,
        )
        (previous,) = region.sink_nodes() or (None,)
        region.add_node(result, is_start_block=previous is None)
        if previous is not None:
            region.add_edge(previous, result, dace.InterstateEdge())
        self.inner.add(variable)
        return result

    def tasklet(
        self,
        region: Any,
        label: str,
        code: Code,
        over: Over = (),
        schedule: Any = LANES,
        state: Any = None,
        condition: str = "",
    ) -> None:
        """A state with one tasklet; none without outputs.

        It is under a lane map if `over` names loops. Otherwise all threads compute it, and one stores to memory.
        """
        if not code.outs:
            return
        if not over and any(m.data in self.arrays for m, _ in code.outs.values()):
            own = "lane_begin == 0 && vm_member() == 0" if label == "row_end" or self.tiled else "block == 0"
            label = f"{label}_{len(self.conditions)}"
            self.conditions[label] = condition or (own if "lane" in own else f"{own} && vm_thread() == 0")
            over, schedule = [("once", 0, 1)], ONCE
        super().tasklet(region, label, code, over, schedule, state)
