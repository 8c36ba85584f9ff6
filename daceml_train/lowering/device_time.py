"""Device time: the seconds of a program's launches on a GPU by its model (`analysis.device_model`).

A launch takes as long as its memory or its arithmetic, whichever is longer, and at least `launch_seconds`. Arrays that
were touched recently are in the L2, which keeps the most recently used ones; bytes that are not there come from memory,
and changed ones go back to it when they leave, unless their memory is free by then.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from daceml_train.analysis.device_model import ACHIEVED_MATMUL, L2_SHARE, DeviceModel
from daceml_train.codegen.cuda.launch import CudaCode, CudaPart, whole_of
from daceml_train.lowering.cost import Cost
from daceml_train.lowering.program import (
    BufferView,
    CallLaunch,
    ControlLaunch,
    CopyLaunch,
    KernelLaunch,
    Launch,
    Program,
    touched,
)
from daceml_train.tensor import Dim, DType, Tensor, symbol

Touched = tuple[tuple[Hashable, float], ...]
"""Arrays and the bytes of each that are touched."""


@dataclass(frozen=True)
class Operation:
    """A launch as the model sees it, whoever launches it."""

    name: str
    kind: str
    reads: Touched
    writes: Touched
    flops: float = 0.0
    results: float = 0.0
    """Elements of the results of a matmul or convolution."""
    dtype: str = ""
    """The type in which a matmul or convolution multiplies; empty for other operations."""
    converted: float = 0.0
    """Bytes that a library moves between layouts within the call."""
    threads: float = math.inf
    """Threads of the launch."""
    launches: int = 1
    """Launches on the device; a kernel that combines partial results of blocks has several."""

    @property
    def bytes(self) -> float:
        """Bytes touched."""
        return sum(size for _, size in (*self.reads, *self.writes)) + self.converted


@dataclass(frozen=True)
class Timed:
    """The predicted seconds of an operation, and what bounds them: `memory`, `L2`, `arithmetic` or `launch`."""

    operation: Operation
    seconds: float
    bound: str
    busy: float
    """Seconds of the whole device that it needs; the rest can run other launches at the same time."""


def timed(model: DeviceModel, operations: Iterable[Operation]) -> list[Timed]:
    """The seconds of operations that run one after another, the caches as a previous run of them leaves them."""
    operations = list(operations)
    cache, dead = _L2(model.l2 * L2_SHARE), _dead(operations)

    def missed(index: int) -> float:
        moved = cache.missed(operations[index])
        cache.drop(dead[index])
        return moved

    for index in range(len(operations)):
        missed(index)
    return [_timed(model, operation, missed(index)) for index, operation in enumerate(operations)]


def _dead(operations: Sequence[Operation]) -> list[list[Hashable]]:
    """Per operation, the arrays that it touches last, but for those that existed before, which are read first.

    Their memory is that of other arrays next: what they held is overwritten in the cache, not written back.
    """
    before: set[Hashable] = set()
    last: dict[Hashable, int] = {}
    for index, operation in enumerate(operations):
        before.update(array for array, _ in operation.reads if array not in last)
        last.update(dict.fromkeys((array for array, _ in (*operation.reads, *operation.writes)), index))
    dead: list[list[Hashable]] = [[] for _ in operations]
    for array, index in last.items():
        if array not in before:
            dead[index].append(array)
    return dead


def _timed(model: DeviceModel, operation: Operation, missed: float) -> Timed:
    times = {
        "memory": model.memory_seconds(missed, 0.0, operation.threads),
        "L2": model.memory_seconds(0.0, operation.bytes, operation.threads),
        "arithmetic": model.matmul_seconds(operation.flops, operation.results, operation.dtype)
        if operation.dtype
        else operation.flops / model.vector,
        "launch": model.launch_seconds,
    }
    bound = max(times, key=times.__getitem__)
    peak = ACHIEVED_MATMUL * model.peaks.get(operation.dtype, model.vector)
    rate = peak if operation.dtype else model.vector
    busy = max(model.memory_seconds(missed, operation.bytes), operation.flops / rate)
    seconds = times[bound] + (operation.launches - 1) * model.launch_seconds
    return Timed(operation, seconds, bound, min(busy, seconds))


class _L2:
    """A cache of whole arrays of which the least recently used one leaves first."""

    def __init__(self, capacity: float) -> None:
        self.capacity, self.used = capacity, 0.0
        self.arrays: OrderedDict[Hashable, tuple[float, bool]] = OrderedDict()

    def missed(self, operation: Operation) -> float:
        """Bytes that an operation moves between the cache and memory."""
        moved = operation.converted if operation.converted > self.capacity else 0.0
        for array, size in operation.reads:
            found = self.arrays.pop(array, None)
            if found is not None:
                self.used -= found[0]
            held, dirty = found or (0.0, False)
            moved += max(0.0, size - held)
            moved += self._insert(array, max(size, held), dirty)
        for array, size in operation.writes:
            found = self.arrays.pop(array, None)
            if found is not None:
                self.used -= found[0]
            moved += self._insert(array, size, True)
        return moved

    def drop(self, arrays: Iterable[Hashable]) -> None:
        """Forget arrays whose memory is free."""
        for array in arrays:
            if (found := self.arrays.pop(array, None)) is not None:
                self.used -= found[0]

    def _insert(self, array: Hashable, size: float, dirty: bool) -> float:
        """Bytes that go to memory when this array enters; one that does not fit streams through."""
        if size > self.capacity:
            return size if dirty else 0.0
        self.arrays[array], self.used = (size, dirty), self.used + size
        moved = 0.0
        while self.used > self.capacity:
            _, (gone, changed) = self.arrays.popitem(last=False)
            self.used -= gone
            moved += gone if changed else 0.0
        return moved


MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "addbmm", "addmv", "mv"})
CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "_convolution"})


def multiplies_in(target: str, dtype: DType, flops: float, tf32: bool) -> str:
    """The type in which a library call multiplies; empty if it is no matmul.

    Convolutions of float32 multiply in TF32, which is PyTorch's default, matmuls do where `tf32` allows them to.
    """
    name = target.split("::")[-1].split(".")[0]
    convolution = any(word in name for word in CONVOLUTIONS)
    matmul = convolution or name in MATMULS or "attention" in name or "linear" in name
    if not matmul or not flops:
        return ""
    return "tf32" if dtype is DType.float32 and (tf32 or convolution) else dtype.name


def operations_of(
    program: Program, costs: Sequence[Cost], value: Callable[[Dim], int], processors: int, tf32: bool = False
) -> Iterator[Operation]:
    """The launches of a program as operations; `value` evaluates sizes. A body of control flow counts once per trip."""
    for launch, cost in zip(program.launches, costs, strict=True):
        written = _written(launch)
        views = _views(program, launch)
        sizes = {slot: float(value(size)) for slot, size in views.items()}
        read, stored = float(value(cost.read)), float(value(cost.written))
        reads = _scaled({s: n for s, n in sizes.items() if s not in written or s in _read_too(launch)}, read)
        writes = _scaled({s: n for s, n in sizes.items() if s in written}, stored)
        flops, dtype = float(value(cost.flops)), ""
        threads, converted, launches = math.inf, 0.0, 1
        if isinstance(launch, CallLaunch):
            dtype = multiplies_in(launch.target, _narrowest(program, launch), flops, tf32)
            converted = _converted(program, launch, value)
        elif isinstance(launch, KernelLaunch) and isinstance(code := program.codes[launch.code], CudaCode | CudaPart):
            blocks = whole_of(code).blocks(value, processors)
            partial = _partial(launch, code, blocks, value)
            if isinstance(code, CudaPart):
                threads = code.threads(value, processors)
                reads, writes = (reads + partial, writes) if code.number else (reads, writes + partial)
            else:
                threads, launches = blocks * code.threads, code.launches
                reads, writes = reads + partial, writes + partial
        width = max(1, _narrowest(program, launch).bytes)
        yield Operation(
            cost.name or cost.operators,
            cost.kind,
            reads,
            writes,
            flops,
            stored / width,
            dtype,
            converted,
            threads,
            launches,
        )


def with_blocks(size: Dim, blocks: int) -> Dim:
    """A size with the number of a kernel's blocks put in."""
    return size if isinstance(size, int) else size.subs(symbol("blocks"), blocks)


