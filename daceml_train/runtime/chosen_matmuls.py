"""Which matmuls of a program run in oneDNN instead of in MKL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daceml_train.lowering.program import Allocation, BufferView, CallLaunch, Program
from daceml_train.runtime.tune_matmul import Added, MatmulShape, MatmulTuner
from daceml_train.tensor import Dim, DType, same_shape


@dataclass(frozen=True)
class Chosen:
    """A matmul in oneDNN: what is added, and the slot of its result (None: the result is copied over the matrix that
    is added).
    """

    added: Added
    slot: int | None


@dataclass(frozen=True)
class Candidate:
    """A matmul that oneDNN can run: its launch, the shapes and strides of the two matrices, and how it would run."""

    launch: int
    a: BufferView
    b: BufferView
    chosen: Chosen


def candidates(program: Program) -> list[Candidate]:
    """The matmuls of a program that oneDNN can run."""
    found = []
    for index, launch in enumerate(program.launches):
        if isinstance(launch, CallLaunch) and launch.direct and launch.target in ("mm", "addmm"):
            out, *c, a, b = launch.arguments
            slot, over = program.slots[out.slot], bool(c) and c[0].slot == out.slot
            whole = slot.home is not Allocation.input and same_shape(out.shape, slot.shape)
            if out.dtype is not DType.float32 or not (whole or over):
                continue
            added: Added = "nothing" if not c else "row" if len(c[0].shape) == 1 else "result" if over else "matrix"
            found.append(Candidate(index, a, b, Chosen(added, None if over else out.slot)))
    return found


def in_onednn(
    matmuls: Sequence[Candidate], products: MatmulTuner, size_of: Callable[..., int], threads: int
) -> dict[int, Chosen]:
    """Launch -> how it runs in oneDNN, for the matmuls that are faster there."""
    chosen: dict[int, Chosen] = {}
    for found in matmuls:
        rows, inner, columns = map(size_of, (*found.a.shape, found.b.shape[1]))
        strides = _pair(found.a.strides, size_of), _pair(found.b.strides, size_of)
        if products.way(MatmulShape(rows, inner, columns, *strides, found.chosen.added, threads)) == "onednn":
            chosen[found.launch] = found.chosen
    return chosen


def _pair(strides: Sequence[Dim], size_of: Callable[..., int]) -> tuple[int, int]:
    outer, inner = map(size_of, strides)
    return outer, inner
