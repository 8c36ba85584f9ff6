"""Preparation: what depends on parameters alone, made once and kept until one of them changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from daceml_train.lowering.program import ProgramInput
from daceml_train.runtime.executable import Executable
from daceml_train.runtime.executor import fingerprint
from daceml_train.runtime.prepack import packed

Run = Callable[[Executable, Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class _State:
    """What was made of parameters that looked like `seen`: the main program's inputs by position."""

    seen: int
    made: dict[int, torch.Tensor]
    parameters: list[torch.Tensor]
    """Kept with their memory, so that no other tensor can lie at an address that was seen."""


class PrepackedWeights:
    """The arrays that a program takes and that depend on parameters alone: made anew when one of those changed.

    `prologue` makes arrays from the graph's inputs `read`; the main program takes the graph's inputs `taken`, and those
    arrays behind them, as its `entries` say, some of them laid out by a library. A change is seen by address, version
    counter and sampled numbers; see `runtime.executor.fingerprint`. Parameters made in inference mode have no version,
    so theirs is made at every call.
    """

    def __init__(
        self, prologue: Executable | None, read: Sequence[int], taken: Sequence[int], entries: Sequence[ProgramInput]
    ) -> None:
        self.prologue, self.read, self.taken = prologue, tuple(read), tuple(taken)
        self.packings = {k: entry for k, entry in enumerate(entries) if entry.packing is not None}
        direct = (self.taken[k] for k in self.packings if k < len(self.taken))
        self.watched = tuple(dict.fromkeys((*self.read, *direct)))
        """The graph's inputs that something is made of."""
        self.made = 0
        """How often the arrays were made."""
        self._state: _State | None = None

    def __call__(self, inputs: Sequence[torch.Tensor], run: Run) -> list[torch.Tensor]:
        """The main program's inputs, from those of the graph; `run` runs the prologue."""
        given = [inputs[i] for i in self.taken]
        parameters = [inputs[i] for i in self.watched]
        now, state = fingerprint(parameters), self._state
        if state is None or now is None or state.seen != now:
            made = self._make(inputs, given, run)
            state = _State(now or 0, made, [parameter.detach() for parameter in parameters])
            self._state = None if now is None else state
        for position in range(len(given)):
            if position in self.packings:
                given[position] = state.made[position]
        return [*given, *(state.made[k] for k in range(len(given), len(given) + self._behind))]

    @property
    def _behind(self) -> int:
        return 0 if self.prologue is None else len(self.prologue.program.outputs)

    def _make(self, inputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], run: Run) -> dict[int, torch.Tensor]:
        """What the main program takes and cannot take from the graph's inputs as they are, by position."""
        self.made += 1
        behind = [] if self.prologue is None else run(self.prologue, [inputs[i] for i in self.read])
        every = [*given, *behind]
        plain = {k: every[k] for k in range(len(given), len(every)) if k not in self.packings}
        return plain | {k: packed(entry, every[k]) for k, entry in self.packings.items()}
