"""Launch: a kernel from the runtime's perspective: its identity, its C++ source, and its arguments."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import sympy

from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.codegen.kernel.loops import SQUARE, TILE, Layout
from daceml_train.codegen.kernel.plan import Plan
from daceml_train.codegen.kernel.staging import RANDOM_COST
from daceml_train.ops.elementwise import Elementwise, Full
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.random import Uniform
from daceml_train.tensor import Dim, Tensor, product, simplify, symbol

__all__ = ["KernelCode", "Layout", "block_count", "generate"]

GRAIN = 1 << 15
"""Element-operations that justify a thread: about ten microseconds."""
CHUNK = 1024
"""Lanes that make one unit of the parallel loop where rows are cut."""


@dataclass(frozen=True)
class KernelCode:
    """The generated function `kernel_<key>(void** pointers, const int64_t* integers)`.

    `pointers`: inputs, outputs that update no input, scratch arrays. `integers` are the values to pass, `scratch` the
    bytes of each scratch array; both may contain size symbols and `symbol("blocks")`, the number of parallel blocks,
    which `block_count(rows, work, threads)` proposes. Kernels of equal structure have equal keys for all sizes.
    """

    key: str
    integers: tuple[Dim, ...]
    scratch: tuple[Dim, ...]
    rows: Dim
    work: Dim
    plan: Plan | None = field(default=None, repr=False, compare=False)
    text: str = field(default="", repr=False, compare=False)
    """The C++ text of a hand-written kernel, which has no plan."""
    nest: tuple[Kernel, tuple[Layout, ...], tuple[Layout, ...]] | None = field(default=None, repr=False, compare=False)
    """The kernel and the layouts of its operands and results, where it may have other schedules."""
    schedule: str = field(default="", repr=False, compare=False)
    """The schedule that it has, of those."""

    @property
    def parts(self) -> Sequence[KernelCode]:
        """The launches of a kernel that has several, if they can be apart; only on a GPU."""
        return ()

    @property
    def shape(self) -> str:
        """A description of the launch configuration on a GPU; empty for the CPU."""
        return ""

    @functools.cached_property
    def source(self) -> str:
        """The C++ text, generated on first use: a kernel that is already compiled needs neither it nor DaCe."""
        if self.plan is None:
            return self.text
        importlib.import_module("daceml_train.sdfg.convert")  # imports DaCe without its output in a notebook
        from daceml_train.codegen.cpu.source import source

        return source(self.plan, self.key)


def generator_files() -> list[Path]:
    """The sources of the code generator, apart from those for a GPU."""
    codegen = Path(__file__).parents[1]
    folders = [codegen / name for name in ("kernel", "cpu", "library", "library/native")]
    return sorted(path for folder in folders for path in (*folder.glob("*.py"), *folder.glob("*.h")))


@functools.cache
def generator_version() -> str:
    """A hash of the code generator itself, so a cache never returns the output of an older version."""
    digest = hashlib.sha256()
    for path in generator_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def generate(kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode:
    """The code of a kernel for these operand and result layouts. Raises `Refused` with a reason."""
    plan = Plan(analyze(kernel, [Tensor(o.shape, o.dtype) for o in operands]), operands, results)
    integers = (symbol("blocks"), *plan.integers().values())
    scratch = tuple(simplify(array.bytes) for array in plan.arrays.scratch)
    key = hashlib.sha256(f"{plan.structure()}\n{generator_version()}".encode()).hexdigest()[:20]
    return KernelCode(key, integers, scratch, _units(plan), work(plan), plan)


def _units(plan: Plan) -> Dim:
    """The largest possible number of iterations of the parallel loop."""
    rows, lanes = plan.loops.row_axes, plan.loops.lane_axes
    if plan.loops.mode == "rows" or not lanes:
        return product(a.size for a in rows)
    if plan.loops.mode == "tiles":
        return simplify(product(a.size for a in lanes[:-1]) * groups(lanes[-1].size, TILE))
    sizes = [a.size for a in rows]
    if plan.loops.squares:
        sizes[-1] = groups(sizes[-1], SQUARE)
    return simplify(product(sizes) * groups(lanes[-1].size, CHUNK))


def groups(size: Dim, group: int) -> Dim:
    """How many groups hold `size` elements."""
    return -(-size // group) if isinstance(size, int) else sympy.ceiling(size / group)


def work(plan: Plan) -> Dim:
    """Element-operations: every value once per element of its axes, memory accesses included."""
    loops, total = plan.loops.row_axes + plan.loops.lane_axes, simplify(0)
    for name, leaf in plan.loops.leaves.items():
        axes = loops if leaf.reduced else [a for a in loops if a.name in plan.loops.needs[name]]
        op = leaf.op
        flops = op.row.flops if isinstance(op, Elementwise) else RANDOM_COST if isinstance(op, Uniform) else 1
        if not isinstance(op, Full):
            total = total + flops * product(a.size for a in axes)
    return simplify(total)


def block_count(rows: int, work: int, threads: int) -> int:
    """The number of parallel blocks: at least one, at most `threads`, each with enough work."""
    return max(1, min(threads, rows, work // GRAIN))
