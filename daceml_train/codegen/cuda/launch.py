"""Launch: a CUDA kernel from the runtime's perspective: its identity, its text, and its arguments."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from daceml_train.analysis.device_model import FULL_THREADS
from daceml_train.codegen.cpu.launch import KernelCode, Layout, generator_version, work
from daceml_train.codegen.cuda.geometry import COMBINING, SIDE
from daceml_train.codegen.cuda.plan import CudaPlan, Half, groups
from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.ops.kernel import Kernel
from daceml_train.tensor import Dim, Tensor, product, simplify, symbol

__all__ = ["CudaCode", "CudaPart", "Layout", "generate", "variants", "whole_of"]

RESIDENT, RESIDENT_SUMS = 2048, 1024
"""Threads per multiprocessor: of all kernels, and of those whose blocks store partial results."""
MOST_BLOCKS = (1 << 31) - 1


@dataclass(frozen=True)
class CudaCode(KernelCode):
    """The generated function `int launch_<key>(void** pointers, const int64_t* integers, void* stream)`.

    `pointers`, `integers` and `scratch` are as for a CPU kernel: inputs, outputs that update no input, scratch arrays;
    `symbol("blocks")` in integers and scratch stands for the number of thread blocks, which `blocks` proposes. The
    function launches one or more kernels on the stream and returns CUDA's error code, 0 on success. It neither
    allocates nor waits, and may be captured. Scratch may be uninitialized and needs an alignment of 16 bytes.
    """

    threads: int = 256
    partial: bool = False
    """Whether blocks store partial results, so more blocks cost more."""
    finest: Dim = 1
    """The number of blocks if each thread has the least work; `rows` is that of the geometry's work per thread."""

    @property
    def shape(self) -> str:
        """See `KernelCode`: the block, the team that shares a row, and the lanes of a thread."""
        assert isinstance(self.plan, CudaPlan)
        g = self.plan.geometry
        return f"{g.threads} threads, teams of {g.team}, {g.fragments} x {g.width} lanes each"

    @property
    def parts(self) -> tuple[CudaPart, ...]:
        """The two launches of a kernel whose second one combines sums over rows: others need not wait for it."""
        assert isinstance(self.plan, CudaPlan)
        halves = self.plan.halves
        return () if halves is None else tuple(_part(self, half, k) for k, half in enumerate(halves))

    @functools.cached_property
    def source(self) -> str:
        """The CUDA text, without the header."""
        from daceml_train.codegen.cuda.source import source

        assert isinstance(self.plan, CudaPlan)
        return source(self.plan, self.key)

    def blocks(self, value: Callable[[Dim], int], processors: int) -> int:
        """The number of blocks on a device with this many multiprocessors; `value` evaluates sizes."""
        full = -(-processors * FULL_THREADS // self.threads)
        useful = max(1, value(self.rows), min(full, value(self.finest)))
        if not self.partial:
            return min(useful, MOST_BLOCKS)
        return min(useful, processors * max(1, RESIDENT_SUMS // self.threads))

    @property
    def launches(self) -> int:
        """The number of launches on the device."""
        assert isinstance(self.plan, CudaPlan)
        return self.plan.launches

    def limit(self, value: Callable[[Dim], int], processors: int) -> str:
        """What keeps a launch below `FULL_THREADS` threads per multiprocessor; empty if nothing does.

        `elements`: every thread has one access; `rows`: a row belongs to one team; `lanes`: a thread sums all rows.
        """
        assert isinstance(self.plan, CudaPlan)
        if self.blocks(value, processors) * self.threads >= processors * FULL_THREADS:
            return ""
        if self.plan.loops.mode == "tiles":
            return "lanes"
        rows = self.plan.loops.mode == "rows" and not self.plan.geometry.tiled
        return "rows" if rows else "elements"


@dataclass(frozen=True, kw_only=True)
class CudaPart(KernelCode):
    """One launch of a kernel that has two: `launch_<key>` takes the pointers that it touches, and all integers.

    The scratch arrays are the last pointers. The first part writes them, the second one reads those that it has.
    """

    whole: CudaCode = field(repr=False)
    number: int = 0
    positions: tuple[int, ...] = ()
    """Of the pointers of the whole kernel, those that it touches."""
    writes: tuple[int, ...] = ()
    """Of its own pointers, those that it writes."""

    @property
    def shape(self) -> str:
        return self.whole.shape

    @functools.cached_property
    def source(self) -> str:
        """The CUDA text of the whole kernel."""
        return self.whole.source

    def threads(self, value: Callable[[Dim], int], processors: int) -> int:
        """The threads of the launch."""
        plan = self.whole.plan
        assert isinstance(plan, CudaPlan)
        if not self.number:
            return self.whole.blocks(value, processors) * self.whole.threads
        return COMBINING * value(groups(product(a.size for a in plan.loops.lane_axes), SIDE))


def _part(whole: CudaCode, half: Half, number: int) -> CudaPart:
    plan = whole.plan
    assert isinstance(plan, CudaPlan)
    positions, written = plan.positions(half.arrays), plan.positions(half.writes)
    scratch = dict(zip(plan.positions(a.name for a in plan.arrays.scratch), whole.scratch, strict=True))
    return CudaPart(
        f"{whole.key}_{number}",
        whole.integers,
        tuple(scratch[p] for p in positions if p in scratch),
        whole.rows,
        whole.work,
        whole=whole,
        number=number,
        positions=positions,
        writes=tuple(i for i, p in enumerate(positions) if p in written),
    )


def whole_of(code: KernelCode) -> CudaCode:
    """The kernel of which a code is a part, or the code itself."""
    if isinstance(code, CudaPart):
        return code.whole
    assert isinstance(code, CudaCode)
    return code


@functools.cache
def version() -> str:
    """A hash of the CUDA code generator, so a cache never returns the output of an older version."""
    digest = hashlib.sha256(generator_version().encode())
    folder = Path(__file__).parent
    for path in sorted([*folder.glob("*.py"), *folder.glob("native/*.cuh")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def generate(kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout]) -> CudaCode:
    """The code of a kernel for these operand and result layouts. Raises `Refused` with a reason."""
    return _code(CudaPlan(analyze(kernel, [Tensor(o.shape, o.dtype) for o in operands]), operands, results))


def variants(code: CudaCode) -> list[CudaCode]:
    """The kernel under every candidate launch configuration, the current one first; scratch and block counts differ."""
    plan = code.plan
    assert isinstance(plan, CudaPlan)
    loops, others = plan.loops, [g for g in plan.choices if g != plan.geometry]
    return [code, *(_code(CudaPlan(loops.domain, loops.operands, loops.results, g)) for g in others)]


def _code(plan: CudaPlan) -> CudaCode:
    integers = (symbol("blocks"), *plan.integers().values())
    scratch = tuple(simplify(array.bytes) for array in plan.arrays.scratch)
    key = hashlib.sha256(f"{plan.structure()}\n{version()}".encode()).hexdigest()[:20]
    partial = any(a.axes[:1] in (("part",), ("block",)) for a in plan.arrays.scratch)
    return CudaCode(
        key,
        integers,
        scratch,
        _units(plan, plan.geometry.each),
        work(plan),
        plan,
        threads=plan.geometry.threads,
        partial=partial,
        finest=_units(plan, 1),
    )


def _units(plan: CudaPlan, each: int) -> Dim:
    """The largest useful number of blocks if a thread does so much work in sequence."""
    loops, g = plan.loops, plan.geometry
    rows = product(a.size for a in loops.row_axes)
    if loops.mode == "tiles":
        return plan.tiles
    if loops.squares:
        sizes = [a.size for a in loops.row_axes[:-1]]
        ends = [groups(a.size, 32) for a in (loops.row_axes[-1], loops.lane_axes[-1])]
        return simplify(product([*sizes, *ends]))
    if loops.mode == "flat":
        last = groups(loops.lane_axes[-1].size, g.width) if loops.lane_axes else 1
        return groups(simplify(rows * last), g.threads * each)
    sums = any(leaf.reduced and loops.kind(leaf) != "row" for leaf in loops.leaves.values())
    return simplify(plan.tiles * groups(simplify(rows), g.teams * (each if sums else 1)))
