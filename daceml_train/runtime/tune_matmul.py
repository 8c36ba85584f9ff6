"""Which library computes a matmul: measured once per shape, layout, thread count and machine, and stored on disk.

PyTorch's `mm` calls its BLAS (MKL in the wheels); `mkldnn::_linear_pointwise` runs the same matmul in oneDNN. Which
one is faster depends on the processor (oneDNN by a factor of two where MKL does not use the widest vectors) and on
the layout, since oneDNN copies operands whose layout it cannot read. Both are measured as the executor runs them, with
results from its pool: fresh pages cost large results as much as the matmul. What was measured while other processes
had the machine serves this process alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from filelock import FileLock

from daceml_train.runtime.executor import Arena, Plan
from daceml_train.runtime.machine_load import Load, machine
from daceml_train.storage.files import keep
from daceml_train.storage.folders import make

SMALLEST = 1 << 20
"""Multiplications below which a matmul takes microseconds and the cheaper call of `mm` wins."""
ROUNDS = 5
"""The maximum number of alternating measurements per candidate; the fastest counts, since noise only adds."""
ENOUGH = 0.1
"""Seconds of measuring after which no further round begins: noise matters little to long runs."""
CLEAR = 1.4
"""No third round begins where the slower candidate takes this many times as long: noise is smaller."""
LARGEST = 1 << 32
"""Multiplications that are measured at most, of a larger matmul a part: a tenth of a second on one core.

Much smaller parts choose wrong: which library is faster changes between some hundred and some thousand columns.
"""
MARGIN = 0.95
"""oneDNN is chosen if it takes at most this share of the BLAS's time: its result is an allocation of its own."""

Added = Literal["nothing", "row", "matrix", "result"]
Way = Literal["blas", "onednn"]


