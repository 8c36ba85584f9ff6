"""Schedule: the launches of one program, what they move, and which arrays are alive during each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from daceml_train.graph.graph import Role
from daceml_train.lowering.cost import Cost
from daceml_train.lowering.footprint import footprint
from daceml_train.lowering.program import Allocation, CallLaunch, ControlLaunch, KernelLaunch, Program, touched
from daceml_train.reporting.model import Kept, Launched
from daceml_train.reporting.numbers import number
from daceml_train.runtime.launch_threads import Share
from daceml_train.tensor import Dim

_UPDATED = (Role.parameter, Role.state)


def _place(share: Share) -> tuple[int, int, int] | None:
    return None if share.segment < 0 else (share.segment, share.lane, share.position)


class Schedule:
    """A program at known sizes; `costs` has one entry per launch."""

    def __init__(self, program: Program, costs: Sequence[Cost], sizes: Mapping[str, int]) -> None:
        self.program, self.costs, self.sizes = program, costs, {"blocks": 1, **sizes}
        self._turn = self._boundary()
        self._footprint = footprint(program, self._number)

    def launches(
        self, program: int, seconds: Sequence[float], shapes: Sequence[str] = (), shares: Sequence[Share] = ()
    ) -> Iterator[Launched]:
        """The launches in order; `program` is 0, or 1 for a backward pass of its own."""
        shapes = shapes if len(shapes) == len(self.costs) else [""] * len(self.costs)
        shares = shares if len(shares) == len(self.costs) else [Share(0)] * len(self.costs)
        times: Sequence[float | None] = seconds if len(seconds) == len(self.costs) else [None] * len(self.costs)
        for index, (cost, spent) in enumerate(zip(self.costs, times, strict=True)):
            yield Launched(
                program,
                cost.kind,
                cost.operators,
                self._kernel(index),
                cost.module,
                cost.source,
                "backward" if program else self._phase(index),
                self._number(cost.bytes),
                self._number(cost.flops),
                spent,
                shapes[index],
                cost.name,
                self._number(cost.network),
                shares[index].threads,
                shares[index].before,
                _place(shares[index]),
            )

    def memory(self) -> list[int]:
        """Bytes of the program's own arrays alive during each launch, scratch memory included."""
        planned = self._footprint
        return [alive + scratch for alive, scratch in zip(planned.live, planned.scratch, strict=True)]

    def inputs(self) -> int:
        """Bytes of inputs and constants."""
        return self._footprint.inputs

    def kept(self, backward: Program | None = None) -> list[Kept]:
        """Arrays produced by the forward pass and read after it; the largest first.

        A `backward` pass that is another program reads the last outputs of this one; the others are the caller's.
        """
        apart = backward is not None
        turn = len(self.program.launches) - 1 if apart else self._turn
        count = sum(entry.role is Role.saved for entry in backward.inputs) if backward is not None else 0
        outputs = self.program.outputs
        results = {place.slot for place in outputs[len(outputs) - count :]}
        saved = []
        for number_, slot in enumerate(self.program.slots):
            lives = number_ in results if apart else slot.last > turn
            if slot.home is Allocation.input or not 0 <= slot.first <= turn or not lives:
                continue
            shape = ", ".join(str(number(size, self.sizes)) for size in slot.shape)
            cost = self.costs[slot.first] if slot.first < len(self.costs) else Cost("", "", "", "")
            saved.append(Kept(f"{slot.dtype.name}[{shape}]", self._number(slot.bytes), cost.operators, cost.module))
        return sorted(saved, key=lambda k: -k.bytes)

    def _boundary(self) -> int:
        """The launch that produces the first output, in a step the loss; the backward pass follows."""
        if not any(entry.role in _UPDATED and entry.mutable for entry in self.program.inputs):
            return len(self.program.launches) - 1
        return max((self.program.slots[p.slot].first for p in self.program.outputs[:1]), default=-1)

    def _phase(self, index: int) -> str:
        if index <= self._turn:
            return "forward"
        inputs = self.program.inputs
        slots = (self.program.slots[s] for s in touched(self.program.launches[index]))
        updates = any(s.mutable and inputs[s.input].role in _UPDATED for s in slots if s.home is Allocation.input)
        return "update" if updates else "backward"

    def _kernel(self, index: int) -> str:
        launch = self.program.launches[index]
        if isinstance(launch, KernelLaunch):
            return self.program.codes[launch.code].key[:12]
        if isinstance(launch, ControlLaunch):
            return launch.kind
        return launch.target if isinstance(launch, CallLaunch) else "copy"

    def _number(self, size: Dim) -> int:
        value = number(size, self.sizes)
        return value if isinstance(value, int) else 0
