"""The launch configuration of each large kernel on a GPU, measured once per set of sizes and stored on disk.

The default configuration comes from a machine model. Its neighbors are compiled with it, in one library, and timed on
memory of the launch's sizes. Kernels that take no longer than their launch are not tuned.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.cuda.launch import CudaPart
from daceml_train.errors import DacemlError
from daceml_train.lowering.device import GPU
from daceml_train.lowering.program import Allocation, Buffer, BufferView, KernelLaunch, Program
from daceml_train.storage.files import keep
from daceml_train.tensor import Dim, DType

LEAST_BYTES = 4 << 20
"""Bytes of a launch's arrays below which tuning cannot pay: such a launch takes microseconds."""
MOST_KERNELS = 24
"""Kernels of a program that are measured: those that move the most bytes."""
ROTATED = 256 << 20
"""Bytes over which a timed launch rotates its arrays, so that no cache holds them; eight sets at most."""
MARGIN = 0.97
"""Another configuration is chosen if it takes at most this share of the default's time."""

Value = Callable[..., int]
"""The value of a size, which may depend on `blocks`."""


@dataclass
class Autotuner:
    """Configurations found so far, by kernel and sizes; `path` is the file that stores them (None: in memory only)."""

    path: Path | None
    libraries: Path
    """The folder of compiled kernels."""
    jobs: int | None = None
    chosen: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Why kernels could not be measured."""
    measured: list[int] = field(default_factory=list)
    """Kernels of the last tuned program that have several configurations."""

    def __post_init__(self) -> None:
        if self.path is not None:
            self.chosen |= _stored(self.path)

    def tuned(
        self, program: Program, addresses: Mapping[str, int], value: Value, device: GPU
    ) -> tuple[Program, dict[str, int]]:
        """The program with the fastest configuration of each large kernel for these sizes, and kernel addresses."""
        known, self.measured = dict(addresses), []
        tried = {number: device.toolchain.variants(program.codes[number]) for number in large(program, value)}
        tried = {number: codes for number, codes in tried.items() if len(codes) > 1}
        if not tried:
            return program, known
        try:
            every = [code for codes in tried.values() for code in codes[1:]]
            every += [code.whole.parts[1] for code in every if isinstance(code, CudaPart)]
            results = device.toolchain.addresses(every, self.libraries, self.jobs, None)
        except DacemlError as error:  # the default kernels are compiled
            self.notes.append(f"no kernels were autotuned: {error}")
            return program, known
        known |= {key: address for key, (address, _) in results.items()}
        best: dict[int, KernelCode] = {}
        for number, codes in tried.items():
            key = _key(codes[0], value, device)
            names = [shape(code) for code in codes]
            if self.chosen.get(key) not in names:
                try:
                    self.chosen[key] = names[self.fastest(program, number, codes, known, value, device)]
                except (RuntimeError, torch.OutOfMemoryError) as error:  # no room, or a launch that is refused
                    self.notes.append(f"{codes[0].key} keeps its default launch configuration: {error}")
                    continue
                self.save()
            best[number] = codes[names.index(self.chosen[key])]
            self.measured.append(number)
        return reshaped(program, best), known

    def fastest(
        self,
        program: Program,
        number: int,
        codes: Sequence[KernelCode],
        addresses: Mapping[str, int],
        value: Value,
        device: GPU,
    ) -> int:
        """The fastest of a kernel's variants on memory of the sizes of its first launch."""
        launch = next(x for x in program.launches if isinstance(x, KernelLaunch) and x.code == number)
        places = launch.places[: len(launch.places) - len(codes[0].scratch)]
        slots = dict.fromkeys(place.slot for place in places)
        sizes = {slot: max(16, value(program.slots[slot].bytes)) for slot in slots}
        count = max(1, min(8, -(-ROTATED // sum(sizes.values()))))
        with device.quiet():
            sets = [{slot: _zeros(device, size) for slot, size in sizes.items()} for _ in range(count)]
            runs = [_runner(code, addresses[code.key], places, sets, value, device) for code in codes]
            times = device.times(runs)
        best = min(range(len(times)), key=times.__getitem__)
        return best if times[best] <= MARGIN * times[0] else 0

    def save(self) -> None:
        """Write the results atomically, merged with those that other processes stored in the meantime."""
        if self.path is None:
            return
        keep(self.path, json.dumps(_stored(self.path) | self.chosen, indent=0).encode())


def large(program: Program, value: Value) -> list[int]:
    """The kernels of a program that move the most bytes, in the order of the bytes of all their launches."""
    moved: dict[int, int] = {}
    once: dict[int, int] = {}
    for launch in program.launches:
        if isinstance(launch, KernelLaunch):
            slots = {p.slot for p in launch.places[: len(launch.places) - len(program.codes[launch.code].scratch)]}
            size = sum(value(program.slots[slot].bytes) for slot in slots)
            once[launch.code] = max(size, once.get(launch.code, 0))
            moved[launch.code] = moved.get(launch.code, 0) + size
    found = [number for number in moved if once[number] >= LEAST_BYTES]
    return sorted(found, key=lambda number: -moved[number])[:MOST_KERNELS]


def reshaped(program: Program, codes: Mapping[int, KernelCode]) -> Program:
    """The program with other variants of some kernels, which have scratch memory of their own."""
    codes = {number: code for number, code in codes.items() if code is not program.codes[number]}
    if not codes:
        return program
    slots, launches = list(program.slots), list(program.launches)
    for index, launch in enumerate(launches):
        if isinstance(launch, KernelLaunch) and launch.code in codes:
            kept = len(launch.places) - len(program.codes[launch.code].scratch)
            for place in launch.places[kept:]:
                slots[place.slot] = replace(slots[place.slot], first=-1, last=-1)
            scratch = []
            last = index + isinstance(codes[launch.code], CudaPart)
            for size in codes[launch.code].scratch:
                slots.append(Buffer(Allocation.arena, DType.uint8, (size,), (1,), first=index, last=last))
                scratch.append(BufferView(len(slots) - 1, DType.uint8, (size,), (1,)))
            places, written = (*launch.places[:kept], *scratch), [i for i in launch.writes if i < kept]
            launches[index] = replace(launch, places=places, writes=(*written, *range(kept, len(places))))
            if isinstance(first := codes[launch.code], CudaPart):
                following = launches[last]
                assert isinstance(following, KernelLaunch)
                launches[last] = _second(following, len(program.codes[following.code].scratch), first, scratch)
    chosen = [codes.get(number, code) for number, code in enumerate(program.codes)]
    for number, code in enumerate(program.codes):
        if isinstance(code, CudaPart) and code.number and isinstance(first := chosen[number - 1], CudaPart):
            chosen[number] = first.whole.parts[1]
    return replace(program, slots=slots, codes=chosen, launches=launches)


def _second(launch: KernelLaunch, held: int, first: CudaPart, scratch: Sequence[BufferView]) -> KernelLaunch:
    """The second launch of a kernel in two parts, on the scratch arrays of another variant of the first one."""
    own, after = first.whole.parts[1], first.positions[len(first.positions) - len(scratch)]
    read = [scratch[position - after] for position in own.positions[len(own.positions) - len(own.scratch) :]]
    return replace(launch, places=(*launch.places[: len(launch.places) - held], *read))


def shape(code: KernelCode) -> str:
    """The name of a code among the variants of its kernel."""
    return str(getattr((code.whole if isinstance(code, CudaPart) else code).plan, "geometry", ""))


def _runner(
    code: KernelCode,
    address: int,
    places: Sequence[BufferView],
    sets: Sequence[Mapping[int, torch.Tensor]],
    value: Value,
    device: GPU,
) -> Callable[[int], None]:
    """A launch of a kernel on one of several sets of arrays."""
    blocks = device.toolchain.blocks(code, value, 1)
    numbers = [value(size, blocks) for size in code.integers]
    scratch = [_zeros(device, max(16, value(size, blocks))) for size in code.scratch]
    integers = (ctypes.c_int64 * len(numbers))(*numbers)
    pointers = []
    for arrays in sets:
        addresses = [arrays[p.slot].data_ptr() + value(p.offset) * p.dtype.bytes for p in places]
        addresses += [array.data_ptr() for array in scratch]
        pointers.append((ctypes.c_void_p * max(1, len(addresses)))(*addresses))

    def run(turn: int, _keep: Any = (sets, scratch)) -> None:
        device.kernel(address, pointers[turn % len(pointers)], integers)

    return run


def _zeros(device: GPU, size: int) -> torch.Tensor:
    """Memory that is a valid index wherever one is read."""
    return torch.zeros(size, dtype=torch.uint8, device=device.torch)


def _key(code: KernelCode, value: Callable[[Dim], int], device: GPU) -> str:
    """A kernel at these sizes on this device; sizes that vary from call to call are rounded up to powers of two."""
    sizes = [size if isinstance(size, int) else 1 << (max(1, value(size)) - 1).bit_length() for size in code.integers]
    return f"{device.name} {code.key} {' '.join(map(str, sizes[1:]))}"


def _stored(path: Path) -> dict[str, str]:
    """The entries of a file; none if it is damaged."""
    try:
        known = json.loads(path.read_text())
        return {str(key): str(name) for key, name in known.items()}
    except (OSError, ValueError, AttributeError):
        return {}
