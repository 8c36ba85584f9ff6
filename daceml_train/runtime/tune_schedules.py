"""Measured schedules: the candidates of each tiled kernel are compiled, checked, and timed, and the fastest is kept.

    cost model -> a few candidates -> compiled -> run in a copy of the process, on random operands -> compared with the
    operators themselves, in float64 -> timed in turns -> the fastest, on disk

A candidate with another result, or that ends the process, is dropped, and the report says so. Nothing that was not
compared is ever used.
"""

from __future__ import annotations

import ctypes
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.tiles import schedules
from daceml_train.errors import DacemlError, Unsupported, why
from daceml_train.lowering.device import CPU
from daceml_train.runtime.forked import Forked, Tell
from daceml_train.runtime.schedules import key_of, store

TOLERANCE = 1e-4
"""How far a candidate's result may be from that of the operators, norm-wise and relative to it."""
ROUNDS, VISIT = 5, 0.004
"""Rounds in which all candidates are timed in turns, and seconds of processor time of each turn."""
MARGIN = 0.97
"""Another schedule than the default is chosen if it takes at most this share of its time."""
LARGEST = 1 << 26
"""Points of a nest above which nothing is compared, and so nothing is measured: it would take gigabytes."""
WAIT = 60.0
"""Seconds that a candidate may take, with its comparison."""


@dataclass
class Candidate:
    """A schedule, the cost model's cycles, and what was found."""

    schedule: str
    cycles: float
    seconds: float | None = None
    """Processor time of a call on one thread."""
    refusal: str = ""
    """Why it must not be used."""


@dataclass
class Nest:
    """A tiled kernel and its candidates; the first is the default."""

    name: str
    key: str
    candidates: list[Candidate] = field(default_factory=list)

    @property
    def chosen(self) -> Candidate:
        """The fastest of those that are right; the default unless another one is clearly faster."""
        default = self.candidates[0]
        timed = [c for c in self.candidates if c.seconds is not None and not c.refusal]
        best = min(timed, key=lambda c: c.seconds or math.inf, default=default)
        if default.refusal or default.seconds is None or best.seconds is None:
            return best
        return best if best.seconds <= MARGIN * default.seconds else default


Compile = Callable[[Sequence[KernelCode]], Mapping[str, int]]
"""Kernels -> the address of each by its key."""


def explore(
    codes: Sequence[KernelCode],
    names: Sequence[str],
    compile_codes: Compile,
    path: Path | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Nest]:
    """Measure the schedules of tiled kernels, and store the choices in the file `path`."""
    found: list[Nest] = []
    variants = [list(CPU.toolchain.variants(code)) for code in codes]
    total, done = sum(map(len, variants)), 0
    for code, name, tried in zip(codes, names, variants, strict=True):
        assert code.nest is not None
        cycles = dict(schedules(*code.nest))
        nest = Nest(name, key_of(code), [Candidate(c.schedule, cycles.get(c.schedule, math.nan)) for c in tried])
        found.append(nest)
        _measure(nest, tried, compile_codes)
        done += len(tried)
        progress(done, total)
        if path is not None and nest.chosen.seconds is not None:
            times = {c.schedule: c.refusal or c.seconds for c in nest.candidates}
            store(path, {nest.key: {"chosen": nest.chosen.schedule, "candidates": times}})
    return found


def _measure(nest: Nest, codes: Sequence[KernelCode], compile_codes: Compile) -> None:
    """Compare all candidates with the operators, then time those that are right."""
    try:
        addresses = compile_codes(codes)
        operands, expected = _oracle(codes[0])
    except (DacemlError, MemoryError) as error:
        for candidate in nest.candidates:
            candidate.refusal = f"not compared: {why(error)}"
        return
    calls = [_call(code, addresses[code.key], operands) for code in codes]

    def compared(number: int) -> Any:
        call, results = calls[number]
        call()
        return _apart(results, expected)

    for number, refusal in _in_copies(compared, list(range(len(codes)))).items():
        nest.candidates[number].refusal = refusal
    right = [number for number, candidate in enumerate(nest.candidates) if not candidate.refusal]

    def timed(_: int) -> Any:
        return _times([calls[number][0] for number in right])

    found = _in_copies(timed, [0] if right else [])
    for number, seconds in zip(right, found.get(0, ()), strict=False):
        nest.candidates[number].seconds = seconds if isinstance(seconds, float) else None


