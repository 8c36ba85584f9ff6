"""Prediction: what a training step or a forward pass would take on a GPU that is not there, and what PyTorch would.

Nothing runs: the program is lowered for the device, and its launches are timed by the device's figures
(`lowering.device_time`). The kernels of eager execution are timed by the same rules. It is an estimate of ratios, not a
measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from daceml_train.analysis.device_model import DeviceModel
from daceml_train.driver.compile import Lowered
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.eager_operations import eager_operations
from daceml_train.lowering.arena import Lifetime, plan_arena
from daceml_train.lowering.device_time import Operation, Timed, operations_of, timed
from daceml_train.lowering.program import Allocation, Program
from daceml_train.lowering.streams import schedule
from daceml_train.reporting.numbers import bytes_text, counted, number, seconds_text
from daceml_train.runtime.gpu.absent import AbsentGPU
from daceml_train.runtime.gpu.binding import work
from daceml_train.runtime.placement import device_override
from daceml_train.tensor import Dim

Watched = Callable[[Callable[[Callable[[], object]], list[Operation]]], list[Operation]]

HOST_SECONDS = 5e-6
"""What the host takes for an operator of eager PyTorch, from Python to the driver: at the low end of what profiles show
(5 to 25 us). A CUDA graph of a whole step takes the host one launch."""


@dataclass(frozen=True)
class Eager:
    """PyTorch's step: seconds of its kernels one after another, and of the host that launches them."""

    kernels: int
    device_seconds: float
    host_seconds: float

    @property
    def seconds(self) -> float:
        """Host and device work at the same time; the slower one decides."""
        return max(self.device_seconds, self.host_seconds)


@dataclass(frozen=True)
class Prediction:
    """The predicted step: its launches in order."""

    device: DeviceModel
    launches: tuple[Timed, ...] = field(repr=False)
    seconds: float
    """Seconds of the step on its streams."""
    streams: int
    eager: Eager | None = None

    @property
    def alone(self) -> float:
        """Seconds of all launches, one after another."""
        return sum(launch.seconds for launch in self.launches)

    @property
    def speedup(self) -> float | None:
        """Times as fast as eager PyTorch; None if that was not counted."""
        return None if self.eager is None else self.eager.seconds / self.seconds

    @property
    def device_speedup(self) -> float | None:
        """The same where PyTorch's host costs nothing, as in a CUDA graph of its kernels."""
        return None if self.eager is None else self.eager.device_seconds / self.seconds

    def longest(self, count: int = 10) -> list[Timed]:
        """The most expensive launches."""
        return sorted(self.launches, key=lambda launch: -launch.seconds)[:count]

    def bounds(self) -> dict[str, float]:
        """What bounds launches -> their seconds, the largest first."""
        found: dict[str, float] = {}
        for launch in self.launches:
            found[launch.bound] = found.get(launch.bound, 0.0) + launch.seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def __str__(self) -> str:
        total, alone = seconds_text(self.seconds), seconds_text(self.alone)
        bounds = ", ".join(f"{bound} {seconds_text(seconds)}" for bound, seconds in self.bounds().items())
        lines = [
            f"predicted on {self.device.title}, not measured: {total} in {len(self.launches)} launches "
            f"on {counted(self.streams, 'stream')} ({alone} on one)",
            f"bound by {bounds}",
        ]
        if self.eager is not None:
            whole, kernels, host = (
                seconds_text(s) for s in (self.eager.seconds, self.eager.device_seconds, self.eager.host_seconds)
            )
            lines += [
                f"eager PyTorch: {whole} ({self.eager.kernels} kernels {kernels}, host {host}); "
                f"{self.speedup:.2f} times as fast, {self.device_speedup:.2f} times if the host cost nothing"
            ]
        lines.append("the most expensive launches:")
        for launch in self.longest():
            o = launch.operation
            rate = f"{o.flops / 1e9:8.2f} GFLOP" if o.dtype else " " * 14
            lines.append(
                f"  {launch.seconds * 1e6:9.1f} µs  {launch.bound:10} {bytes_text(round(o.bytes)):>9} {rate}  {o.name}"
            )
        return "\n".join(lines)


def predict(
    run: Callable[[], object],
    model: DeviceModel,
    eager: Watched | None = None,
    tf32: bool = False,
) -> Prediction:
    """The prediction for `run`, which calls a training step or an optimized module that was not called before.

    `eager` calls its argument with a function that does the same in PyTorch and has run once, and returns the result;
    so it may enter a mode in which tensors have no memory. `tf32` says whether float32 matmuls may multiply in TF32.
    Raises `Unsupported` if nothing is compiled, or sizes vary.
    """
    with device_override(lambda device: AbsentGPU(model)):
        try:
            run()
        except Lowered as lowered:
            compiled = lowered.compiled
        else:
            raise Unsupported("nothing was compiled for the device; `daceml-train report` says why")
    launches: list[Timed] = []
    seconds, streams = 0.0, 1
    for program, record in zip(compiled.programs, compiled.records, strict=True):
        found = timed(model, operations_of(program, record.costs, known_size, model.processors, tf32))
        plan = _Planned.of(program)
        works = [
            replace(work(plan, i, launch, model), seconds=each.seconds, share=each.busy / each.seconds)
            for i, (launch, each) in enumerate(zip(program.launches, found, strict=True))
        ]
        chosen = schedule(works)
        launches, seconds, streams = launches + found, seconds + chosen.seconds, max(streams, chosen.streams)
    watched = None
    if eager is not None:
        kernels = eager(lambda step: eager_operations(step, tf32))
        device = sum(kernel.seconds for kernel in timed(model, kernels))
        watched = Eager(len(kernels), device, HOST_SECONDS * len(kernels))
    return Prediction(model, tuple(launches), seconds, streams, watched)


def known_size(size: Dim) -> int:
    """The number that a size is, where a kernel has one block. Raises `Unsupported` if sizes vary."""
    found = number(size, {"blocks": 1})
    if not isinstance(found, int):
        raise Unsupported(f"the size {found} varies; a prediction needs known sizes")
    return found


@dataclass
class _Planned:
    """A program with offsets in its arena; see `runtime.gpu.binding.Bound`."""

    program: Program
    offsets: dict[int, int]
    arena_bytes: int
    work: None = None
    used: list[int] = field(default_factory=list)

    @staticmethod
    def of(program: Program) -> _Planned:
        slots = [i for i, s in enumerate(program.slots) if s.home is Allocation.arena and s.first >= 0]
        lives = [Lifetime(known_size(s.bytes), s.first, s.last) for s in (program.slots[i] for i in slots)]
        offsets, size = plan_arena(lives)
        return _Planned(program, dict(zip(slots, offsets, strict=True)), size)

    def bytes_of(self, slot: int) -> int:
        return known_size(self.program.slots[slot].bytes)

    @property
    def value(self) -> Callable[[Dim], int]:
        return known_size