def _partial(launch: KernelLaunch, code: CudaCode | CudaPart, blocks: int, value: Callable[[Dim], int]) -> Touched:
    """The scratch arrays of a kernel with so many blocks, which are written and read."""
    places = launch.places[len(launch.places) - len(code.scratch) :] if code.scratch else ()
    sizes = [with_blocks(size, blocks) for size in code.scratch]
    return tuple((place.slot, float(value(size))) for place, size in zip(places, sizes, strict=True))


def _scaled(sizes: dict[int, float], whole: float) -> Touched:
    """Arrays with the bytes that the traffic model counts, in proportion to their sizes."""
    total = sum(sizes.values())
    return tuple((slot, size * whole / total) for slot, size in sizes.items()) if total and whole else ()


def _written(launch: Launch) -> set[int]:
    match launch:
        case KernelLaunch(places=places, writes=writes):
            return {places[i].slot for i in writes}
        case CallLaunch(returns=returns, writes=writes):
            return {*writes, *(slot for slot in returns if slot is not None)}
        case CopyLaunch(pairs=pairs):
            return {target.slot for target, _ in pairs}
        case ControlLaunch(returns=returns):
            return set(returns)


def _read_too(launch: Launch) -> set[int]:
    """Slots that a kernel reads, although it may write them as well."""
    if not isinstance(launch, KernelLaunch):
        return set()
    return {place.slot for i, place in enumerate(launch.places) if i not in launch.writes}