def _in_copies(work: Callable[[int], Any], waiting: list[int]) -> dict[int, Any]:
    """The results of `work` on each number, in a copy of the process; where a number ends it, the reason is its result,
    and another copy goes on after it.
    """
    found: dict[int, Any] = {}
    while waiting:

        def visit(tell: Tell, left: Sequence[int] = tuple(waiting)) -> dict[str, Any]:
            for number in left:
                tell({"begin": number})
                tell({"of": number, "found": work(number)})
            return {}

        forked, running, since = Forked(visit), -1, time.monotonic()
        while forked.result is None and time.monotonic() - since <= WAIT:
            for message in forked.poll():
                since = time.monotonic()
                if "begin" in message:
                    running = message["begin"]
                    waiting.remove(running)
                else:
                    found[message["of"]] = message["found"]
            time.sleep(0.002)
        failure = f"did not end within {WAIT:.0f} s" if forked.result is None else forked.result.get("error")
        forked.end()
        if failure and running not in found:
            found |= dict.fromkeys([running] if running >= 0 else waiting, str(failure))
        if running < 0:  # nothing was begun: none is to blame, and none can be measured
            break
    return found


def _times(calls: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of processor time of each call, the least of several turns."""
    best = [math.inf] * len(calls)
    for _ in range(ROUNDS):
        for position, call in enumerate(calls):
            begun, count = time.thread_time(), 0
            while time.thread_time() - begun < VISIT:
                call()
                count += 1
            best[position] = min(best[position], (time.thread_time() - begun) / count)
    return best


@dataclass(frozen=True)
class _Array:
    """An array of a layout: a view for NumPy, and the address of its first element."""

    view: Any
    address: int

    @staticmethod
    def of(layout: Layout, draw: Callable[[int], Any]) -> _Array:
        """Memory of a layout, filled by `draw`; along strides of zero, it has one element."""
        sizes, strides = [int(n) for n in layout.shape], [int(s) for s in layout.strides]
        spans = [s * (n - 1) for n, s in zip(sizes, strides, strict=True)]
        first = -sum(span for span in spans if span < 0)
        base = np.ascontiguousarray(draw(sum(map(abs, spans)) + 1), dtype=np.float32)
        view = np.lib.stride_tricks.as_strided(base[first:], sizes, [4 * s for s in strides])
        return _Array(view, base.ctypes.data + 4 * first)


def _call(code: KernelCode, address: int, operands: Sequence[_Array]) -> tuple[Callable[[], None], list[_Array]]:
    """A call of a kernel on one thread, and the arrays that it writes."""
    assert code.nest is not None
    results = [_Array.of(layout, lambda n: np.full(n, math.nan)) for layout in code.nest[2]]
    arrays = (*operands, *results)
    pointers = (ctypes.c_void_p * len(arrays))(*(x.address for x in arrays))
    integers = (ctypes.c_int64 * 1)(1)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(address)

    def call() -> None:
        function(ctypes.addressof(pointers), ctypes.addressof(integers))

    return call, results


def _oracle(code: KernelCode) -> tuple[list[_Array], list[Any]]:
    """Random operands, and the results of the kernel's operators on them, computed in float64 by NumPy."""
    assert code.nest is not None
    kernel, layouts, _ = code.nest
    if isinstance(code.work, int) and code.work > LARGEST:
        raise Unsupported(f"a nest of {code.work} operations, too many to compare with the operators")
    generator = np.random.default_rng(0)
    given: list[_Array] = []
    results: list[Any] = []
    draws = (generator.standard_normal, lambda n: generator.random(n) + 0.5)
    for draw in draws:  # where numbers of any sign have no result, positive ones may
        given = [_Array.of(layout, draw) for layout in layouts]
        with np.errstate(all="ignore"):
            results = list(kernel.evaluate(*(x.view.astype(np.float64) for x in given)))
        if all(bool(np.isfinite(y).all()) for y in results):
            break
    return given, results


def _apart(results: Sequence[_Array], expected: Sequence[Any]) -> str:
    """How a result is wrong; empty if it is right."""
    for position, (array, right) in enumerate(zip(results, expected, strict=True)):
        found, finite = array.view.astype(np.float64), np.isfinite(right)
        if not np.array_equal(np.isfinite(found), finite):
            return f"result {position} is not finite where the operators' is, or the other way around"
        distance = float(np.linalg.norm((found - right)[finite]))
        length = float(np.linalg.norm(right[finite]))
        if distance > TOLERANCE * length + 1e-30:
            return f"result {position} is {distance / max(length, 1e-30):.1e} of its norm away from the operators'"
    return ""


def as_text(nests: Sequence[Nest]) -> str:
    """The nests as JSON."""
    return json.dumps([{**vars(n), "candidates": [vars(c) for c in n.candidates]} for n in nests], indent=1)


__all__ = ["Candidate", "Nest", "as_text", "explore"]
