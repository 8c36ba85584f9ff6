"""Preparation: what depends on parameters alone, made once and kept until one of them changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from daceml_train.runtime.executable import Executable
from daceml_train.runtime.executor import fingerprint

Run = Callable[[Executable, Sequence[torch.Tensor]], list[torch.Tensor]]


class Preparation:
    """The arrays that a program takes and that depend on parameters alone: made anew when one of those changed.

    A change is seen by address, version counter and sampled numbers; see `runtime.executor.fingerprint`. Parameters
    made in inference mode have no version, so theirs are made at every call.
    """

    def __init__(self, prologue: Executable, read: Sequence[int], taken: Sequence[int]) -> None:
        self.prologue, self.read, self.taken = prologue, tuple(read), tuple(taken)
        self.made = 0
        """How often the arrays were made."""
        self._state: tuple[int, list[torch.Tensor], list[torch.Tensor]] | None = None

    def __call__(self, inputs: Sequence[torch.Tensor], run: Run) -> list[torch.Tensor]:
        """The main program's inputs, from those of the graph; `run` runs the prologue."""
        parameters = [inputs[i] for i in self.read]
        now, state = fingerprint(parameters), self._state
        if state is None or now is None or state[0] != now:
            made = run(self.prologue, parameters)
            self.made += 1
            if now is None:
                return [*(inputs[i] for i in self.taken), *made]
            # What is kept keeps its memory, so that no other tensor can lie at an address that was seen.
            state = (now, made, [parameter.detach() for parameter in parameters])
            self._state = state
        return [*(inputs[i] for i in self.taken), *state[1]]