def _arrays(argument: object) -> Iterator[BufferView]:
    if isinstance(argument, BufferView):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _arrays(part)


def _views(program: Program, launch: Launch) -> dict[int, Dim]:
    """Slot -> bytes of what a launch touches of it."""
    sizes: dict[int, Dim] = {}
    match launch:
        case KernelLaunch(places=places, code=code):
            scratch = len(program.codes[code].scratch)
            views: tuple[BufferView, ...] = places[: len(places) - scratch]
            return {view.slot: Tensor(view.shape, view.dtype).bytes for view in views}
        case ControlLaunch(places=places):
            views = places
        case CopyLaunch(pairs=pairs):
            views = tuple(view for pair in pairs for view in pair)
        case CallLaunch(arguments=arguments):
            views = tuple(_arrays(arguments))
    for view in views:
        sizes[view.slot] = Tensor(view.shape, view.dtype).bytes
    for slot in touched(launch):
        sizes.setdefault(slot, program.slots[slot].bytes)
    return sizes


def _narrowest(program: Program, launch: Launch) -> DType:
    types = {program.slots[slot].dtype for slot in touched(launch)}
    return min((t for t in types if t.is_float), key=lambda t: (t.bytes, t.name), default=DType.float32)


def _converted(program: Program, launch: CallLaunch, value: Callable[[Dim], int]) -> float:
    """Bytes that a convolution reorders: its kernels for matmul units read channels-last arrays.

    Row-major images are converted before and after; a row-major weight is beside channels-last images. Source: NVIDIA,
    Convolutional Layers User's Guide, "Tensor Layouts".
    """
    if "convolution" not in launch.target:
        return 0.0
    slots = [program.slots[s] for s in launch.returns if s is not None]
    arrays = [(v.shape, v.strides, v.dtype) for v in _arrays(launch.arguments)]
    arrays += [(s.shape, s.strides, s.dtype) for s in slots]
    return converted_bytes(
        [([value(n) for n in shape], [value(n) for n in strides], dtype.bytes) for shape, strides, dtype in arrays]
    )


def converted_bytes(arrays: Iterable[tuple[Sequence[int], Sequence[int], int]]) -> float:
    """Bytes of the conversions of a convolution whose operands and results have these sizes, strides and widths."""
    images = [a for a in arrays if len(a[0]) > 3]
    wrong = [a for a in images if not _is_last(a[0], a[1])]
    if not wrong:
        return 0.0
    return 2.0 * sum(math.prod(shape) * width for shape, _, width in wrong)


def _is_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the channels vary fastest, or do so as well."""
    order = [0, *range(2, len(shape)), 1]
    step = 1
    for axis in reversed(order):
        if shape[axis] != 1 and strides[axis] != step:
            return False
        step *= shape[axis]
    return True
