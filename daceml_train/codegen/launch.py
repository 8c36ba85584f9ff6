"""Launch: a kernel as the runtime sees it: its identity, its C++ source, and what to pass to it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import sympy

from daceml_train.codegen.domain import analyse
from daceml_train.codegen.plan import TILE, Layout, Plan, hint
from daceml_train.ops.elementwise import Elementwise, Full
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.random import Uniform
from daceml_train.tensor import Dim, Tensor, product, simplify, symbol

GRAIN = 1 << 15
"""Element-operations that are worth a thread: some ten microseconds."""
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
    plan: Plan = field(repr=False, compare=False)

    @functools.cached_property
    def source(self) -> str:
        """The C++ text. Made when first asked for: a kernel that is compiled already needs none, and no DaCe."""
        from daceml_train.codegen.source import source

        return source(self.plan, self.key)


@functools.cache
def generator_version() -> str:
    """A hash of the code generator itself, so that a cache never serves what an older one made."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted([*folder.glob("*.py"), *folder.glob("native/*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def generate(kernel: Kernel, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode:
    """The code of a kernel on operands and results that lie in memory like this. Raises `Refused` with a sentence."""
    plan = Plan(analyse(kernel, [Tensor(o.shape, o.dtype) for o in operands]), operands, results)
    integers = (symbol("blocks"), *plan.integers().values())
    scratch = tuple(simplify(array.bytes) for array in plan.scratch)
    key = hashlib.sha256(f"{plan.structure()}\n{generator_version()}".encode()).hexdigest()[:20]
    return KernelCode(key, integers, scratch, _units(plan), _work(plan), plan)


def _units(plan: Plan) -> Dim:
    """How many parts the parallel loop could have at most."""
    rows = product(a.size for a in plan.row_axes)
    if plan.mode == "rows" or not plan.lane_axes:
        return rows
    lanes = plan.lane_axes[-1].size
    size = TILE if plan.mode == "tiles" else CHUNK
    chunks = -(-lanes // size) if isinstance(lanes, int) else sympy.ceiling(lanes / size)
    outer = rows if plan.mode == "flat" else product(a.size for a in plan.lane_axes[:-1])
    return simplify(outer * chunks)


def _work(plan: Plan) -> Dim:
    """Element-operations: every value once per element of its axes, memory accesses included."""
    total: Dim = 0
    for name, leaf in plan.leaves.items():
        axes = [a for a in plan.row_axes + plan.lane_axes if a.name in plan.needs[name]]
        if leaf.reduced:
            axes = plan.row_axes + plan.lane_axes
        op = leaf.op
        flops = op.row.flops if isinstance(op, Elementwise) else 42 if isinstance(op, Uniform) else 1
        if not isinstance(op, Full):
            total = total + flops * product(a.size for a in axes)
    return simplify(total)


def block_count(rows: int, work: int, threads: int) -> int:
    """How many blocks to run in parallel: at least one, at most `threads`, each with enough to do."""
    return max(1, min(threads, rows, work // GRAIN))


def estimate(size: Dim) -> float:
    """A number for a size that may hold symbols."""
    return hint(size)
