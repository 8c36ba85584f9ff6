"""Prepacked weights: what depends on parameters only, computed once and kept until one of them changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from daceml_train.lowering.program import ProgramInput
from daceml_train.runtime.executable import Executable
from daceml_train.runtime.native_library import fingerprint
from daceml_train.runtime.prepack import packed

RECENT, CHANGES = 8, 4
"""Where weights were packed in so many of the last calls, that takes longer than it saves."""

_ARRAY = -1
"""Stands for the position of an input."""

Run = Callable[[Executable, Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class _State:
    """The arrays computed from parameters with the fingerprint `seen`: the main program's inputs by position."""

    seen: int
    arrays: dict[int, torch.Tensor]
    parameters: list[torch.Tensor]
    """Kept with their memory, so that no other tensor can have an address that was seen."""


class Prepared(NamedTuple):
    """What a call of the main program takes; see `driver.native_call`."""

    watched: tuple[int, ...]
    """The inputs from which it is computed."""
    seen: int
    """Their fingerprint."""
    positions: tuple[int, ...]
    """Per operand of the forward program, the input that it is; -1 for one of `arrays`."""
    arrays: tuple[torch.Tensor | None, ...]
    parameters: tuple[torch.Tensor, ...]
    """Kept, as in `_State`."""


class PrepackedWeights:
    """The inputs of a program that depend on parameters only: recomputed when one of those changes.

    `weights_only` computes arrays from the graph's inputs `read`; the main program takes the graph's inputs `taken`,
    then those arrays, as its `entries` say, some of them laid out by a library. A change is detected by address,
    version counter and sampled numbers; see `native_library.fingerprint`. Parameters created in inference mode have no
    version, so their arrays are computed at every call.
    """

    def __init__(
        self,
        weights_only: Executable | None,
        read: Sequence[int],
        taken: Sequence[int],
        entries: Sequence[ProgramInput],
    ) -> None:
        self.weights_only, self.read, self.taken = weights_only, tuple(read), tuple(taken)
        self.packings = {k: entry for k, entry in enumerate(entries) if entry.packing is not None}
        direct = (self.taken[k] for k in self.packings if k < len(self.taken))
        self.watched = tuple(dict.fromkeys((*self.read, *direct)))
        """The graph's inputs that something is computed from."""
        self.computed = 0
        """How often the arrays were computed."""
        self._recent: deque[bool] = deque(maxlen=RECENT)
        """Whether each of the last calls computed them."""
        self._state: _State | None = None

    def __call__(self, inputs: Sequence[torch.Tensor], run: Run) -> list[torch.Tensor]:
        """The main program's inputs, from those of the graph; `run` runs the weights-only program."""
        given = [inputs[i] for i in self.taken]
        parameters = [inputs[i] for i in self.watched]
        seen, state = fingerprint(parameters), self._state
        fresh = state is None or seen is None or state.seen != seen
        self._recent.append(fresh)
        if state is None or fresh:
            arrays = self._compute(inputs, given, run)
            state = _State(seen or 0, arrays, [parameter.detach() for parameter in parameters])
            self._state = None if seen is None else state
        for position in range(len(given)):
            if position in self.packings:
                given[position] = state.arrays[position]
        return [*given, *(state.arrays[k] for k in range(len(given), len(given) + self._computed))]

    @property
    def changes(self) -> bool:
        """Whether the weights change from call to call: an average of parameters, or a module between its updates."""
        return sum(self._recent) >= CHANGES

    @property
    def prepared(self) -> Prepared | None:
        """What the last call took, for calls without Python; None where it is computed at every call."""
        state, taken = self._state, len(self.taken)
        if state is None:
            return None
        arrays = tuple(state.arrays.get(k) for k in range(taken + self._computed))
        positions = tuple(self.taken[k] if array is None else _ARRAY for k, array in enumerate(arrays))
        return Prepared(self.watched, state.seen, positions, arrays, tuple(state.parameters))

    @property
    def _computed(self) -> int:
        return 0 if self.weights_only is None else len(self.weights_only.program.outputs)

    def _compute(
        self, inputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], run: Run
    ) -> dict[int, torch.Tensor]:
        """The computed and packed inputs of the main program, by position."""
        self.computed += 1
        results = [] if self.weights_only is None else run(self.weights_only, [inputs[i] for i in self.read])
        every = [*given, *results]
        plain = {k: every[k] for k in range(len(given), len(every)) if k not in self.packings}
        return plain | {k: packed(entry, every[k]) for k, entry in self.packings.items()}