@dataclass(frozen=True)
class MatmulShape:
    """A matmul `a @ b`, or `c + a @ b`, of float32 matrices: sizes, strides in elements, threads.

    `added` says what c is: nothing, one row for all rows, a matrix, or the matrix that the result overwrites.
    """

    rows: int
    inner: int
    columns: int
    a: tuple[int, int]
    b: tuple[int, int]
    added: Added
    threads: int

    @property
    def key(self) -> str:
        """The key under which the choice is stored."""
        sizes = f"{self.rows}x{self.inner}x{self.columns}"
        return f"{machine()}, {self.threads} threads: {sizes} {self.a} {self.b} {self.added}"

    def part(self) -> MatmulShape:
        """A smaller one for a matmul of more than `LARGEST` multiplications of dense matrices; else the whole."""
        sizes = [self.rows, self.inner, self.columns]
        while math.prod(sizes) > LARGEST:
            largest = sizes.index(max(sizes))
            sizes[largest] = -(-sizes[largest] // 2)
        rows, inner, columns = sizes
        a = _dense(self.a, (self.rows, self.inner), (rows, inner))
        b = _dense(self.b, (self.inner, self.columns), (inner, columns))
        if a is None or b is None:  # gaps between the rows would be others, for which oneDNN may have no fast kernel
            return self
        return replace(self, rows=rows, inner=inner, columns=columns, a=a, b=b)


@dataclass
class MatmulTuner:
    """Choices so far; `path` is the file that stores them between processes (None: in memory only).

    Where it is `shared`, all processes take the choice that one of them measured, under load or not.
    """

    path: Path | None = None
    shared: bool = False
    chosen: dict[str, Way] = field(default_factory=dict)
    kept: dict[str, Way] = field(default_factory=dict)
    """Those of `chosen` that are stored: they were measured while no other process had the machine."""

    def __post_init__(self) -> None:
        self._read()

    def _read(self) -> None:
        if self.path is not None and self.path.exists():
            try:
                known = json.loads(self.path.read_text())
                self.kept.update((key, way) for key, way in known.items() if way in get_args(Way))
            except (OSError, ValueError, AttributeError):  # damaged: measured again
                self.kept.clear()
        self.chosen |= self.kept

    def way(self, product: MatmulShape) -> Way:
        """The fastest library for this matmul here; measured if it is new."""
        if product.rows * product.inner * product.columns < SMALLEST or not available():
            return "blas"
        if product.key not in self.chosen and self.shared and self.path is not None:
            make(self.path.parent)
            with FileLock(self.path.with_suffix(".lock")):
                self._read()  # what others chose while this process waited
                if product.key not in self.chosen:
                    self.chosen[product.key] = self.kept[product.key] = measure(product)
                    self.save()
        if product.key not in self.chosen:
            load = Load()
            self.chosen[product.key] = measure(product)
            if not load.high():  # else another process measures it again
                self.kept[product.key] = self.chosen[product.key]
                self.save()
        return self.chosen[product.key]

    def save(self) -> None:
        """Write the choices atomically, merged with those that other processes stored in the meantime."""
        if self.path is None:
            return
        known = MatmulTuner(self.path).kept if self.path.exists() else {}
        keep(self.path, json.dumps(known | self.kept, indent=0).encode())


def available() -> bool:
    """Whether PyTorch has the oneDNN matmul for dense float32 matrices."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_call(a: Any, b: Any, c: Any, added: Added) -> tuple[str, tuple[Any, ...]]:
    """`c + a @ b.T` in oneDNN: the overload of `mkldnn::_linear_pointwise`, and its arguments."""
    if added in ("matrix", "result"):
        return "binary", (a, c, b, None, "add")
    return "", (a, b, c, "none", [], "")


def measure(product: MatmulShape) -> Way:
    """Time both libraries on matrices of this layout, alternating."""
    product = product.part()
    a = _matrix((product.rows, product.inner), product.a)
    b = _matrix((product.inner, product.columns), product.b)
    out = torch.empty(product.rows, product.columns, device="cpu")
    shape = (product.columns,) if product.added == "row" else (product.rows, product.columns)
    added = None if product.added == "nothing" else torch.zeros(shape, device="cpu")

    def blas() -> None:
        if added is None:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(added, a, b, out=out)

    onednn = planned(a, b, added, product.added)
    before = torch.get_num_threads()
    torch.set_num_threads(product.threads)
    try:
        with torch.no_grad():
            times = _alternate([blas, onednn])
    finally:
        torch.set_num_threads(before)
    return "onednn" if times[1] < MARGIN * times[0] else "blas"


def planned(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, added: Added) -> Callable[[], list[torch.Tensor]]:
    """A function that computes `c + a @ b` in oneDNN as the executor does.

    With `added="result"` the result overwrites c, else it is returned.
    """
    tensors = [a, b.t(), *([] if c is None else [c])]
    plan = Plan(4, Arena())
    for slot, tensor in enumerate(tensors):
        written = added == "result" and slot == 2
        plan.input_slot(slot, slot, tensor.dtype, tensor.shape, tensor.stride(), written)
    x, y, *z = (plan.view(slot, 0, t.dtype, t.shape, t.stride()) for slot, t in enumerate(tensors))
    if added != "result":
        plan.result_slot(3, a.dtype, (a.shape[0], b.shape[1]), (b.shape[1], 1))
    overload, arguments = onednn_call(x, y, z[0] if z else None, added)
    plan.call("mkldnn::_linear_pointwise", overload, arguments, [z[0] if added == "result" else 3])
    plan.finalize(0, [] if added == "result" else [3])
    return lambda: plan.run(tensors)


def _alternate(candidates: Sequence[Callable[[], object]]) -> list[float]:
    """The shortest time of each candidate over alternating runs, after one run each to warm up."""
    for candidate in candidates:
        candidate()
    best, begin = [float("inf")] * len(candidates), time.perf_counter()
    for rounds in range(1, ROUNDS + 1):
        for number, candidate in enumerate(candidates):
            start = time.perf_counter()
            candidate()
            best[number] = min(best[number], time.perf_counter() - start)
        if time.perf_counter() - begin > ENOUGH or (rounds > 1 and max(best) > CLEAR * min(best)):
            break
    return best


def _dense(strides: tuple[int, int], sizes: tuple[int, int], others: tuple[int, int]) -> tuple[int, int] | None:
    """The strides of a matrix of `others` sizes in the order of a dense one; None if that has gaps."""
    if strides == (sizes[1], 1):
        return others[1], 1
    return (1, others[0]) if strides == (1, sizes[0]) else None


def _matrix(sizes: tuple[int, int], strides: tuple[int, int]) -> torch.Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return torch.zeros(max(extent, 1), device="cpu").as_strided(sizes, strides)
