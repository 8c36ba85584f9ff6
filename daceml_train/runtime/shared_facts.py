"""What the plans of a program share: all that does not depend on sizes."""

from __future__ import annotations

from daceml_train.lowering.program import Allocation, KernelLaunch, Program, library_results, touching
from daceml_train.runtime.chosen_matmuls import candidates
from daceml_train.runtime.size_values import SizeTable


class SharedFacts:
    """What every plan of a program would find out again, and the table of its size expressions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = SizeTable()
        self.touching = touching(program)
        """Per slot the launches that read or write it."""
        self.used = [i for i, s in enumerate(program.slots) if s.first >= 0 or s.home is Allocation.input]
        self.owners = list(dict.fromkeys(place.slot for place in program.outputs))
        """Slots that are handed over, or parts of them."""
        self.handed = frozenset(self.owners)
        self.library_results = library_results(program)
        self.matmuls = candidates(program)
        self.scratch: list[tuple[int, tuple[int, ...]]] = []
        """Per kernel launch that has scratch memory, its code and the slots of that memory."""
        for launch in program.launches:
            if isinstance(launch, KernelLaunch) and (kept := len(program.codes[launch.code].scratch)):
                self.scratch.append((launch.code, tuple(place.slot for place in launch.places[-kept:])))
        self._bodies: dict[int, SharedFacts] = {}

    def of(self, body: Program) -> SharedFacts:
        """The same for the body of a launch of this program."""
        if id(body) not in self._bodies:
            self._bodies[id(body)] = SharedFacts(body)  # which keeps the body, and so its identity
        return self._bodies[id(body)]


__all__ = ["SharedFacts"]
